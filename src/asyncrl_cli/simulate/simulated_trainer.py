"""A simulated trainer and simulated scorers, whose calls only take time, and a machine that they may share
with rollout workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl_cli.contracts.ports import EvalResult
from asyncrl_cli.contracts.prompt_group import GroupResult, TrainBatch, TrainReport
from asyncrl_cli.contracts.weight_version import Published
from asyncrl_cli.measure.meters import CallMeter, TrainerMeter
from asyncrl_cli.measure.states import ExecutorReport, State
from asyncrl_cli.measure.values import Ratio, Sum, Value
from asyncrl_cli.profile.arithmetic import REWARD
from asyncrl_cli.simulate.simulated_engine import SimulatedEngine

NAME = "trainer-0"


class SharedMachine:
    """CPU cores that processes share: while more compute at once than there are cores, each gets an equal
    share of them."""

    def __init__(self, cores: float = math.inf) -> None:
        self._cores = cores
        self._engines: list[SimulatedEngine] = []
        self._num_computing = 0
        self._changed = asyncio.Event()

    def add(self, engine: SimulatedEngine) -> None:
        self._engines.append(engine)
        engine.slow_down(self.slowdown)

    def remove(self, engine: SimulatedEngine) -> None:
        self._engines.remove(engine)

    @property
    def slowdown(self) -> float:
        """How many times as long everything takes as it would with cores of its own."""
        return max(1.0, self._num_computing / self._cores)

    def computing(self, change: int) -> None:
        """So many more (or fewer) processes compute now."""
        before = self.slowdown
        self._num_computing += change
        if self.slowdown != before:
            self._changed.set()
            for engine in self._engines:
                engine.slow_down(self.slowdown)

    async def compute(self, seconds: float, processes: int = 1) -> float:
        """Do work of the trainer or a scorer that would take `seconds` in so many processes with cores of
        their own. Returns the seconds that it took."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self.computing(+processes)
        try:
            # at a constant rate until the number of computing processes changes
            while seconds > 0:
                slowdown, since_s = self.slowdown, loop.time()
                self._changed.clear()
                timer = loop.call_later(seconds * slowdown, self._changed.set)
                try:
                    await self._changed.wait()
                finally:
                    timer.cancel()
                is_done = loop.time() >= timer.when()
                seconds = 0.0 if is_done else seconds - (loop.time() - since_s) / slowdown
        finally:
            self.computing(-processes)
        return loop.time() - began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    """Seconds, with cores of their own, of as many `processes`. `overhead_s` is part of a train call but not
    of its reported parts: the loop's timing shows it as `other`. `old_logprob_tokens`: sampled tokens that
    the old-logprob pass scores; 0 without such a pass. `column_s`: seconds of the trainer's passes before it
    trains, by `trainer_columns`. `kl`: of a token by its age in versions, if the trainer reports it."""

    train_s: Callable[[TrainBatch], float]
    column_s: Mapping[str, Callable[[TrainBatch], float]] = field(default_factory=dict)
    old_logprob_tokens: Callable[[TrainBatch], int] = lambda batch: 0
    overhead_s: float = 0.0
    gather_s: float = 0.0
    publish_s: float = 0.0
    kl: Callable[[int], float] | None = None
    processes: int = 1


class SimulatedTrainer:
    """Implements `contracts.ports.Trainer`."""

    def __init__(self, times: TrainerTimes, machine: SharedMachine | None = None) -> None:
        self._times = times
        self._machine = machine or SharedMachine()
        self._loop = asyncio.get_running_loop()
        self._meter = TrainerMeter(NAME, NAME, times.column_s, self._loop.time)

    async def train(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        began_s = self._loop.time()
        with self._meter.doing(State.BUSY):
            await asyncio.sleep(self._times.overhead_s)
            column_s = dict[str, float]()
            for name, cost_s in self._times.column_s.items():
                with self._meter.scoring(name):
                    column_s[name] = await self._compute(cost_s(batch))
            train_s = await self._compute(self._times.train_s(batch))
        tokens = sum(group.response_tokens for group in batch.groups)
        self._meter.add(
            gauges={"step": batch.step}, busy_s=self._loop.time() - began_s, trained_tokens=tokens
        )
        scored = self._times.old_logprob_tokens(batch)
        metrics: dict[str, Value] = {"train/old_logprob_tokens": Sum(scored)} if scored else {}
        if self._times.kl is not None:
            metrics["correction/kl"] = mean_kl(batch.groups, batch.window, self._times.kl)
        report = TrainReport(train_s=train_s, tokens=tokens, metrics=metrics, column_s=column_s)
        return report, self._meter.report()

    async def _compute(self, seconds: float) -> float:
        return await self._machine.compute(seconds, self._times.processes)

    async def gather(self, version: int) -> tuple[float, ExecutorReport]:
        with self._meter.gathering():
            await asyncio.sleep(self._times.gather_s)
        return self._times.gather_s, self._meter.report()

    async def publish(self, version: int) -> Published:
        with self._meter.update.doing(State.SENDING, "buckets to be sent"):
            await asyncio.sleep(self._times.publish_s)
        return Published(version=version, num_bytes=0, publish_s=self._times.publish_s, handle=None)

    async def snapshot(self, step: int) -> None:
        """Takes no time."""

    async def report(self) -> ExecutorReport:
        return self._meter.report()


def mean_kl(groups: Sequence[GroupResult], window: int, kl: Callable[[int], float]) -> Ratio:
    """Over the sampled tokens of groups that are trained in that window. `kl`: of a token by its age."""
    metas = [meta for group in groups for meta in group.trajectories]
    ages = [(window - version, tokens) for meta in metas for version, tokens in meta.version_tokens]
    return Ratio(sum(kl(age) * tokens for age, tokens in ages), sum(tokens for _, tokens in ages))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerTimes:
    """Seconds, with cores of their own, of as many `processes`: of a call, of a critic's learning, of judging
    a trajectory of an eval (reward model), of a load, and of a restart. `call_tokens`: how many tokens fill
    the scorer."""

    score_s: Callable[[Sequence[GroupResult]], float]
    learn_s: Callable[[Sequence[GroupResult]], float] = lambda groups: 0.0
    judge_s: float = 0.0
    call_tokens: int
    load_s: float = 0.0
    restart_s: float = 0.0
    processes: int = 1


class SimulatedScorer:
    """Implements `contracts.ports.Scorer`. A reward model's scores are 0."""

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
        self, groups: Sequence[GroupResult], items: Sequence[Mapping[str, object]]
    ) -> tuple[Sequence[tuple[float, ...]], ExecutorReport]:
        with self._meter.doing(State.BUSY):
            await self._compute(self._times.score_s(groups))
            self._meter.add(scored_tokens=sum(group.response_tokens for group in groups))
        columns = [(0.0,) * len(group.trajectories) if self.name == REWARD else () for group in groups]
        return columns, self._meter.report()

    async def judge(self, result: EvalResult, items: Sequence[Mapping[str, object]]) -> Sequence[float]:
        await self._compute(len(items) * self._times.judge_s)
        return [0.0] * len(items)

    async def learn(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        with self._meter.doing(State.BUSY):
            train_s = await self._compute(self._times.learn_s(batch.groups))
        return TrainReport(train_s=train_s, tokens=0, metrics={}), self._meter.report()

    async def _compute(self, seconds: float) -> float:
        return await self._machine.compute(seconds, self._times.processes)

    async def report(self) -> ExecutorReport:
        return self._meter.report()

    async def restart(self) -> None:
        self._begin()
        await asyncio.sleep(self._times.restart_s)
