"""A simulated scorer, whose calls only take time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.loop.attempts import GroupResult
from asyncrl_cli.loop.meters import CallMeter
from asyncrl_cli.loop.ports import EvalResult, Published, TrainBatch, TrainReport
from asyncrl_cli.loop.states import ExecutorReport, State
from asyncrl_cli.profile.sharing import REWARD
from asyncrl_cli.simulate.simulated_trainer import SharedMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerTimes:
    """Seconds of a call, on a machine of its own, of what a critic learns, of a trajectory of an eval that a reward model judges,
    of a load, and of a restart. `call_tokens`: how many tokens fill the scorer."""

    score_s: Callable[[Sequence[GroupResult]], float]
    learn_s: Callable[[Sequence[GroupResult]], float] = lambda groups: 0.0
    judge_s: float = 0.0
    call_tokens: int
    load_s: float = 0.0
    restart_s: float = 0.0


class SimulatedScorer:
    """Implements `loop.ports.Scorer`. A column's handle is (the scorer's name, the group's key); a reward model's scores are 0."""

    def __init__(self, name: str, times: ScorerTimes, machine: SharedMachine | None = None) -> None:
        self.name = name
        self.call_tokens = times.call_tokens
        self._times = times
        self._machine = machine or SharedMachine()
        self._begin()

    def _begin(self) -> None:
        self._meter = CallMeter(self.name, "scorer", "finished groups", asyncio.get_running_loop().time)

    async def load(self, published: Published) -> None:
        with self._meter.doing(State.LOADING, "weights"):
            await asyncio.sleep(self._times.load_s)

    async def score(
        self, groups: Sequence[GroupResult], items: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Any], ExecutorReport]:
        with self._meter.doing(State.BUSY):
            await self._machine.compute(self._times.score_s(groups))
            self._meter.add(scored_tokens=sum(group.response_tokens for group in groups))
        return [self._column(group) for group in groups], self._meter.report()

    async def judge(self, result: EvalResult, items: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        await self._machine.compute(len(items) * self._times.judge_s)
        return [0.0] * len(items)

    async def learn(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        with self._meter.doing(State.BUSY):
            train_s = await self._machine.compute(self._times.learn_s(batch.groups))
        return TrainReport(train_s=train_s, tokens=0, metrics={}), self._meter.report()

    def _column(self, group: GroupResult) -> Any:
        return (0.0,) * len(group.trajectories) if self.name == REWARD else (self.name, group.key)

    async def report(self) -> ExecutorReport:
        return self._meter.report()

    async def restart(self) -> None:
        self._begin()
        await asyncio.sleep(self._times.restart_s)
