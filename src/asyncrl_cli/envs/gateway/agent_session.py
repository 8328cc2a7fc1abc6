"""An agent's session: one trajectory, of which only the requests are seen. They become the contexts of a
conversation.

A request carries all messages of a chat. It is matched to the longest context so far that fits:

    its messages begin with those of a context,      the context's ids + ids of the new messages
    including the answers that it got
    its ids, rendered anew, begin with all           the context's ids + the remaining ones
    ids of a context
    otherwise (a rewritten history, a second chat)   a new context: a fork, prompt and all

So sampled ids are never tokenized again where they are trained. Contexts change only when a response is
complete: an aborted request leaves no trace, and if two requests continue the same context at once, the
second one to end makes a fork.

Texts are tokenized in a thread, so that a long one holds up no other session. Contexts are only read and
changed in the event loop.

The user's function runs in a child (`task.agent`):

    Episode ─> AgentEnvironment.play ─> a session ─> RewardPool: episode(client, item) ─> reward ─> End
                                            ^                         │
                                            └─ the client's requests ─┘

Who waits for whom: `play` waits for the agent or for a failure of the engine. The pool ends an agent that
blocks (`env.tool_timeout_s`) or takes too long (`env.episode_timeout_s`). A request waits for the engine,
which holds it back during a weight load. Closing a session ends its requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.environment import End, EpisodeFailed, Message, Rewards, SelfPlayed
from asyncrl_cli.engines.port import Completion, Engine, Sampling
from asyncrl_cli.envs.chat import FAR, Tools
from asyncrl_cli.envs.conversation import Context, Conversation
from asyncrl_cli.envs.episode import Episode, Limits, derived_seed
from asyncrl_cli.envs.gateway.openai_api import (
    ChatRequest,
    ModelRequest,
    Refused,
    Reply,
    TextRequest,
    message_key,
)
from asyncrl_cli.sandbox.parent_rewards import RewardFailed

if TYPE_CHECKING:
    from asyncrl_cli.envs.gateway.server import Gateway

OnRunning = Callable[[int], None]
CLOSED = "this session is closed: its trajectory has ended"


@dataclass(slots=True, eq=False)
class Session:
    """`id` names its requests to the engine. `on_running(number of running requests)` is called at every
    change, until the session is closed. `finish_reason`: of the last answer, or why there was no further one
    ("length", "max_turns")."""

    id: str
    engine: Engine
    conversation: Conversation
    sampling: Sampling
    limits: Limits
    seed: int
    on_running: OnRunning = lambda running: None
    is_open: bool = True
    reward: float | None = None
    finish_reason: str = ""
    failed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Gets the engine's error, if it fails during a request; the client is only told that there is no
    answer."""
    _running: set[str] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def reply(self, request: ChatRequest | TextRequest) -> Reply:
        """The next message of a chat, or a response to a text or token ids. Raises Refused, and EpisodeFailed
        for what the chat template or the tokenizer refuses."""
        return await (self._chat(request) if isinstance(request, ChatRequest) else self._complete(request))

    async def _chat(self, request: ChatRequest) -> Reply:
        messages, tools, chat = (
            [message.plain() for message in request.messages],
            request.offered_tools(),
            self.conversation.chat,
        )
        found = await self._continued(messages, tools)
        context, prompt = found or self._context_of(await asyncio.to_thread(chat.render, messages, tools))
        completion = await self._generated(prompt, request)
        answer = chat.parse(prompt, completion, tools)
        message = {**answer.message, "content": _before(answer.message.get("content") or "", request.stops)}
        self._keep(context, prompt, completion, [*messages, message], tools)
        return Reply(prompt_tokens=prompt, completion=completion, message=message, decode=chat.decode)

    async def _complete(self, request: TextRequest) -> Reply:
        chat = self.conversation.chat
        asked = request.prompt
        context, prompt = self._context_of(
            asked if isinstance(asked, list) else await asyncio.to_thread(chat.encode, asked)
        )
        completion = await self._generated(prompt, request)
        self._keep(context, prompt, completion, [], ())
        text = _before(chat.decode(completion.tokens), request.stops)
        return Reply(
            prompt_tokens=prompt, completion=completion, message={"content": text}, decode=chat.decode
        )

    async def close(self) -> None:
        """End the session: its requests end soon after, and leave no trace."""
        self.is_open = False
        for request_id in list(self._running):
            await self.engine.abort(request_id)

    async def _continued(self, messages: Sequence[Message], tools: Tools) -> tuple[Context, list[int]] | None:
        """The longest context whose messages `messages` continue, and its ids with those of the new
        messages."""
        asked = [message_key(message) for message in messages]
        for context in sorted(
            self.conversation.contexts, key=lambda context: len(context.messages), reverse=True
        ):
            num = len(context.messages)
            if (
                0 < num < len(asked)
                and context.tools == tools
                and asked[:num] == [message_key(message) for message in context.messages]
            ):
                # the context may grow meanwhile
                tokens, bridge = list(context.tokens), self.conversation.chat.bridge
                added = await asyncio.to_thread(bridge, tokens, context.messages, messages[num:], tools)
                if added is not None:
                    return context, tokens + added
        return None

    def _context_of(self, tokens: list[int]) -> tuple[Context, list[int]]:
        """The longest context with which `tokens` begin, or a new one."""
        fitting = [context for context in self.conversation.contexts if context.begins(tokens)]
        return max(fitting, key=lambda context: len(context.tokens), default=Context()), tokens

    async def _generated(self, prompt: list[int], request: ModelRequest) -> Completion:
        sampling, number = self._sampling_for(prompt, request), next(self._numbers)
        seed = self.seed if number == 1 else derived_seed(self.seed, str(number - 1))
        with self._counted(number) as request_id:
            try:
                first_version = self.conversation.first_version
                completion = await self.engine.generate(
                    request_id, prompt, sampling, seed, first_version=first_version
                )
            except ValueError as error:
                raise Refused(400, str(error)) from None
            except ExecutorFailed as error:
                if not self.failed.done():
                    self.failed.set_exception(error)
                    self.failed.exception()  # mark it as seen: an admin session has nobody who awaits it
                raise Refused(503, str(error)) from None
        if not self.is_open or completion.finish_reason == "abort":
            raise Refused(410, CLOSED, "session_closed")
        return completion

    @contextmanager
    def _counted(self, number: int) -> Iterator[str]:
        """Yields the request's id for the engine: the session's own id, unless another of its requests is
        running."""
        request_id = f"{self.id}/{number}" if self._running else self.id
        self._running.add(request_id)
        self.on_running(len(self._running))
        try:
            yield request_id
        finally:
            self._running.discard(request_id)
            if self.is_open:  # otherwise nobody waits for the agent any more
                self.on_running(len(self._running))

    def _sampling_for(self, prompt: list[int], request: ModelRequest) -> Sampling:
        """The profile's sampling, within the request's limits. Raises Refused if there is no room for a
        response."""
        limits = self.limits
        if not self.is_open:
            raise Refused(410, CLOSED, "session_closed")
        if not prompt:
            raise Refused(400, "the prompt has no tokens")
        if self.conversation.num_turns + len(self._running) >= limits.max_turns:
            self.finish_reason = "max_turns"
            raise Refused(
                400, f"this trajectory has had its env.max_turns = {limits.max_turns} answers", "max_turns"
            )
        room = limits.max_context_tokens - len(prompt)
        if room < 1:
            more = " or more" if len(prompt) > FAR * limits.max_context_tokens else ""
            raise self.too_long(f"the prompt has {len(prompt)}{more}")
        asked = (request.max_tokens, request.max_completion_tokens)
        most = min(filter(None, (self.sampling.max_response_tokens, *asked, room)))
        return replace(self.sampling, max_response_tokens=most, stop=(*self.sampling.stop, *request.stops))

    def too_long(self, why: str) -> Refused:
        """The refusal of a request that is longer than a context may be."""
        self.finish_reason = "length"
        # agents look for OpenAI's words
        most = f"{self.limits.max_context_tokens} tokens (env.max_context_tokens)"
        return Refused(
            400, f"this model's maximum context length is {most}; {why}", "context_length_exceeded"
        )

    def _keep(
        self,
        context: Context,
        prompt: list[int],
        completion: Completion,
        messages: list[Message],
        tools: Tools,
    ) -> None:
        """Add a whole response to the context, or to a new one if that has grown meanwhile."""
        if not context.begins(prompt):
            context = Context()
        context.tools = tools
        self.conversation.keep(context, prompt, completion, messages)
        self.finish_reason = completion.finish_reason


def _before(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string, which OpenAI leaves out of the answer. The sampled tokens keep
    it."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found, default=len(text))]


MAX_STARTS = 3
"""How often an episode may start, if each time another episode kills the process that they share."""
KINDS = {"timed-out": "episode-timeout", "blocked": "tool-timeout", "died": "tool-died", "lost": "tool-died"}
"""Kinds of EpisodeFailed by those of RewardFailed. All others become `agent`: it raised, or returned no
number."""


@dataclass(eq=False)
class AgentEnvironment(SelfPlayed):
    """The environment of one episode that an agent plays: `agents.score(item, access)` runs the agent and
    returns its reward."""

    gateway: Gateway
    agents: Rewards

    async def play(self, episode: Episode) -> End:
        for start in range(1, MAX_STARTS + 1):
            try:
                reward = await self._played(episode)
                break
            except RewardFailed as failed:
                # "lost": another agent killed the process that they share; start again.
                if failed.kind != "lost" or start == MAX_STARTS:
                    kind = KINDS.get(failed.kind, "agent")
                    raise EpisodeFailed(kind, f"agent of {episode.id}: {failed}") from None
        if not episode.conversation.num_sampled:
            raise EpisodeFailed("agent", f"agent of {episode.id}: it ended without an answer from the model")
        return End(reward=float(reward))

    async def _played(self, episode: Episode) -> float:
        """Run the agent once, with a new conversation. Raises RewardFailed, and the engine's errors."""
        # The tokens of an earlier start are never trained.
        episode.lost_tokens += episode.conversation.num_sampled
        episode.conversation = Conversation(episode.means.chat)

        def on_running(running: int) -> None:
            episode.waits_for("" if running else "agent")

        session, access = self.gateway.open_session(
            episode.id, episode.conversation, episode.sampling, episode.seed, on_running
        )
        playing = asyncio.ensure_future(self.agents.score(episode.item, access))
        episode.waits_for("agent")
        try:
            waited: set[asyncio.Future[Any]] = {playing, session.failed}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                session.failed.result()
            return await playing
        finally:
            playing.cancel()
            episode.waits_for("")
            episode.finish_reason = session.finish_reason
            await self.gateway.close_session(session)
