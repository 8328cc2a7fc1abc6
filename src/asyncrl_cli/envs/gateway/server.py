"""The gateway: a rollout worker serves OpenAI's API to users' agents, by default on loopback.

    /health                                 is the server there?
    /sessions/{id}/v1/chat/completions      an agent's requests; its client's base URL is `/sessions/{id}/v1`
    /sessions/{id}/v1/completions
    /sessions/{id}/v1/models
    /sessions/{id}/reward                   GET, POST
    /v1/...                                 the same with the admin key, outside of any trajectory
    /weights, /weights/load, /pause, /resume    admin key (admin_routes.py)
    /async_rl/..., /abort, /metrics             admin key, only by `asyncrl serve` (async_rl_routes.py)

Every request but /health needs a key, as `Authorization: Bearer <key>`; each session has its own. A wrong key
or an unknown session gets 401, a closed session 410, too many requests at once 429, an invalid request 400,
all in OpenAI's shape.

Who waits for whom: a model request waits for `POST /resume` if the gateway is paused, at most PAUSE_LIMIT_S;
then for the engine. When a client disconnects, its request is cancelled.

An agent is a user's function in a child process (`task.agent`), which plays an episode through a session:

    Episode ─> AgentEnvironment.play ─> a session ─> RewardPool: episode(client, item) ─> reward ─> End
                                            ^                         │
                                            └─ the client's requests ─┘

`play` waits for the agent or for a failure of the engine. The pool ends an agent that blocks
(`env.tool_timeout_s`) or takes too long (`env.episode_timeout_s`).

Why aiohttp: Ray brings it (`ray[default]`), it runs in the worker's own event loop, and it cancels the
handler of a client that disconnects. An ASGI server would need two more packages, and handles signals itself.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from asyncrl_cli.contracts.environment import End, EpisodeFailed, Rewards, SelfPlayed
from asyncrl_cli.data.sample_fields import BUILT_IN, Schema
from asyncrl_cli.engines.port import Engine, Sampling
from asyncrl_cli.envs.chat import Chat
from asyncrl_cli.envs.conversation import Conversation
from asyncrl_cli.envs.episode import Episode, Limits, derived_seed
from asyncrl_cli.envs.gateway import openai_api
from asyncrl_cli.envs.gateway.agent_session import CLOSED, OnRunning, Session
from asyncrl_cli.envs.gateway.openai_api import Body, ChatRequest, Refused, RewardPost, TextRequest
from asyncrl_cli.sandbox.parent_rewards import RewardFailed
from asyncrl_cli.tasks.players import Access

BODY_BYTES, BODY_BYTES_PER_TOKEN = 2**20, 64
"""Limit for a request's body: so many bytes, and so many for each token of a context. A token of text takes
about 4, or up to 12 where a client escapes them; the rest is for text that the chat template drops, as it
does with earlier thinking."""
BODY_LIMIT_S = 60.0
"""How long a client may take to send a body."""
BACKLOG = 1024
MAX_CLOSED = 4096
"""How many closed sessions are remembered, so that late requests get 410, not 401."""
PAUSE_LIMIT_S = 600.0
RETRY_AFTER_S = 1
MOST_PER_SLOT = 4
"""Model requests that may run or wait at once, per slot of the engine: agents may send several at once."""
MAX_STARTS = 3
"""How often an episode may start, if each time another episode kills the process that they share."""
KINDS = {"timed-out": "episode-timeout", "blocked": "tool-timeout", "died": "tool-died", "lost": "tool-died"}
"""Kinds of EpisodeFailed by those of RewardFailed. All others become `agent`: it raised, or returned no
number."""

logger = logging.getLogger(__name__)


class Gateway:
    """`sampling`: for requests that belong to no trajectory; they may ask for another if `follows_requests`.
    `num_running`: model requests that now run."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        sampling: Sampling,
        limits: Limits,
        schema: Schema = BUILT_IN,
        *,
        key: str = "",
        follows_requests: bool = False,
    ) -> None:
        self.admin_key = key or secrets.token_urlsafe(32)
        self._follows_requests = follows_requests
        self._outside: set[Session] = set()
        self.url = ""
        self._engine = engine
        self._chat = chat
        self._sampling = sampling
        self._limits = limits
        self._schema = schema
        self._max_body_bytes = BODY_BYTES + BODY_BYTES_PER_TOKEN * limits.max_context_tokens
        self._sessions: dict[str, tuple[str, Session]] = {}
        self._closed: dict[str, str] = {}
        self._num_admitted = 0
        self.num_running = 0
        self._unrecorded = itertools.count()
        self._resumed, self._idle = asyncio.Event(), asyncio.Event()
        self._resumed.set()
        self._idle.set()
        self._runner: web.AppRunner | None = None

    async def start(
        self, more_routes: Iterable[web.AbstractRouteDef] = (), listening: socket.socket | None = None
    ) -> None:
        """Listen there; by default on a free port of loopback."""
        routes = web.RouteTableDef()

        @routes.get("/health")
        async def health(request: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        @routes.get("/sessions/{id}/reward")
        async def get_reward(request: web.Request) -> web.Response:
            return web.json_response({"reward": self._session_of(request).reward})

        @routes.post("/sessions/{id}/reward")
        async def post_reward(request: web.Request) -> web.Response:
            session = self._session_of(request)
            session.reward = (await body_of(request, RewardPost)).reward
            return web.json_response({"reward": session.reward})

        @routes.get("/v1/models")
        @routes.get("/sessions/{id}/v1/models")
        async def list_models(request: web.Request) -> web.Response:
            self._session_of(request)
            return web.json_response(openai_api.models())

        @routes.post("/v1/chat/completions")
        @routes.post("/sessions/{id}/v1/chat/completions")
        async def complete_chat(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, ChatRequest)

        @routes.post("/v1/completions")
        @routes.post("/sessions/{id}/v1/completions")
        async def complete_text(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, TextRequest)

        app = web.Application(middlewares=[_errors_in_openais_shape], client_max_size=self._max_body_bytes)
        app.add_routes([*routes, *more_routes])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        listening = listening or socket.create_server(("127.0.0.1", 0))
        await web.SockSite(self._runner, listening, backlog=BACKLOG).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    def write_address(self, path: Path) -> None:
        """Write the address and the admin's key to a file that only this user can read."""
        with open(path, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
            json.dump({"url": self.url, "admin_key": self.admin_key}, file)

    async def close(self) -> None:
        """End all sessions and the server."""
        for _, session in list(self._sessions.values()):
            await self.close_session(session)
        if self._runner is not None:
            await self._runner.cleanup()

    def open_session(
        self,
        id: str,
        conversation: Conversation,
        sampling: Sampling,
        seed: int,
        on_running: OnRunning = lambda running: None,
    ) -> tuple[Session, Access]:
        """Open a session, whose requests to the engine are named by `id`. Returns it with the address and key
        for its client."""
        session = Session(id, self._engine, conversation, sampling, self._limits, seed, on_running)
        number, key = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._sessions[number] = (key, session)
        return session, Access(f"{self.url}/sessions/{number}/v1", key, openai_api.MODEL)

    async def close_session(self, session: Session) -> None:
        """Close a session: from now on its requests get 410."""
        for number in [number for number, (_, one) in self._sessions.items() if one is session]:
            self._closed[number] = self._sessions.pop(number)[0]
        while len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        await session.close()

    async def pause(self) -> None:
        """Let no model request begin, and wait until none runs."""
        self._resumed.clear()
        await self._idle.wait()

    def resume(self) -> None:
        self._resumed.set()

    async def abort_all(self) -> int:
        """End the requests that belong to no trajectory: they get 410. Returns their number."""
        sessions = list(self._outside)
        for session in sessions:
            await session.close()
        return len(sessions)

    def check_admin(self, request: web.Request) -> None:
        """Raises Refused unless the request has the admin key."""
        if not _has_key(request, self.admin_key):
            raise Refused(401, "the token (in a run: the admin key) is wrong or missing", "invalid_api_key")

    def _session_of(self, request: web.Request) -> Session:
        """The session that the request's path and key name; a new one for the admin. Raises Refused."""
        number = request.match_info.get("id")
        if number is None:
            self.check_admin(request)
            number = f"admin-{next(self._unrecorded)}"
            conversation, seed = Conversation(self._chat, self._schema), derived_seed(0, number)
            return Session(number, self._engine, conversation, self._sampling, self._limits, seed)
        key, session = self._sessions.get(number, (self._closed.get(number), None))
        if key is None or not _has_key(request, key):
            raise Refused(401, "there is no session with this address and key", "invalid_api_key")
        if session is None:
            raise Refused(410, CLOSED, "session_closed")
        return session

    async def _answer(
        self, request: web.Request, kind: type[ChatRequest] | type[TextRequest]
    ) -> web.StreamResponse:
        session = self._session_of(request)
        try:
            asked = await body_of(request, kind)
        except web.HTTPRequestEntityTooLarge:
            raise session.too_long(f"the request has more than {self._max_body_bytes:,} bytes") from None
        if self._follows_requests:
            session.sampling, session.seed = asked.sampling(session.sampling, session.seed)
            if lacking := await asyncio.to_thread(self._chat.unknown, asked.text):
                raise Refused(400, f"the model's vocabulary lacks the characters {lacking!r}")
        if request.match_info.get("id") is None:
            self._outside.add(session)
        try:
            async with self._admitted():
                reply = await session.reply(asked)
                answer = await asyncio.to_thread(openai_api.answer, reply, asked)  # for logprobs it decodes
        finally:
            self._outside.discard(session)
        honoured = {"seed"} if self._follows_requests else set()
        ignored = [name for name in asked.ignored(session.sampling) if name not in honoured]
        headers = {"x-asyncrl-ignored": ", ".join(ignored)} if ignored else {}
        if not asked.stream:
            return web.json_response(answer, headers=headers)
        headers |= {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        for event in openai_api.events(answer, with_usage=with_usage):
            await response.write(event)
        await response.write_eof()
        return response

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """Within the block a model request runs. Raises Refused if there are too many, or if the gateway
        stays paused."""
        if self._num_admitted >= MOST_PER_SLOT * self._engine.slots:
            why = f"{self._num_admitted} requests run or wait"
            raise Refused(429, why, "rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)
        self._num_admitted += 1
        try:
            try:
                async with asyncio.timeout(PAUSE_LIMIT_S):
                    await self._resumed.wait()
            except TimeoutError:
                why = f"the gateway has been paused for {PAUSE_LIMIT_S:g} s"
                raise Refused(503, why, "paused", retry_after_s=RETRY_AFTER_S) from None
            self.num_running += 1
            self._idle.clear()
            try:
                yield
            finally:
                self.num_running -= 1
                if not self.num_running:
                    self._idle.set()
        finally:
            self._num_admitted -= 1


async def body_of(request: web.Request, kind: type[Body]) -> Body:
    """The request's body as `kind`. Raises Refused (400), also if it does not arrive in time, and
    HTTPRequestEntityTooLarge."""
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            body = await request.read()
    except TimeoutError:
        raise Refused(400, f"the body did not arrive within {BODY_LIMIT_S:g} s") from None
    return await asyncio.to_thread(openai_api.parsed, body, kind)


def _has_key(request: web.Request, key: str) -> bool:
    given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return hmac.compare_digest(given.encode(errors="replace"), key.encode())


@web.middleware
async def _errors_in_openais_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        error = refused
    except EpisodeFailed as failed:  # the chat template, the tokenizer or the parser of answers refused
        error = Refused(400, failed.text)
    except web.HTTPException as raised:  # no such path, a body that is too large
        error = Refused(raised.status, f"{request.method} {request.path}: {raised.reason}")
    except Exception:  # one request's failure must not end the worker
        logger.exception("the gateway failed on %s %s", request.method, request.path)
        error = Refused(500, "the gateway failed on this request; the worker's log has the traceback")
    return web.json_response(error.body, status=error.status, headers=error.headers)


@dataclass(eq=False)
class AgentEnvironment(SelfPlayed):
    """The environment of one episode that an agent plays: `agents.score(item, access)` runs the agent and
    returns its reward."""

    gateway: Gateway
    agents: Rewards

    async def play(self, episode: Episode) -> End:
        def on_running(running: int) -> None:
            episode.waits_for("" if running else "agent")

        for start in range(1, MAX_STARTS + 1):
            # Each start has a new conversation. The tokens of an earlier one are never trained.
            episode.lost_tokens += episode.conversation.num_sampled
            episode.conversation = Conversation(episode.means.chat, episode.means.schema)
            session, access = self.gateway.open_session(
                episode.id, episode.conversation, episode.sampling, episode.seed, on_running
            )
            playing = asyncio.ensure_future(self.agents.score(episode.item, access))
            episode.waits_for("agent")
            try:
                await asyncio.wait((playing, session.failed), return_when=asyncio.FIRST_COMPLETED)
                if session.failed.done():
                    session.failed.result()  # raises the engine's error
                reward = await playing
                break
            except RewardFailed as failed:
                # "lost": another agent killed the process that they share; start again.
                if failed.kind != "lost" or start == MAX_STARTS:
                    kind = KINDS.get(failed.kind, "agent")
                    raise EpisodeFailed(kind, f"agent of {episode.id}: {failed}") from None
            finally:
                playing.cancel()
                episode.waits_for("")
                episode.finish_reason = session.finish_reason
                await self.gateway.close_session(session)
        if not episode.conversation.num_sampled:
            raise EpisodeFailed("agent", f"agent of {episode.id}: it ended without an answer from the model")
        return End(reward=reward)
