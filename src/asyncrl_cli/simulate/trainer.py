"""A simulated trainer: steps, gathers and publishes only take time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.loop.ports import GatherReport, Published, TrainBatch, TrainReport
from asyncrl_cli.loop.states import ExecutorReport, State, StateClock


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    step_s: Callable[[TrainBatch], float] = lambda batch: 1.0
    gather_s: float = 0.0
    publish_s: float = 0.0
    snapshot_s: float = 0.0
    write_s: float = 0.0
    dies_at_step: int | None = None


class SimulatedTrainer:
    """Implements `loop.ports.Trainer`; `batches` keeps what it was given."""

    def __init__(self, times: TrainerTimes) -> None:
        self.batches: list[TrainBatch] = []
        self.gathered: list[int] = []
        self._times = times
        self._clock = StateClock("trainer-0", "trainer", asyncio.get_running_loop().time)

    async def train(self, batch: TrainBatch) -> TrainReport:
        if batch.step == self._times.dies_at_step:
            raise ExecutorFailed(f"trainer-0 failed: simulated death in step {batch.step}")
        train_s = self._times.step_s(batch)
        self._clock.enter(State.BUSY)
        await asyncio.sleep(train_s)
        self._clock.enter(State.STARVED, "groups")
        self.batches.append(batch)
        tokens = sum(meta.response_tokens for group in batch.groups for meta in group.trajectories)
        self._clock.add("trained_tokens", tokens)
        return TrainReport(train_s=train_s, old_logprob_s=0.0, tokens=tokens, metrics={}, report=self._clock.report())

    async def gather(self, version: int) -> GatherReport:
        self._clock.enter(State.SYNCING)
        await asyncio.sleep(self._times.gather_s)
        self._clock.enter(State.STARVED, "groups")
        self.gathered.append(version)
        return GatherReport(version=version, gather_s=self._times.gather_s, report=self._clock.report())

    async def publish(self, version: int) -> Published:
        await asyncio.sleep(self._times.publish_s)
        return Published(version=version, num_bytes=0, publish_s=self._times.publish_s, handle=None)

    async def snapshot(self, step: int) -> float:
        await asyncio.sleep(self._times.snapshot_s)
        return self._times.snapshot_s

    async def write(self, step: int, directory: Path, payloads: Sequence[Any], with_published: bool) -> None:
        await asyncio.sleep(self._times.write_s)

    async def report(self) -> ExecutorReport:
        return self._clock.report()


class MemoryCheckpoints:
    """Implements `loop.ports.CheckpointWriter` in memory: the cuts as they would be read back from JSON."""

    def __init__(self, write_s: float = 0.0) -> None:
        self.cuts: list[Any] = []
        self._write_s = write_s

    async def write(self, cut: Any) -> Path:
        state = json.loads(json.dumps(cut.loop_state))
        await asyncio.sleep(self._write_s)
        self.cuts.append((cut, state))
        return Path(f"step-{cut.step:06d}")
