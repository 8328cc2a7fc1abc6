"""Generation alone, in a child process: a rollout worker's engine with all slots full, and nobody else.

Every slot is refilled at once, with the task's next prompts, by as many responses as a group has waiting in the
engine's own queue. Rewards, groups and loads take no part: this is what the engine can do at full batch efficiency.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.bench.phase_processes import ANSWER_TIMEOUT_S, Barrier, CpuTime
from asyncrl_cli.job.settings import RolloutSettings

if TYPE_CHECKING:
    from asyncrl_cli.engines.port import Completion, Sampling
    from asyncrl_cli.samples.trajectory import GroupPayload

GENERATION_CONFIG = "generation_config.json"
NO_SUCH_TOKEN = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOrder:
    """What a child generates: responses to `items`, `n` to each, over and over.

    With `response_tokens` the responses have these lengths, in this order, over and over, and `settings.model_dir` is
    a model that does not end by itself (`endless_model`).
    """

    settings: RolloutSettings
    items: Sequence[Mapping[str, Any]]
    n: int
    response_tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Sampled response tokens within `seconds`, and the mean number of running sequences (all slots, or it was not full).

    `cpu_s` are those of the process and its engine's (`CpuTime`); much less than `seconds` on a CPU means that others used the
    machine.
    """

    tokens: int
    seconds: float
    cpu_s: float
    running_mean: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def make_generation(index: int, argument: tuple[GenerationOrder, Barrier]) -> GenerationPhase:
    """Called in the child."""
    return GenerationPhase(index, *argument)


class GenerationPhase:
    """One engine on an event loop that runs while a method is called."""

    def __init__(self, index: int, order: GenerationOrder, barrier: Barrier) -> None:
        from transformers import AutoTokenizer

        from asyncrl_cli.engines.registry import make_engine, sampling_of
        from asyncrl_cli.envs.rendering import render_prompts

        settings = order.settings
        tokenizer = AutoTokenizer.from_pretrained(settings.model_dir, trust_remote_code=settings.trust_remote_code)
        self._index, self._order, self._barrier = index, order, barrier
        self._prompts = render_prompts(tokenizer, order.items)
        self._sampling = sampling_of(settings, settings.temperature)
        self._area = _Area()
        self._engine = make_engine(settings, self._area.change)
        self._count = itertools.count()
        self._ended = 0
        self._runner = asyncio.Runner()
        self._runner.run(self._engine.start())

    def measure(self, seconds: float) -> Generated:
        """For `seconds`, once as many responses have ended as there are slots, in all processes of the phase."""
        return self._runner.run(self._measure(seconds))

    def groups(self, count: int) -> list[GroupPayload]:
        """The first `count` prompts' groups, sampled to their ends, with rewards made up (half of them right)."""
        return self._runner.run(self._groups(count))

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()

    async def _measure(self, seconds: float) -> Generated:
        engine = self._engine
        self._ended = 0
        sources = [asyncio.create_task(self._refill()) for _ in range(engine.slots + self._order.n)]
        try:
            while self._ended < engine.slots:
                await _first_failure(sources, 0.02)
            await asyncio.to_thread(self._barrier.wait, ANSWER_TIMEOUT_S)
            began_s, cpu = time.perf_counter(), CpuTime(self._order.settings.threads)
            tokens, area = engine.sampled_tokens, self._area.until_now()
            await _first_failure(sources, seconds)
            spent_s, cpu_s = time.perf_counter() - began_s, cpu.spent_s()
            tokens = engine.sampled_tokens - tokens
            running_mean = (self._area.until_now() - area) / spent_s
            await asyncio.to_thread(self._barrier.wait, ANSWER_TIMEOUT_S)
        finally:
            for source in sources:
                source.cancel()
            await asyncio.gather(*sources, return_exceptions=True)
        return Generated(tokens=tokens, seconds=spent_s, cpu_s=cpu_s, running_mean=running_mean)

    async def _refill(self) -> None:
        while True:
            await self._generate(next(self._count))
            self._ended += 1

    async def _generate(self, number: int) -> Completion:
        """Response `number` of this process: neighbours in number share a prompt, processes share no random number."""
        prompt = self._prompts[number // self._order.n % len(self._prompts)]
        seed = hash((self._order.settings.seed, self._index, number))
        return await self._engine.generate(f"phase-{number}", prompt, self._sampling_of(number), seed)

    def _sampling_of(self, number: int) -> Sampling:
        lengths = self._order.response_tokens
        if not lengths:
            return self._sampling
        return replace(
            self._sampling, max_response_tokens=min(lengths[number % len(lengths)], self._order.settings.max_response_tokens)
        )

    async def _groups(self, count: int) -> list[GroupPayload]:
        completions = await asyncio.gather(*(self._generate(next(self._count)) for _ in range(count * self._order.n)))
        return list(self._payloads(completions))

    def _payloads(self, completions: Sequence[Completion]) -> Iterator[GroupPayload]:
        from asyncrl_cli.envs.episode import segment_of
        from asyncrl_cli.samples.trajectory import GroupPayload, Trajectory

        n = self._order.n
        for group in range(len(completions) // n):
            prompt = self._prompts[group % len(self._prompts)]
            trajectories = tuple(
                Trajectory(
                    segments=(segment_of(prompt, completion),), reward=float(number % 2), finish_reason=completion.finish_reason
                )
                for number, completion in enumerate(completions[group * n : (group + 1) * n])
            )
            yield GroupPayload(uid=str(group), epoch=0, attempt=0, trajectories=trajectories)


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


async def _first_failure(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Sleep for `seconds`, unless one of `tasks`, which never end by themselves, fails: raises its error then."""
    ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()


class _Area:
    """Integral of the number of running sequences over time."""

    def __init__(self) -> None:
        self._running, self._since_s, self._total = 0, time.perf_counter(), 0.0

    def change(self, running: int) -> None:
        self.until_now()
        self._running = running

    def until_now(self) -> float:
        now_s = time.perf_counter()
        self._total += self._running * (now_s - self._since_s)
        self._since_s = now_s
        return self._total
