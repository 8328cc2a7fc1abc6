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
from asyncrl_cli.loop.values import Sum
from asyncrl_cli.simulate.faults import FaultKind, Faults
from asyncrl_cli.simulate.machine import SharedMachine

NAME = "trainer-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    """Seconds, on a machine of its own. `overhead_s` is part of a train call, but of none of its reported parts: the loop's timing
    shows it as `other`. `old_logprob_tokens`: sampled tokens that the old-logprob pass scores; None if there is none."""

    train_s: Callable[[TrainBatch], float]
    old_logprob_s: Callable[[TrainBatch], float] = lambda batch: 0.0
    old_logprob_tokens: Callable[[TrainBatch], int] | None = None
    overhead_s: float = 0.0
    gather_s: float = 0.0
    publish_s: float = 0.0
    snapshot_s: float = 0.0
    write_s: float = 0.0


class SimulatedTrainer:
    """Implements `loop.ports.Trainer`. `batches` holds what it was given, if `keep_batches`; `gathered` the versions."""

    def __init__(
        self,
        times: TrainerTimes,
        *,
        keep_batches: bool = False,
        faults: Faults | None = None,
        machine: SharedMachine | None = None,
    ) -> None:
        self.batches: list[TrainBatch] = []
        self.gathered: list[int] = []
        self._times = times
        self._keep_batches = keep_batches
        self._faults = faults or Faults()
        self._machine = machine or SharedMachine()
        self._loop = asyncio.get_running_loop()
        self._clock = StateClock(NAME, "trainer", self._loop.time)
        self._clock.waiting_for = "groups"

    async def train(self, batch: TrainBatch) -> TrainReport:
        began_s = self._loop.time()
        self._clock.enter(State.BUSY)
        await asyncio.sleep(self._times.overhead_s)
        old_logprob_s = await self._machine.compute(self._times.old_logprob_s(batch))
        train_s = await self._machine.compute(self._times.train_s(batch))
        if self._faults.of_call(FaultKind.STEP_FAILS, NAME, batch.step) is not None:
            raise ExecutorFailed(f"{NAME} failed: simulated failure in step {batch.step}")
        self._clock.enter(State.STARVED, "groups")
        if self._keep_batches:
            self.batches.append(batch)
        tokens = sum(meta.response_tokens for group in batch.groups for meta in group.trajectories)
        self._clock.add("busy_s", self._loop.time() - began_s)
        self._clock.add("trained_tokens", tokens)
        self._clock.gauges["step"] = batch.step
        metrics = {"train/old_logprob_tokens": Sum(self._times.old_logprob_tokens(batch))} if self._times.old_logprob_tokens else {}
        return TrainReport(
            train_s=train_s, old_logprob_s=old_logprob_s, tokens=tokens, metrics=metrics, report=self._clock.report()
        )

    async def gather(self, version: int) -> GatherReport:
        await self._stay(State.SYNCING, "weights to be gathered", self._times.gather_s)
        self.gathered.append(version)
        return GatherReport(version=version, gather_s=self._times.gather_s, report=self._clock.report())

    async def publish(self, version: int) -> Published:
        await asyncio.sleep(self._times.publish_s)
        return Published(version=version, num_bytes=0, publish_s=self._times.publish_s, handle=None)

    async def snapshot(self, step: int) -> float:
        await self._stay(State.BUSY, "a checkpoint's snapshot", self._times.snapshot_s)
        return self._times.snapshot_s

    async def write(self, step: int, directory: Path, payloads: Sequence[Any], with_published: bool) -> None:
        await asyncio.sleep(self._times.write_s)

    async def report(self) -> ExecutorReport:
        return self._clock.report()

    async def _stay(self, state: State, waiting_for: str, seconds: float) -> None:
        self._clock.enter(state, waiting_for)
        await asyncio.sleep(seconds)
        self._clock.enter(State.STARVED, "groups")


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
