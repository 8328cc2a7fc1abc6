"""A simulated scorer, whose calls only take time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.loop.attempts import GroupResult
from asyncrl_cli.loop.meters import ScorerMeter
from asyncrl_cli.loop.states import ExecutorReport
from asyncrl_cli.simulate.simulated_trainer import SharedMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerTimes:
    """Seconds of a call, on a machine of its own, and of a restart. `call_tokens`: how many tokens fill the scorer."""

    score_s: Callable[[Sequence[GroupResult]], float]
    call_tokens: int
    restart_s: float = 0.0


class SimulatedScorer:
    """Implements `loop.ports.Scorer`. A column's handle is (the scorer's name, the group's key)."""

    def __init__(self, name: str, times: ScorerTimes, machine: SharedMachine | None = None) -> None:
        self.name = name
        self.call_tokens = times.call_tokens
        self._times = times
        self._machine = machine or SharedMachine()
        self._begin()

    def _begin(self) -> None:
        self._meter = ScorerMeter(self.name, asyncio.get_running_loop().time)

    async def score(self, groups: Sequence[GroupResult]) -> tuple[Sequence[Any], ExecutorReport]:
        with self._meter.scoring():
            await self._machine.compute(self._times.score_s(groups))
            self._meter.scored(sum(group.response_tokens for group in groups))
        return [(self.name, group.key) for group in groups], self._meter.report()

    async def report(self) -> ExecutorReport:
        return self._meter.report()

    async def restart(self) -> None:
        self._begin()
        await asyncio.sleep(self._times.restart_s)
