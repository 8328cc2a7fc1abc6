"""A simulated rollout worker: an engine, rewards that take time, and the calls of
`contracts.ports.RolloutWorker`.

    submit -> engine (a part's sequences) --each end--> slot free, reward begins --all rewards--> progress
    prefetch -> second buffer -> load (drain | freeze) -> thaw -> generation continues

The real rollout actor's meter (`measure.meters`) integrates its time in each state. Nothing runs per token,
and there is no task or timer per trajectory, so runs of many workers simulate fast.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from asyncrl_cli.base.errors import ExecutorLost
from asyncrl_cli.contracts.ports import EvalRequest, EvalResult, PartialResult, WorkerUpdate
from asyncrl_cli.contracts.prompt_group import AttemptKey, DataKey, PartKey, PartRequest, PartResult
from asyncrl_cli.contracts.weight_version import LoadReport, Published
from asyncrl_cli.measure.meters import LongPoll, RolloutMeter
from asyncrl_cli.profile.schema import Interrupt
from asyncrl_cli.simulate.responses import Responses, WorkerTimes, trajectories_of
from asyncrl_cli.simulate.sequences import NEVER, SimulatedSequence
from asyncrl_cli.simulate.simulated_engine import SimulatedEngine
from asyncrl_cli.simulate.simulated_trainer import SharedMachine


class SimulatedStore:
    """Implements `contracts.ports.DataStore`: keys without data."""

    def __init__(self) -> None:
        self.held = dict[DataKey, None]()

    def put(self, key: DataKey) -> None:
        self.held[key] = None

    def clear(self, keys: Iterable[DataKey]) -> None:
        for key in keys:
            self.held.pop(key, None)

    @contextmanager
    def pinned(self, keys: Collection[DataKey]) -> Iterator[None]:
        yield

    async def keys(self) -> Collection[DataKey]:
        return [*self.held]

    def stats(self) -> Mapping[str, int]:
        return {"keys": len(self.held), "bytes": 0}


class SimulatedWorker:
    """Implements `contracts.ports.RolloutWorker` on the running (virtual) loop's clock."""

    def __init__(
        self,
        name: str,
        slots: int,
        times: WorkerTimes,
        seed: int,
        machine: SharedMachine | None = None,
        store: SimulatedStore | None = None,
        *,
        is_lent: bool = False,
    ) -> None:
        """`is_lent`: it begins asleep, on a device of the trainer's."""
        self.name = name
        self.slots = slots
        self._times = times
        self._rng = random.Random(f"{seed}/{name}")
        self.speed = 1 + times.decoding.speed_spread * self._rng.uniform(-1, 1)
        self._machine = machine or SharedMachine()
        self._store = store or SimulatedStore()
        self._is_lent = is_lent
        self._begin()

    def _begin(self) -> None:
        """Set up the state of a new process, at the start and at each restart."""
        self._poll = LongPoll(self._times.progress_s, self._times.poll_s)
        self._meter = RolloutMeter(self.name, self.slots, asyncio.get_running_loop().time, self._poll.note)
        times = self._times
        self.engine = SimulatedEngine(
            self.slots,
            times.decoding,
            speed=self.speed,
            cache=times.cache,
            hold_slots=times.hold_slots,
            trace_sequences=times.trace_sequences,
            on_running=self._running,
        )
        self._machine.add(self.engine)
        self._meter.pause(self._is_lent)
        self._was_running = False
        self._parts: dict[PartKey, Responses] = {}
        self._touched: dict[PartKey, Responses] = {}
        """Those of which a response has ended or given up its slot: few of hundreds, and all that a report
        has to count."""
        self._ended: list[PartResult] = []
        self._evals: list[Responses] = []
        self._received = -1

    @property
    def version(self) -> int:
        return self.engine.version

    def submit(self, request: PartRequest) -> None:
        assert request.key not in self._parts, f"{request.key} is already running"
        process_parts = self._parts

        def end(part: Responses) -> None:
            del process_parts[request.key]
            if process_parts is not self._parts:  # its process was restarted
                return
            self._touched.pop(request.key, None)
            self._meter.parts(-1)
            self._ended.append(part.part_result(request))
            self._store.put(str(request.key))
            self._poll.note(is_urgent=not self._parts)

        def draw(indices: Sequence[int]) -> list[SimulatedSequence]:
            return trajectories_of(request.seed, indices, self._times, request.key.attempt)

        def touch() -> None:
            self._touched[request.key] = self._parts[request.key]

        def draw_again(index: int) -> SimulatedSequence:
            touch()
            return draw((index,))[0]

        def free_slot() -> None:
            touch()
            self._poll.note()

        self._meter.parts(+1)
        self._parts[request.key] = Responses(
            draw(request.indices),
            self._times,
            self.engine,
            end,
            on_waiting=self._meter.waiting,
            on_slot=free_slot,
            partial=request.partial,
            draw_again=draw_again,
            versions=request.versions,
        )

    async def partial_responses(self) -> PartialResult:
        found = {key: part.partial_responses() for key, part in self._parts.items()}
        kept = {key: kept for key, (kept, _) in found.items() if kept}
        keys, rest_tokens = tuple(f"{key}-partial" for key in kept), sum(rest for _, rest in found.values())
        for key in keys:
            self._store.put(key)
        return PartialResult(responses=kept, rest_tokens=rest_tokens, keys=keys)

    async def abort(self, key: AttemptKey) -> None:
        for part in [part for running, part in self._parts.items() if running.attempt == key]:
            part.abort()

    async def next_update(self, seen: int) -> WorkerUpdate:
        seen = await self._poll.after(seen)
        sampled_tokens, decode_steps, running_tokens = self.engine.counters()
        report = self._meter.report(
            version=self.version,
            sampled_tokens=int(round(sampled_tokens, 6)),  # rounding must not take one back
            decode_steps=decode_steps,
            running_tokens=sum([part.ended_tokens for part in self._touched.values()]) + int(running_tokens),
            sums={} if self._times.cache.blocks == NEVER else {"preemptions": self.engine.preemptions},
            slot_intervals=self.engine.take_slot_intervals(),
            machines=self._times.reports_machines,
        )
        freed = {key: number for key, part in self._touched.items() if (number := part.num_without_slot)}
        ended, self._ended = tuple(self._ended), []
        return WorkerUpdate(seen=seen, freed_slots=freed, reports=(report,), ended=ended)

    async def prefetch(self, published: Published) -> float:
        send_s = self._times.prefetch_s(self._rng)
        with self._meter.receiving():
            await self._take(send_s, f"the transfer of version {published.version}")
        self.receive(published.version)
        return send_s

    def receive(self, version: int) -> None:
        """Record a received version. A repeated or late transfer of an older version changes nothing."""
        self._received = max(self._received, version)

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        times = self._times
        assert version == self._received, (
            f"{self.name} loads version {version} and has received {self._received}"
        )
        assert version > self.version, f"{self.name} goes from version {self.version} to {version}"
        self._meter.load_begins(interrupt)
        if interrupt == "drain":
            await self.engine.drained()
        async with times.turns or nullcontext():
            load_s = times.load_s(self._rng)
            self.engine.freeze()
            stopped_s = times.fetch_s + load_s + times.pause_s
            await self._take(stopped_s, f"the load of version {version} ({interrupt})")
            self.engine.thaw(version, recompute=interrupt == "recompute-kv")
        if interrupt == "restart":
            for part in self._parts.values():
                part.restart()
        self._meter.load_ended()
        return LoadReport(
            version=version, send_s=times.fetch_s, load_s=load_s, pause_s=stopped_s, logprob_abs_diff=0.0
        )

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        assert request.version == self.version, (
            f"{self.name} holds version {self.version} and cannot score {request.version}"
        )
        seeds = [f"{request.seed}/{entry.item['uid']}/{entry.sample}" for entry in request.tries]
        drawn = [trajectories_of(seed, (0,), self._times)[0] for seed in seeds]
        self._meter.evals(+1)
        done = asyncio.Event()
        answers = Responses(
            drawn,
            self._times,
            self.engine,
            lambda _: done.set(),
            on_waiting=self._meter.waiting,
            on_slot=lambda: None,
            partial={},
        )
        self._evals.append(answers)
        await done.wait()
        self._evals.remove(answers)
        self._meter.evals(-1)
        return answers.eval_result(request)

    async def abort_evals(self) -> None:
        for answers in self._evals:
            answers.abort()

    async def pause(self) -> PartialResult:
        assert self._is_lent or self.engine.running == 0, f"{self.name} is paused while sequences run"
        found, running = await self.partial_responses(), self._stop_parts()
        self._meter.parts(-len(running))
        self.engine.version, self._received = -1, -1
        self._meter.pause(True)
        await asyncio.sleep(self._times.sleep_s)
        return replace(found, stopped=tuple(running))

    async def resume(self) -> None:
        await asyncio.sleep(self._times.wake_s)
        self._meter.pause(False)

    async def end(self) -> None:
        self._stop_parts()

    def _stop_parts(self) -> dict[PartKey, Responses]:
        """Stop all parts and evals without a result. Returns the parts."""
        running, self._parts, self._touched = dict(self._parts), {}, {}
        for responses in [*running.values(), *self._evals]:
            responses.abort()
        return running

    async def node_is_gone(self) -> bool:
        return False

    async def restart(self) -> None:
        self._stop_parts()
        self._machine.remove(self.engine)
        self._begin()
        await asyncio.sleep(self._times.restart_s(self._rng))

    async def _take(self, seconds: float, what: str) -> None:
        """Let `seconds` pass. Raises ExecutorLost after weights.timeout_s, as the real worker's call
        would."""
        limit_s = self._times.weights_timeout_s
        if seconds > 0:
            await asyncio.sleep(min(seconds, limit_s))
        if seconds > limit_s:
            raise ExecutorLost(
                f"{what} took longer than weights.timeout_s = {limit_s:g} s", executor=self.name
            )

    def _running(self, running: int) -> None:
        self._meter.running(running)
        if (running > 0) != self._was_running:
            self._was_running = running > 0
            self._machine.computing(+1 if running else -1)
