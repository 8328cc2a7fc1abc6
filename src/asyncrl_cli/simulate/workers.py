"""A simulated rollout worker: an engine, rewards that take time, and the calls of `loop.ports.RolloutWorker`.

    generate -> engine (n sequences) --each end--> slot free, reward begins --all rewards--> GroupResult
    prefetch -> second buffer -> load (drain | freeze) -> thaw -> on it goes

Its time in states is integrated by the meter of the real rollout actor (`job.meters`), and its answers are bounded by the limits of
the real adapter (`job.ports`). Nothing here runs per token, and per trajectory no task and no timer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl_cli.job.meters import DEBOUNCE_S, POLL_S, RolloutMeter
from asyncrl_cli.loop.ports import (
    AttemptKey,
    EvalRequest,
    EvalResult,
    GroupRequest,
    GroupResult,
    Interrupt,
    LoadReport,
    Progress,
    Published,
)
from asyncrl_cli.loop.signal import background
from asyncrl_cli.simulate.calls import Calls
from asyncrl_cli.simulate.engine import DecodeTimes, SimulatedEngine
from asyncrl_cli.simulate.faults import FaultKind, Faults
from asyncrl_cli.simulate.machine import SharedMachine
from asyncrl_cli.simulate.polls import LongPoll
from asyncrl_cli.simulate.sampled import Sampled, eval_result, fates, group_result
from asyncrl_cli.simulate.sequence import SimulatedSequence
from asyncrl_cli.simulate.worker_faults import WorkerFaults

CALL_KEY = "rollout.call_timeout_s"
WEIGHTS_KEY = "weights.timeout_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """How long things take, and how long responses are.

    `response_tokens(rng, n)`: the lengths of a group's n responses; `rng` is seeded by the group's request, and nothing was drawn
    from it before. `reward_s(rng)` of one trajectory, from the same generator; a share of `failure_ratio` raises.
    `prefetch_s(rng)`, `load_s(rng)`, `restart_s(rng)` from the worker's own. `pause_s`: interrupting and resuming, beside the load
    itself; `fetch_s`: receiving weights within the interrupt, where there is no second buffer.
    `speed_spread`: the worker's decoding takes 1 +- this, uniform. Progress is reported `progress_s` after the last report at the
    earliest, and after `poll_s` even if nothing has changed: long runs of many workers want both longer than the real worker's.
    """

    decoding: DecodeTimes
    response_tokens: Callable[[random.Random, int], Sequence[int]]
    prompt_tokens: int = 4
    max_response_tokens: int | None = None
    reward_s: Callable[[random.Random], float] = lambda rng: 0.0
    failure_ratio: float = 0.0
    prefetch_s: Callable[[random.Random], float] = lambda rng: 0.0
    restart_s: Callable[[random.Random], float] = lambda rng: 0.0
    load_s: Callable[[random.Random], float] = lambda rng: 0.0
    pause_s: float = 0.0
    fetch_s: float = 0.0
    speed_spread: float = 0.0
    progress_s: float = DEBOUNCE_S
    poll_s: float = POLL_S
    call_timeout_s: float = 600.0
    weights_timeout_s: float = 300.0


class SimulatedWorker:
    """Implements `loop.ports.RolloutWorker` on the running (virtual) loop's clock. `loads` keeps the versions it has loaded."""

    def __init__(
        self,
        name: str,
        slots: int,
        times: WorkerTimes,
        seed: int,
        faults: Faults | None = None,
        machine: SharedMachine | None = None,
    ) -> None:
        self.name = name
        self.slots = slots
        self.loads: list[int] = []
        self._times = times
        self._rng = random.Random(f"{seed}/{name}")
        self.speed = 1 + times.speed_spread * self._rng.uniform(-1, 1)
        self._loop = asyncio.get_running_loop()
        self._machine = machine
        self._begin()
        self._faults = WorkerFaults(name, faults or Faults(), self._freeze)

    def _begin(self) -> None:
        """All that a process has, and takes along when it ends."""
        self._calls = Calls(self.name)
        self._poll = LongPoll(self._calls, self._times.progress_s, self._times.poll_s)
        self._meter = RolloutMeter(self.name, self.slots, self._loop.time, self._poll.note)
        self._engine = SimulatedEngine(self.slots, self._times.decoding, speed=self.speed, on_running=self._running)
        if self._machine is not None:
            self._machine.add(self._engine)
        self._was_running = False
        self._groups: dict[AttemptKey, Sampled] = {}
        self._finished: dict[AttemptKey, int] = {}
        self._ended_tokens = 0
        self._evals: dict[Sampled, None] = {}
        self._received = _SecondBuffer()

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, request: GroupRequest) -> GroupResult:
        await self._calls.arrive()
        assert request.key not in self._groups, f"{request.key} runs already"
        rng = random.Random(request.seed)
        done = self._calls.open()
        group = Sampled(
            fates(rng, request.n, self._times),
            self._times.prompt_tokens,
            self._engine,
            lambda group, sequence: self._sequence_ended(request.key, sequence),
            lambda group: self._calls.resolve(done),
        )
        is_broken = self._faults.meets(FaultKind.REWARD_RAISES) is not None
        self._groups[request.key] = group
        self._finished[request.key] = 0
        self._engine.submit(group.sequences)
        await self._calls.answer(done)
        self._group_ended(request.key, group)
        return group_result(group, request, self._times, is_broken)

    async def abort(self, key: AttemptKey) -> None:
        await self._calls.arrive(self._calls.limit(f"the abort of {key}", self._times.call_timeout_s, CALL_KEY))
        if key in self._groups:
            self._groups[key].abort()

    async def progress(self, seen: int) -> Progress:
        limit = self._calls.limit("a progress report", self._times.call_timeout_s, CALL_KEY)
        await self._calls.arrive(limit)
        seen = await self._poll.after(seen, limit)
        report = self._meter.report(
            version=self.version,
            sampled_tokens=int(round(self._engine.sampled_tokens, 6)),  # rounding must not take one back
            decode_steps=self._engine.decode_steps,
            running_tokens=self._ended_tokens + int(self._engine.running_tokens),
        )
        return Progress(seen=seen, finished_sequences=dict(self._finished), reports=(report,))

    async def prefetch(self, published: Published) -> float:
        version = published.version
        limit = self._calls.limit(f"the transfer of version {version}", self._times.weights_timeout_s, WEIGHTS_KEY)
        await self._calls.arrive(limit)
        send_s = self._times.prefetch_s(self._rng)
        late, lost, again = (
            self._faults.meets(kind) for kind in (FaultKind.LATE_PREFETCH, FaultKind.LOST_PREFETCH, FaultKind.REPEATED_PREFETCH)
        )
        await self._calls.sleep(send_s + (late.seconds if late else 0.0), limit)
        if lost is not None:
            self._calls.die(f"{self.name} failed: simulated loss of version {version} on its way")
            self._calls.check()
        self._received.receive(version)
        if again is not None:
            with background():
                self._loop.call_later(again.seconds, self._received.receive, version)
        return send_s

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        times, calls = self._times, self._calls
        what = f"the load of version {version} ({interrupt})"
        limit = calls.limit(what, times.weights_timeout_s, WEIGHTS_KEY)
        await calls.arrive(limit)
        received = self._received.version
        assert version == received, f"{self.name} loads version {version} and has received {received}"
        assert version > self.version, f"{self.name} goes from version {self.version} to {version}"
        self._meter.load_begins(interrupt)
        if interrupt == "drain":
            await calls.answer(self._engine.drained())
            limit = calls.limit(what, times.weights_timeout_s, WEIGHTS_KEY)
        slow = self._faults.meets(FaultKind.SLOW_LOAD)
        load_s = times.load_s(self._rng) + (slow.seconds if slow else 0.0)
        self._engine.freeze()
        stopped_s = times.fetch_s + load_s + times.pause_s
        await calls.sleep(stopped_s, limit)
        self._engine.thaw(version, recompute=interrupt == "recompute-kv")
        self._meter.load_ended()
        self.loads.append(version)
        return LoadReport(version=version, send_s=times.fetch_s, load_s=load_s, pause_s=stopped_s, logprob_abs_diff=0.0)

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        times = self._times
        await self._calls.arrive()
        assert request.version == self.version, f"{self.name} holds {self.version} and is to score {request.version}"
        in_store = [fates(random.Random(f"{request.seed}/{item.get('uid', item)}"), 1, times)[0] for item in request.items]
        done = self._calls.open()
        answers = Sampled(
            in_store,
            times.prompt_tokens,
            self._engine,
            lambda answers, sequence: None,
            lambda answers: self._eval_ended(answers, done),
        )
        self._evals[answers] = None
        self._meter.evals(+1)
        self._engine.submit(answers.sequences)
        await self._calls.answer(done)
        return eval_result(answers, request, times)

    async def abort_evals(self) -> None:
        await self._calls.arrive(self._calls.limit("the abort of its evals", self._times.call_timeout_s, CALL_KEY))
        for answers in list(self._evals):
            answers.abort()

    async def pause(self) -> None:
        await self._calls.arrive(self._calls.limit("a pause", self._times.call_timeout_s, CALL_KEY))
        assert self._engine.running == 0, f"{self.name} is paused while sequences run"
        self._meter.pause(True)

    async def resume(self) -> None:
        await self._calls.arrive(self._calls.limit("a resume", self._times.call_timeout_s, CALL_KEY))
        self._meter.pause(False)

    async def restart(self) -> None:
        self._freeze().die(f"{self.name} failed: it was ended, and another takes its place")
        for sampled in [*self._groups.values(), *self._evals]:
            sampled.abort()
        if self._machine is not None:
            self._machine.remove(self._engine)
        self._begin()
        limit = self._calls.limit("its start", self._times.call_timeout_s, CALL_KEY)
        await self._calls.sleep(self._times.restart_s(self._rng), limit)

    def _freeze(self) -> Calls:
        self._engine.freeze()
        return self._calls

    def _sequence_ended(self, key: AttemptKey, sequence: SimulatedSequence) -> None:
        self._finished[key] += 1
        self._ended_tokens += sequence.tokens
        self._poll.note()

    def _group_ended(self, key: AttemptKey, group: Sampled) -> None:
        del self._groups[key], self._finished[key]
        self._ended_tokens -= sum(sequence.tokens for sequence in group.sequences if sequence.ended)
        self._poll.note()

    def _eval_ended(self, answers: Sampled, done: asyncio.Future[None]) -> None:
        del self._evals[answers]
        self._meter.evals(-1)
        self._calls.resolve(done)

    def _running(self, running: int) -> None:
        self._meter.running(running)
        is_running = running > 0
        if self._machine is not None and is_running != self._was_running:
            self._machine.generating(+1 if is_running else -1)
        self._was_running = is_running


class _SecondBuffer:
    """Holds the newest version that has arrived; what comes again, or late, changes nothing."""

    def __init__(self) -> None:
        self.version = -1

    def receive(self, version: int) -> None:
        self.version = max(self.version, version)
