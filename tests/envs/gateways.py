"""A gateway on an engine that says what a test tells it to, with a tokenizer of one token per character."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from asyncrl_cli.contracts.environment import Answer, Message
from asyncrl_cli.engines.port import Completion, Engine, Sampling
from asyncrl_cli.envs.chat import Chat
from asyncrl_cli.envs.conversation import Conversation
from asyncrl_cli.envs.episode import Limits
from asyncrl_cli.envs.gateway.agent_session import Session
from asyncrl_cli.envs.gateway.server import Gateway
from asyncrl_cli.tasks.players import Access

LIMITS = Limits(max_prompt_tokens=400, max_context_tokens=400, max_turns=99)
SAMPLING = Sampling(temperature=1.0, max_response_tokens=64)
END = 0
Says = Callable[[str], str]


@dataclass
class ScriptedEngine:
    """Answers with `says(prompt text)`. While `held` is cleared, requests wait, as they do during a load."""

    says: Says
    version: int = 3
    slots: int = 64
    held: asyncio.Event = field(default_factory=asyncio.Event)
    running: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    seen: list[tuple[str, list[int], Sampling]] = field(default_factory=list)
    num_cancelled: int = 0

    async def generate(
        self, request_id: str, prompt_tokens: list[int], sampling: Sampling, seed: int, **turn: Any
    ) -> Completion:
        self.seen.append((request_id, prompt_tokens, sampling))
        aborted = self.running[request_id] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(self.held.wait())
        try:
            await asyncio.wait({waiting, aborted}, return_when=asyncio.FIRST_COMPLETED)
            if aborted.done():
                return Completion(tokens=[], logprobs=[], versions=[], finish_reason="abort")
            tokens = [*ids(self.says(text_of(prompt_tokens))), END][: sampling.max_response_tokens]
            finish_reason: Any = "stop" if tokens[-1] == END else "length"
            logprobs, versions = [-0.5] * len(tokens), [self.version] * len(tokens)
            return Completion(
                tokens=tokens, logprobs=logprobs, versions=versions, finish_reason=finish_reason
            )
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            waiting.cancel()
            del self.running[request_id]

    async def abort(self, request_id: str) -> None:
        if request_id in self.running and not self.running[request_id].done():
            self.running[request_id].set_result(None)

    def tokens_of(self, request_id: str) -> int:
        return 0


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def text_of(tokens: Sequence[int]) -> str:
    return "".join(chr(token) if token != END else "\n" for token in tokens)


class CharacterChat:
    """`<role>content\n`, and a call as `!name{arguments}`."""

    def render(self, messages: Sequence[Message], tools: Any) -> list[int]:
        offered = [f"[{tool['function']['name']}]" for tool in tools]
        return ids("".join(offered)) + self._added(messages)

    def bridge(
        self, tokens: list[int], messages: Sequence[Message], new: Sequence[Message], tools: Any
    ) -> list[int] | None:
        return self._added(new)

    def _added(self, messages: Sequence[Message]) -> list[int]:
        told = [[*ids(f"<{message['role']}>{message['content']}"), END] for message in messages]
        return [*itertools.chain.from_iterable(told), *ids("<assistant>")]

    def parse(self, prompt: list[int], completion: Completion, tools: Any) -> Answer:
        text = self.decode(completion.tokens)
        content, bang, call = text.partition("!")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if bang:
            name, brace, rest = call.partition("{")
            function = {"name": name, "arguments": json.loads(brace + rest)}
            message["tool_calls"] = [{"id": "call-1", "type": "function", "function": function}]
        return Answer(text=text, message=message, finish_reason="stop")

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token != END)

    def encode(self, text: str) -> list[int]:
        return ids(text)


@dataclass
class Served:
    gateway: Gateway
    engine: ScriptedEngine
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def open(self) -> tuple[Session, Access]:
        return self.gateway.open_session(f"t{next(self.numbers)}", Conversation(CHAT), SAMPLING, 7)


@asynccontextmanager
async def gateway(
    says: Callable[[str], str] = lambda prompt: "fine", *, slots: int = 64, max_turns: int = 99
) -> AsyncIterator[Served]:
    engine = ScriptedEngine(says, slots=slots)
    engine.held.set()
    served = Served(
        Gateway(cast(Engine, engine), CHAT, SAMPLING, LIMITS._replace(max_turns=max_turns)), engine
    )
    await served.gateway.start()
    try:
        async with asyncio.timeout(60):
            yield served
    finally:
        await served.gateway.close()


CHAT = cast(Chat, CharacterChat())
