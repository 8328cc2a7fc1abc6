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

A request waits for the engine, which holds it back during a weight load. Closing a session ends its requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.environment import Message, ToolSchema
from asyncrl_cli.engines.port import Completion, Engine, Sampling
from asyncrl_cli.envs.chat import FAR, Tools
from asyncrl_cli.envs.conversation import Context, Conversation
from asyncrl_cli.envs.episode import Limits, derived_seed
from asyncrl_cli.envs.gateway.openai_api import (
    ChatRequest,
    ModelRequest,
    Refused,
    Reply,
    TextRequest,
    message_key,
)

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
        chat, messages, tools = self.conversation.chat, list[Message](), tuple[ToolSchema, ...]()
        if isinstance(request, TextRequest):
            text = request.prompt
            tokens = text if isinstance(text, list) else await asyncio.to_thread(chat.encode, text)
            context, prompt = self._context_of(tokens)
            completion = await self._generated(prompt, request)
            message: Message = {"content": _before(chat.decode(completion.tokens), request.stops)}
        else:
            messages = [message.plain() for message in request.messages]
            if request.tool_choice != "none":
                tools = tuple(tool.model_dump() for tool in request.tools or ())
            found = await self._continued(messages, tools)
            context, prompt = found or self._context_of(await asyncio.to_thread(chat.render, messages, tools))
            completion = await self._generated(prompt, request)
            message = chat.parse(prompt, completion, tools).message
            message = {**message, "content": _before(message.get("content") or "", request.stops)}
            messages.append(message)
        if not context.begins(prompt):  # it has grown meanwhile: the response goes into a new one
            context = Context()
        context.tools = tools
        self.conversation.keep(context, prompt, completion, messages)
        self.finish_reason = completion.finish_reason
        return Reply(prompt_tokens=prompt, completion=completion, message=message, decode=chat.decode)

    async def close(self) -> None:
        """End the session: its requests end soon after, and leave no trace."""
        self.is_open = False
        for request_id in list(self._running):
            await self.engine.abort(request_id)

    async def _continued(self, messages: Sequence[Message], tools: Tools) -> tuple[Context, list[int]] | None:
        """The longest context whose messages `messages` continue, and its ids with those of the new
        messages."""
        asked = [message_key(message) for message in messages]
        contexts = self.conversation.contexts
        for context in sorted(contexts, key=lambda context: len(context.messages), reverse=True):
            seen = [message_key(message) for message in context.messages]
            num = len(seen)
            if 0 < num < len(asked) and context.tools == tools and asked[:num] == seen:
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
        """The response, with the profile's sampling within the request's limits. Raises Refused if there is
        no room for a response, or no answer."""
        limits, num_prompt = self.limits, len(prompt)
        if not self.is_open:
            raise Refused(410, CLOSED, "session_closed")
        if not prompt:
            raise Refused(400, "the prompt has no tokens")
        if self.conversation.num_turns + len(self._running) >= limits.max_turns:
            self.finish_reason = "max_turns"
            why = f"this trajectory has had its env.max_turns = {limits.max_turns} answers"
            raise Refused(400, why, "max_turns")
        room = limits.max_context_tokens - num_prompt
        if room < 1:
            more = " or more" if num_prompt > FAR * limits.max_context_tokens else ""
            raise self.too_long(f"the prompt has {num_prompt}{more}")
        asked = (request.max_tokens, request.max_completion_tokens)
        most = min(filter(None, (self.sampling.max_response_tokens, *asked, room)))
        stops = (*self.sampling.stop, *request.stops)
        sampling = replace(self.sampling, max_response_tokens=most, stop=stops)
        number, first_version = next(self._numbers), self.conversation.first_version
        seed = self.seed if number == 1 else derived_seed(self.seed, str(number - 1))
        with self._counted(number) as request_id:
            try:
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

    def too_long(self, why: str) -> Refused:
        """The refusal of a request that is longer than a context may be."""
        self.finish_reason = "length"
        # agents look for OpenAI's words
        most = f"{self.limits.max_context_tokens} tokens (env.max_context_tokens)"
        what = f"this model's maximum context length is {most}; {why}"
        return Refused(400, what, "context_length_exceeded")


def _before(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string, which OpenAI leaves out of the answer. The sampled tokens keep
    it."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found, default=len(text))]
