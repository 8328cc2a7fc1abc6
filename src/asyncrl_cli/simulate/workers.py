"""A simulated rollout worker: sequences take time token by token, loads interrupt them, evals take slots."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl_cli.errors import ExecutorFailed
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
    TrajectoryMeta,
)
from asyncrl_cli.loop.states import State, StateClock


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """How long things take. Lengths come from `response_tokens(rng)`; a failed reward from `failure_ratio`."""

    token_s: float
    response_tokens: Callable[[random.Random], int]
    reward_s: float = 0.0
    prefetch_s: Callable[[random.Random], float] = lambda rng: 0.0
    load_s: Callable[[random.Random], float] = lambda rng: 0.0
    failure_ratio: float = 0.0
    dies_at_s: float | None = None


class _Slots:
    """A counting semaphore that wakes in order and never lets a latecomer overtake."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._queue: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        if self._free > 0:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        await turn

    def give(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class SimulatedWorker:
    """Implements `loop.ports.RolloutWorker` on the running (virtual) loop's clock."""

    def __init__(self, name: str, slots: int, times: WorkerTimes, seed: int) -> None:
        self.name = name
        self.slots = slots
        self.version = -1
        self.loads: list[int] = []
        self._times = times
        self._rng = random.Random(f"{seed}/{name}")
        self._now = asyncio.get_running_loop().time
        self._clock = StateClock(name, "rollout", self._now)
        self._slots = _Slots(slots)
        self._running = 0
        self._counted_s = self._now()
        self._open = asyncio.Event()
        self._open.set()
        self._frozen = asyncio.Event()
        self._prefetched = -1
        self._idle = asyncio.Event()
        self._idle.set()
        self._finished: dict[AttemptKey, int] = {}
        self._aborted: set[AttemptKey] = set()
        self._eval_aborts = 0
        self._changes = 0
        self._changed = asyncio.Event()

    async def generate(self, request: GroupRequest) -> GroupResult:
        self._finished[request.key] = 0
        rng = random.Random(request.seed)
        async with asyncio.TaskGroup() as tasks:
            members = [tasks.create_task(self._trajectory(request, rng.random())) for _ in range(request.n)]
        del self._finished[request.key]
        metas = [task.result() for task in members]
        if request.key in self._aborted:
            self._aborted.discard(request.key)
            tokens = sum(meta.response_tokens for meta in metas if meta)
            return GroupResult(key=request.key, trajectories=(), failures=(), failed_tokens=tokens, payload=None)
        kept = tuple(meta for meta in metas if meta is not None)
        failures = ("the reward raised",) * (request.n - len(kept))
        return GroupResult(key=request.key, trajectories=kept, failures=failures, failed_tokens=0, payload=str(request.key))

    async def abort(self, key: AttemptKey) -> None:
        if key in self._finished:
            self._aborted.add(key)
            self._interrupt()

    async def progress(self, seen: int) -> Progress:
        self._check_alive()
        if self._changes == seen:
            self._changed.clear()
            try:
                async with asyncio.timeout(1.0):
                    await self._changed.wait()
            except TimeoutError:
                pass
        self._check_alive()
        self._count(0)
        self._clock.gauges |= {"running_sequences": self._running, "slots": self.slots, "version": self.version}
        return Progress(seen=self._changes, finished_sequences=dict(self._finished), reports=(self._clock.report(),))

    async def prefetch(self, published: Published) -> float:
        send_s = self._times.prefetch_s(self._rng)
        await asyncio.sleep(send_s)
        self._prefetched = published.version
        return send_s

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        assert version == self._prefetched
        if interrupt == "drain":
            await self._idle.wait()
        load_s = self._times.load_s(self._rng)
        self._open.clear()
        self._interrupt()
        self._clock.enter(State.LOADING)
        await asyncio.sleep(load_s)
        assert version > self.version, f"{self.name} went from version {self.version} to {version}"
        self.version = version
        self.loads.append(version)
        self._open.set()
        self._clock.enter(State.BUSY if self._running else State.STARVED)
        return LoadReport(version=version, send_s=0.0, load_s=load_s, pause_s=load_s, logprob_abs_diff=0.0)

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        assert request.version == self.version, "an eval runs on a worker that holds its version"
        lengths, aborts = list[int](), self._eval_aborts
        for _ in request.items:
            spans = await self._sample(lambda: self._eval_aborts > aborts)
            if self._eval_aborts > aborts:
                break
            lengths.append(sum(tokens for _, tokens in spans))
            assert {version for version, _ in spans} == {request.version}, "a load during an eval"
        failures = ("aborted",) * (len(request.items) - len(lengths))
        return EvalResult(version=request.version, rewards=(0.5,) * len(lengths), response_tokens=tuple(lengths), failures=failures)

    async def abort_evals(self) -> None:
        self._eval_aborts += 1
        self._interrupt()

    async def pause(self) -> None:
        assert self._running == 0, "paused while sequences run"
        self._clock.enter(State.PAUSED)

    async def resume(self) -> None:
        self._clock.enter(State.STARVED)

    async def _trajectory(self, request: GroupRequest, luck: float) -> TrajectoryMeta | None:
        spans = await self._sample(lambda: request.key in self._aborted)
        await asyncio.sleep(self._times.reward_s)
        if request.key in self._finished:
            self._finished[request.key] += 1
            self._change()
        if not spans or luck < self._times.failure_ratio:
            return None
        return TrajectoryMeta(
            prompt_tokens=4,
            response_tokens=sum(tokens for _, tokens in spans),
            reward=float(luck > 0.5),
            finish_reason="stop",
            version_tokens=tuple(spans),
        )

    async def _sample(self, is_aborted: Callable[[], bool]) -> list[tuple[int, int]]:
        """One sequence: [(version, tokens), ...], through any number of loads."""
        await self._slots.take()
        remaining, spans = self._times.response_tokens(self._rng), list[tuple[int, int]]()
        try:
            while remaining > 0 and not is_aborted():
                await self._open.wait()
                tokens = await self._tokens_until_interrupt(remaining)
                remaining -= tokens
                if tokens and spans and spans[-1][0] == self.version:
                    spans[-1] = (self.version, spans[-1][1] + tokens)
                elif tokens:
                    spans.append((self.version, tokens))
        finally:
            self._slots.give()
        return spans

    async def _tokens_until_interrupt(self, remaining: int) -> int:
        self._count(+1)
        began_s, frozen = self._now(), self._frozen
        try:
            async with asyncio.timeout(remaining * self._times.token_s):
                await frozen.wait()
            tokens = min(remaining, int((self._now() - began_s) / self._times.token_s))
        except TimeoutError:
            tokens = remaining
        finally:  # an eval that timed out is cancelled here
            self._count(-1)
        self._clock.add("sampled_tokens", tokens)
        return tokens

    def _interrupt(self) -> None:
        frozen, self._frozen = self._frozen, asyncio.Event()
        frozen.set()

    def _count(self, change: int) -> None:
        """Integrate the running sequences up to now, then change their number."""
        now_s = self._now()
        self._clock.add("running_sequence_s", self._running * (now_s - self._counted_s))
        self._clock.add("idle_s", (now_s - self._counted_s) if self._running == 0 else 0.0)
        self._counted_s = now_s
        self._running += change
        if change == 0:
            return
        if self._running:
            self._idle.clear()
            self._clock.enter(State.BUSY)
        else:
            self._idle.set()
            self._clock.enter(State.STARVED)
            self._change()

    def _change(self) -> None:
        self._changes += 1
        self._changed.set()

    def _check_alive(self) -> None:
        if self._times.dies_at_s is not None and self._now() >= self._times.dies_at_s:
            raise ExecutorFailed(f"{self.name} failed: simulated death at {self._times.dies_at_s:g} s")
