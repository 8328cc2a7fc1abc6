"""Generation alone, in a child process: a rollout worker's engine with all slots full, and nobody else.

Every slot is refilled at once, with the task's next prompts. Responses have the lengths that were given, in that order, over and
over. Rewards, groups and loads take no part: this is what the engine can do at full batch efficiency.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from asyncrl_cli.bench.children import CpuTime, Worked
from asyncrl_cli.engines.registry import make_engine, sampling_of

if TYPE_CHECKING:
    from asyncrl_cli.bench.phases import Order

T = TypeVar("T")

GENERATION_CONFIG = "generation_config.json"
NO_SUCH_TOKEN = 1_000_000_000


class GenerationAlone:
    """One engine, on an event loop that runs in a thread."""

    def __init__(self, index: int, order: Order) -> None:
        from transformers import AutoTokenizer

        from asyncrl_cli.envs.rendering import render_prompts

        profile, place = order.side.profile, order.side.rollout
        tokenizer = AutoTokenizer.from_pretrained(place.model_dir, trust_remote_code=profile.model.trust_remote_code)
        self._index, self._order = index, order
        self._prompts = render_prompts(tokenizer, order.items)
        self._sampling = sampling_of(profile.rollout, profile.rollout.temperature)
        self._running = _Running()
        self._engine = make_engine(profile, place, self._running.change)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()
        self._numbers = itertools.count()
        self._ended = 0
        self._sources: list[asyncio.Task[None]] = []
        self._wait(self._engine.start())

    def fill(self) -> None:
        """Generate from now on; returns when as many responses have ended as there are slots."""
        self._wait(self._fill())

    def begin(self) -> None:
        """What is measured begins now."""
        self._cpu = CpuTime(self._order.side.rollout.threads)
        self._before = time.perf_counter(), self._engine.sampled_tokens, self._running.until_now()

    def end(self) -> Worked:
        """Since `begin`, with all slots full; nothing is generated any more."""
        began_s, tokens, area = self._before
        seconds = time.perf_counter() - began_s
        generated = Worked(
            tokens=self._engine.sampled_tokens - tokens,
            seconds=seconds,
            cpu_s=self._cpu.spent_s(),
            running_mean=(self._running.until_now() - area) / seconds,
        )
        self._wait(self._stop())
        return generated

    def _wait(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _fill(self) -> None:
        """As many responses as a group has wait in the engine's own queue."""
        self._ended = 0
        self._sources = [
            asyncio.create_task(self._refill()) for _ in range(self._engine.slots + self._order.side.profile.rollout.n)
        ]
        while self._ended < self._engine.slots:
            self._raise_failure()
            await asyncio.sleep(0.02)

    async def _stop(self) -> None:
        self._raise_failure()
        for source in self._sources:
            source.cancel()
        await asyncio.gather(*self._sources, return_exceptions=True)

    def _raise_failure(self) -> None:
        """Sources never end by themselves."""
        for source in self._sources:
            if source.done():
                source.result()

    async def _refill(self) -> None:
        """Neighbours in number share a prompt; processes share no random number."""
        order, n = self._order, self._order.side.profile.rollout.n
        while True:
            number = next(self._numbers)
            sampling = replace(self._sampling, max_response_tokens=order.length(number))
            seed = hash((order.side.profile.run.seed, self._index, number))
            prompt = self._prompts[number // n % len(self._prompts)]
            await self._engine.generate(f"phase-{number}", prompt, sampling, seed)
            self._ended += 1


def endless_model(model_dir: Path, directory: Path) -> Path:
    """`directory` with the model's files (links) and an end of sequence that it does not have."""
    directory.mkdir(parents=True)
    for path in model_dir.iterdir():
        if path.name != GENERATION_CONFIG:
            (directory / path.name).symlink_to(path.resolve())
    original = model_dir / GENERATION_CONFIG
    content = json.loads(original.read_text(encoding="utf-8")) if original.is_file() else {}
    (directory / GENERATION_CONFIG).write_text(json.dumps({**content, "eos_token_id": NO_SUCH_TOKEN}), encoding="utf-8")
    return directory


class _Running:
    """Integral of the number of running sequences over time."""

    def __init__(self) -> None:
        self._number, self._since_s, self._area = 0, time.perf_counter(), 0.0

    def change(self, number: int) -> None:
        self.until_now()
        self._number = number

    def until_now(self) -> float:
        now_s = time.perf_counter()
        self._area += self._number * (now_s - self._since_s)
        self._since_s = now_s
        return self._area
