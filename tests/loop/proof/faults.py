"""Faults that a simulated run meets, from a seed, and executors that meet them.

Each fault happens at most once, and is counted when it really has. `Faults` outlives a world: a fault that
has happened does not happen again in the resumed run, as with a machine that was replaced.
"""

from __future__ import annotations

import asyncio
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from asyncrl_cli.base.errors import ExecutorFailed, ExecutorLost, NoRoom
from asyncrl_cli.contracts.ports import EvalRequest, EvalResult, PartialResult, WorkerUpdate
from asyncrl_cli.contracts.prompt_group import (
    AttemptKey,
    GroupResult,
    PartKey,
    PartRequest,
    PartResult,
    TrainBatch,
    TrainReport,
    TrajectoryFailure,
)
from asyncrl_cli.contracts.weight_version import LoadReport, Published
from asyncrl_cli.measure.states import ExecutorReport
from asyncrl_cli.profile.schema import Interrupt
from asyncrl_cli.simulate.responses import WorkerTimes
from asyncrl_cli.simulate.simulated_trainer import NAME as TRAINER
from asyncrl_cli.simulate.simulated_trainer import (
    ScorerTimes,
    SimulatedScorer,
    SimulatedTrainer,
    TrainerTimes,
)
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker

T = TypeVar("T")
CALL_KEY, WEIGHTS_KEY, SO_FAR = "rollout.call_timeout_s", "weights.timeout_s", "so far"
SO_FAR_S, NO_ROOM_AFTER_S = 5.0, 3.0


class FaultKind(StrEnum):
    """What may go wrong. The first two happen at a time (`at_s`), the third `seconds` after the worker is
    asked to help with the eval of version `nth`, the others to an executor's `nth` such call (from 1)."""

    WORKER_DIES = "worker dies"
    """Its calls fail, pending and later ones."""
    WORKER_HANGS = "worker hangs"
    """Its calls never return; their time limits end them."""
    DIES_IN_EVAL = "worker dies in an eval"
    SLOW_LOAD = "slow load"
    """A load takes `seconds` more."""
    LATE_PREFETCH = "late prefetch"
    """A transfer takes `seconds` more, so that this worker lags behind the others."""
    LOST_PREFETCH = "lost prefetch"
    """A transfer fails."""
    REPEATED_PREFETCH = "repeated prefetch"
    """A transfer arrives a second time, `seconds` later."""
    NO_ROOM = "no room"
    """There is no place for the process of a restart."""
    REWARD_RAISES = "reward raises"
    """The reward of one trajectory of a part raises."""
    STEP_FAILS = "train step fails"
    """The trainer fails in the `nth` train step of the run."""


FATAL = frozenset(
    {
        FaultKind.WORKER_DIES,
        FaultKind.WORKER_HANGS,
        FaultKind.DIES_IN_EVAL,
        FaultKind.LOST_PREFETCH,
        FaultKind.STEP_FAILS,
    }
)
"""Faults that fail a run: with the executor's own error, after a checkpoint if the trainer is whole. Where
restarts are allowed, a worker's are mended by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`at_s` on the run's clock, or the `nth` call or version; `seconds` for kinds that take time."""

    kind: FaultKind
    executor: str
    at_s: float = 0.0
    nth: int = 0
    seconds: float = 0.0


class Faults:
    """What is still to happen, and (`happened`) what has."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.pending: list[Fault] = list(faults)
        self.happened: Counter[FaultKind] = Counter()

    def at(self, executor: str) -> list[Fault]:
        """Those with a time; call `happens` when it has come."""
        timed = (FaultKind.WORKER_DIES, FaultKind.WORKER_HANGS)
        return [fault for fault in self.pending if fault.executor == executor and fault.kind in timed]

    def of_call(self, kind: FaultKind, executor: str, nth: int) -> Fault | None:
        """The fault that the executor's nth call meets, if any: it has happened then."""
        for fault in self.pending:
            if (fault.kind, fault.executor, fault.nth) == (kind, executor, nth):
                self.happens(fault)
                return fault
        return None

    def happens(self, fault: Fault) -> None:
        self.pending.remove(fault)
        self.happened[fault.kind] += 1


class KeepingTrainer(SimulatedTrainer):
    """Keeps the batches that it has trained and the versions that it has gathered. Fails in the steps that
    `faults` names."""

    def __init__(self, times: TrainerTimes, faults: Faults | None = None) -> None:
        super().__init__(times)
        self.batches: list[TrainBatch] = []
        self.gathered: list[int] = []
        self._faults = faults or Faults([])

    async def train(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        report = await super().train(batch)
        if self._faults.of_call(FaultKind.STEP_FAILS, TRAINER, batch.step) is not None:
            raise ExecutorFailed(f"simulated failure in step {batch.step}", executor=TRAINER)
        self.batches.append(batch)
        return report

    async def gather(self, version: int) -> tuple[float, ExecutorReport]:
        gathered = await super().gather(version)
        self.gathered.append(version)
        return gathered


class KeepingWorker(SimulatedWorker):
    """Keeps the versions that it has loaded."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.loads: list[int] = []

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        report = await super().load(version, interrupt)
        self.loads.append(version)
        return report


class Mortal:
    """An executor that meets faults: its calls fail when it dies, and when it hangs only their limits end
    them, as those of the adapters on Ray. Faults with a time set in on its own clock, the others are met by
    its calls. What is still to happen when it is restarted happens to the next process."""

    name: str

    def _face(self, faults: Faults, call_timeout_s: float, weights_timeout_s: float = math.inf) -> None:
        """Call it once, when the executor is made."""
        self._faults = faults
        self._call_timeout_s = call_timeout_s
        self._weights_timeout_s = weights_timeout_s
        self._counts = Counter[FaultKind]()
        self._death = ""
        self._is_hung = False
        self.process = object()
        self._asked: dict[asyncio.Future[Any], asyncio.Task[Any]] = {}
        for fault in faults.at(self.name):
            asyncio.get_running_loop().call_at(fault.at_s, self._meet_in_time, fault)

    @property
    def is_alive(self) -> bool:
        return not (self._death or self._is_hung)

    async def _reborn(self, start: Coroutine[Any, Any, None]) -> None:
        self._die("it was ended, and another takes its place")
        self._death, self._is_hung, self.process = "", False, object()
        await self._ask(start, "its start", CALL_KEY)

    async def _ask(self, work: Coroutine[Any, Any, T], what: str = "", key: str = "") -> T:
        """What `work` returns, unless the worker dies or hangs first; `key` names the limit of the call."""
        if self._death:
            work.close()
            raise ExecutorLost(self._death, executor=self.name)
        answer = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(work)
        self._asked[answer] = task
        if self._is_hung:
            task.cancel()
        task.add_done_callback(partial(_pass_on, answer))
        limits_s = {CALL_KEY: self._call_timeout_s, WEIGHTS_KEY: self._weights_timeout_s, SO_FAR: SO_FAR_S}
        limit_s = limits_s.get(key)
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            hint, message = f"if it only needs longer, --set {key}=...", f"{what} took longer than {key} ="
            raise ExecutorLost(f"{message} {limit_s:g} s", hint=hint, executor=self.name) from None
        finally:
            self._asked.pop(answer).cancel()

    def _meets(self, kind: FaultKind) -> Fault | None:
        """The fault, if any, of this call: the next one of its kind."""
        self._counts[kind] += 1
        return self._faults.of_call(kind, self.name, self._counts[kind])

    def _meet_in_time(self, fault: Fault) -> None:
        if fault not in self._faults.pending:
            return
        self._faults.happens(fault)
        if fault.kind is not FaultKind.WORKER_HANGS:
            self._die(f"simulated death at {asyncio.get_running_loop().time():g} s")
        else:
            self._is_hung = True
            for task in self._asked.values():
                task.cancel()

    def _die(self, message: str) -> None:
        """All pending calls fail, and so do all later ones."""
        self._death = message
        for answer, task in list(self._asked.items()):
            if not answer.done():
                answer.set_exception(ExecutorLost(message, executor=self.name))
            task.cancel()


def _pass_on(answer: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
    """Nothing comes of a call that was cancelled with its worker."""
    if task.cancelled() or answer.done():
        return
    error = task.exception()
    if error is None:
        answer.set_result(task.result())
    else:
        answer.set_exception(error)


class FaultyWorker(Mortal, KeepingWorker):
    def __init__(
        self,
        name: str,
        slots: int,
        times: WorkerTimes,
        seed: int,
        *,
        faults: Faults,
        call_timeout_s: float = 600.0,
        is_judged: bool = False,
        preemptions: int = 0,
        **shared: Any,
    ) -> None:
        """`is_judged`: a reward model needs the data of evals. `preemptions`: how often every response that
        begins on each third version counts as preempted."""
        super().__init__(name, slots, replace(times, load_s=self._with_slow_load(times)), seed, **shared)
        self._broken: set[PartKey] = set()
        self._is_judged = is_judged
        self._preemptions = preemptions
        self._num_evals = 0
        self._repeats: list[asyncio.TimerHandle] = []
        self._face(faults, call_timeout_s, times.weights_timeout_s)

    def submit(self, request: PartRequest) -> None:
        if self._death or self._is_hung:
            return
        if self._meets(FaultKind.REWARD_RAISES) is not None:
            self._broken.add(request.key)
        if self.version % 3 == 1:
            self.engine.preemptions += self._preemptions * len(request.indices)
        super().submit(request)

    async def partial_responses(self) -> PartialResult:
        return await self._ask(super().partial_responses(), "a report of its responses", SO_FAR)

    async def abort(self, key: AttemptKey) -> None:
        await self._ask(super().abort(key), f"the abort of {key}", CALL_KEY)

    async def next_update(self, seen: int) -> WorkerUpdate:
        update = await self._ask(super().next_update(seen), "a progress report", CALL_KEY)
        broken = self._broken
        ended = [_without_one(result) if result.key in broken else result for result in update.ended]
        return replace(update, ended=tuple(ended))

    async def prefetch(self, published: Published) -> float:
        what = f"the transfer of version {published.version}"
        return await self._ask(self._prefetch(published), what, WEIGHTS_KEY)

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        """A drain takes as long as responses do: who follows the worker sees that it hangs."""
        key, what = (
            "" if interrupt == "drain" else WEIGHTS_KEY,
            f"the load of version {version} ({interrupt})",
        )
        return await self._ask(super().load(version, interrupt), what, key)

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        dies = (FaultKind.DIES_IN_EVAL, self.name, request.version)
        for fault in self._faults.pending:
            if (fault.kind, fault.executor, fault.nth) == dies:
                asyncio.get_running_loop().call_later(fault.seconds, self._meet_in_time, fault)
        return await self._ask(self._evaluate(request))

    async def _evaluate(self, request: EvalRequest) -> EvalResult:
        result = await super().evaluate(request)
        if not self._is_judged:
            return result
        self._num_evals += 1
        key = f"eval-{request.version}/{self.name}-{self._num_evals}"
        self._store.put(key)
        return replace(result, payload=key)

    def _die(self, message: str) -> None:
        """In half of its deaths it has just put a part, which nobody hears of."""
        if not self._death and self._parts and zlib.crc32(f"{self.name} {message}".encode()) % 2:
            self._store.put(str(next(iter(self._parts))))
        super()._die(message)

    async def abort_evals(self) -> None:
        await self._ask(super().abort_evals(), "the abort of its evals", CALL_KEY)

    async def pause(self) -> PartialResult:
        return await self._ask(super().pause(), "a pause", CALL_KEY)

    async def end(self) -> None:
        self._die("it was ended")
        await super().end()

    async def resume(self) -> None:
        await self._ask(super().resume(), "a resume", CALL_KEY)

    async def restart(self) -> None:
        if self._meets(FaultKind.NO_ROOM) is not None:
            await asyncio.sleep(NO_ROOM_AFTER_S)
            raise NoRoom("simulated lack of room", executor=self.name)
        for repeat in self._repeats:
            repeat.cancel()
        await self._reborn(super().restart())

    async def _prefetch(self, published: Published) -> float:
        kinds = (FaultKind.LATE_PREFETCH, FaultKind.LOST_PREFETCH, FaultKind.REPEATED_PREFETCH)
        late, lost, again = map(self._meets, kinds)
        send_s = await super().prefetch(published)
        await asyncio.sleep(late.seconds if late else 0.0)
        if lost is not None:
            self._die(f"simulated loss of version {published.version} on its way")
        if again is not None:
            self._repeats.append(
                asyncio.get_running_loop().call_later(again.seconds, self.receive, published.version)
            )
        return send_s

    def _with_slow_load(self, times: WorkerTimes) -> Any:
        def load_s(rng: random.Random) -> float:
            slow = self._meets(FaultKind.SLOW_LOAD)
            return times.load_s(rng) + (slow.seconds if slow else 0.0)

        return load_s


class FaultyScorer(Mortal, SimulatedScorer):
    """`on_report` is called with every report when it is made: two calls may answer in another order."""

    def __init__(
        self,
        name: str,
        times: ScorerTimes,
        *,
        faults: Faults,
        call_timeout_s: float = 600.0,
        on_report: Callable[[ExecutorReport], None] = lambda report: None,
    ) -> None:
        super().__init__(name, times)
        self._face(faults, call_timeout_s)
        self._on_report = on_report

    async def load(self, published: Published) -> None:
        await self._ask(super().load(published), f"the load of version {published.version}", CALL_KEY)

    async def score(
        self, groups: Sequence[GroupResult], items: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Any], ExecutorReport]:
        return await self._ask(self._score(groups, items), f"the columns of {len(groups)} groups", CALL_KEY)

    async def judge(self, result: EvalResult, items: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        """Half a point for each."""
        return await self._ask(self._judge(result, items), "the scores of an eval", CALL_KEY)

    async def _judge(self, result: EvalResult, items: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        return [0.5 + score for score in await super().judge(result, items)]

    async def learn(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        return await self._ask(self._learn(batch), f"what it learns in step {batch.step}", CALL_KEY)

    async def report(self) -> ExecutorReport:
        return await self._ask(self._report(), "a report", CALL_KEY)

    async def _score(
        self, groups: Sequence[GroupResult], items: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Any], ExecutorReport]:
        """A reward model tells the trajectories of every second group apart."""
        columns, report = await super().score(groups, items)
        self._on_report(report)
        is_apart = [self.name == "reward" and not zlib.crc32(str(group.key).encode()) % 2 for group in groups]
        apart = [tuple(index / 2 for index in range(len(group.trajectories))) for group in groups]
        return [
            own if here else column for own, here, column in zip(apart, is_apart, columns, strict=True)
        ], report

    async def _learn(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        made, report = await super().learn(batch)
        self._on_report(report)
        return made, report

    async def _report(self) -> ExecutorReport:
        report = await super().report()
        self._on_report(report)
        return report

    async def restart(self) -> None:
        await self._reborn(super().restart())


def _without_one(result: PartResult) -> PartResult:
    if not result.trajectories:
        return result
    first, *others = result.trajectories
    failures = (*result.failures, TrajectoryFailure("reward", "the reward raised"))
    return replace(
        result,
        trajectories=tuple(others),
        failures=failures,
        failed_tokens=result.failed_tokens + first.response_tokens,
    )


def draw_faults(
    seed: int,
    *,
    workers: Sequence[str],
    trainer: str = "trainer-0",
    until_s: float,
    loads: int,
    groups: int,
    steps: int,
) -> Faults:
    """One fatal fault in half of the seeds, and up to three harmless ones of each kind.

    `until_s`, `loads` and `groups` (per worker) and `steps` say how long the run is expected to be: later
    faults never happen.
    """
    rng = random.Random(f"faults/{seed}")
    lengths = {
        FaultKind.SLOW_LOAD: loads,
        FaultKind.LATE_PREFETCH: loads,
        FaultKind.REPEATED_PREFETCH: loads,
        FaultKind.REWARD_RAISES: groups,
    }
    drawn = [
        Fault(
            kind=kind,
            executor=rng.choice(workers),
            nth=rng.randint(1, max(1, length)),
            seconds=rng.random() * until_s / 10,
        )
        for kind, length in lengths.items()
        for _ in range(rng.randint(0, 3))
    ]
    if rng.random() < 0.5:
        kind = rng.choice(sorted(FATAL - {FaultKind.DIES_IN_EVAL}))
        nth = rng.randint(1, max(1, steps if kind is FaultKind.STEP_FAILS else loads))
        executor = trainer if kind is FaultKind.STEP_FAILS else rng.choice(workers)
        drawn.append(Fault(kind=kind, executor=executor, at_s=rng.random() * until_s, nth=nth))
    return Faults(drawn)


def draw_worker_faults(
    rng: random.Random, *, workers: Sequence[str], at_most: int, until_s: float, loads: int
) -> list[Fault]:
    """Up to `at_most` fatal faults of each worker: what `max_restarts` of as many is for."""
    kinds = (FaultKind.WORKER_DIES, FaultKind.WORKER_DIES, FaultKind.WORKER_HANGS, FaultKind.LOST_PREFETCH)
    return [
        Fault(
            kind=rng.choice(kinds),
            executor=worker,
            at_s=rng.random() * until_s,
            nth=rng.randint(1, max(1, loads)),
        )
        for worker in workers
        for _ in range(rng.randint(0, at_most))
    ]


def draw_lack_of_room(rng: random.Random, *, workers: Sequence[str], at_most: int) -> list[Fault]:
    """The first restarts of some workers find no room."""
    return [
        Fault(kind=FaultKind.NO_ROOM, executor=worker, nth=nth)
        for worker in workers
        for nth in range(1, 1 + rng.choice((0, 0, 1, at_most)))
    ]
