"""The real actor's `exchange` and the driver's side of it, in one event loop on a virtual clock: only Ray's
way between them is not there. With it: test_real_actors.py and tests/run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from benchmarks.local_store import LocalStore
from ray.exceptions import ActorDiedError, RaySystemError, RayTaskError

from asyncrl_cli.base.errors import ExecutorFailed, ExecutorLost
from asyncrl_cli.contracts.ports import WorkerUpdate
from asyncrl_cli.contracts.prompt_group import AttemptKey, PartKey, PartRequest, PartResult, TrajectoryFailure
from asyncrl_cli.data.store import Stored
from asyncrl_cli.data.trajectories import HEADS, Trajectory
from asyncrl_cli.envs.group_runner import PartDesk
from asyncrl_cli.job.driver_rollout import SETTLE_S, PartExchange, RayRolloutWorker
from asyncrl_cli.job.ray.calls import Limit, answer
from asyncrl_cli.job.rollout_host import OBJECTS_PER_ANSWER, RolloutHost
from asyncrl_cli.measure.meters import DEBOUNCE_S, POLL_S, LongPoll
from asyncrl_cli.measure.states import ExecutorReport, State
from asyncrl_cli.simulate.world import run_virtual
from tests.loop.proof.shuffled import loop_of

from .crew import small_profile

CALL_TIMEOUT_S = 30.0
WAY_S = 0.001
"""Of a call to the actor, and of its answer back."""

Takes = Callable[[PartRequest], float]
"""How many seconds a part runs; less than 0: it raises then."""


class Runner:
    """Parts that take as long as we say."""

    def __init__(self, takes_s: Takes) -> None:
        self._takes_s = takes_s
        self.begun: dict[PartKey, float] = {}
        self.ended: dict[PartKey, float] = {}
        self.aborted: list[AttemptKey] = []

    async def run(
        self, request: PartRequest, on_sequence: Callable[[int], None]
    ) -> tuple[PartResult, Stored]:
        now = asyncio.get_running_loop().time
        key, seconds = request.key, self._takes_s(request)
        assert key not in self.begun, f"{key} was begun twice"
        self.begun[key] = now()
        for finished in range(1, len(request.indices) + 1):
            await asyncio.sleep(abs(seconds) / len(request.indices))
            on_sequence(finished)
        if seconds < 0:
            raise ValueError(f"no engine for {key}")
        self.ended[key] = now()
        result = PartResult(
            key=key,
            trajectories=(),
            failures=(TrajectoryFailure("reward", str(key)),),
            failed_tokens=0,
            payload=str(key),
        )
        return result, LocalStore().put(str(key), (Trajectory(values={"of": str(key)}),))

    async def abort(self, key: AttemptKey) -> None:
        assert key in {begun.attempt for begun in self.begun}, f"the abort of {key} came before its requests"
        self.aborted.append(key)


class Actor(RolloutHost):
    """The real one without an engine: it runs `runner`'s parts."""

    def __init__(self, runner: Any) -> None:
        self._name = "rollout-0"
        self._runner = runner
        self._partial, self._num_given = {}, 0
        self._changes = LongPoll()
        self._desk = PartDesk(runner.run, self._changes)

    def report(self, seen: int, ended: tuple[PartResult, ...]) -> WorkerUpdate:
        return WorkerUpdate(seen=seen, ended=ended, freed_slots=self._desk.freed_slots, reports=())


class Handle:
    """What Ray makes of an actor: methods with `remote`, one future per returned object, errors wrapped.
    Counts the calls. `ways_s`: by method, how long its calls are on their way to the actor."""

    def __init__(self, actor: Actor, **ways_s: float) -> None:
        self._actor = actor
        self.ways_s = ways_s
        self.calls: list[str] = []
        self.under_way: set[asyncio.Future[Any]] = set()

    def die(self) -> None:
        for call in list(self.under_way):
            call.cancel("died")

    def __getattr__(self, method: str) -> Any:
        return _Remote(self, method, getattr(self._actor, method))


class _Remote:
    def __init__(self, handle: Handle, name: str, method: Callable[..., Awaitable[Any]]) -> None:
        self._handle, self._name, self._method = handle, name, method

    def remote(self, *args: Any) -> Any:
        self._handle.calls.append(self._name)
        whole = asyncio.ensure_future(self._call(args))
        self._handle.under_way.add(whole)
        whole.add_done_callback(self._handle.under_way.discard)
        if self._name != "exchange":
            return whole
        return [object_of(whole, index) for index in range(1 + OBJECTS_PER_ANSWER)]

    async def _call(self, args: tuple[Any, ...]) -> Any:
        try:
            await asyncio.sleep(self._handle.ways_s.get(self._name, WAY_S))
            returned = await self._method(*args)
            await asyncio.sleep(WAY_S)
            return returned
        except asyncio.CancelledError as error:
            if error.args != ("died",):
                raise
            raise ActorDiedError from None
        except Exception as error:
            raise RayTaskError(self._name, "", error) from error


def object_of(whole: asyncio.Future[Any], index: int) -> asyncio.Future[Any]:
    one: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def settle(_: Any) -> None:
        if one.done() or whole.cancelled():  # nobody waits for it any more
            one.cancel()
        elif (error := whole.exception()) is not None:
            one.set_exception(error)
            one.exception()  # as with Ray, nobody has to look at every object of a failed call
        else:
            one.set_result(whole.result()[index])

    whole.add_done_callback(settle)
    return one


class Followed:
    """Calls `next_update` again and again, as the loop does for as long as a worker lives. `ended`: every
    result, and when it came."""

    def __init__(self, exchange: PartExchange | RayRolloutWorker) -> None:
        self._exchange = exchange
        self.ended: dict[PartKey, tuple[PartResult, float]] = {}
        self.failure: Exception | None = None
        self._more = asyncio.Event()

    async def follow(self) -> None:
        seen = 0
        try:
            while True:
                update = await self._exchange.next_update(seen)
                seen = update.seen
                for result in update.ended:
                    assert result.key not in self.ended, f"{result.key} came back twice"
                    self.ended[result.key] = result, asyncio.get_running_loop().time()
                self._more.set()
        except Exception as error:
            self.failure = error
            self._more.set()

    async def until(self, *requests: PartRequest) -> None:
        """Wait until all of these have come back; raise the failure of `next_update` if there is one
        before."""
        while not {request.key for request in requests} <= self.ended.keys():
            if self.failure is not None:
                raise self.failure
            self._more.clear()
            await self._more.wait()

    async def run(self, *requests: PartRequest) -> None:
        for request in requests:
            self._exchange.submit(request)
        await self.until(*requests)


@asynccontextmanager
async def followed(exchange: PartExchange | RayRolloutWorker) -> AsyncIterator[Followed]:
    follower = Followed(exchange)
    task = asyncio.create_task(follower.follow())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def part(index: int, number: int = 0) -> PartRequest:
    key = PartKey(AttemptKey(f"p{index}", 0, 0), number)
    return PartRequest(key=key, item={}, indices=tuple(range(4 * number, 4 * number + 4)), seed=index)


def exchange_with(takes_s: Takes) -> tuple[PartExchange, Handle, Runner]:
    runner = Runner(takes_s)
    return *exchange_of(Actor(runner)), runner


def exchange_of(actor: Actor) -> tuple[PartExchange, Handle]:
    handle = Handle(actor)
    bounded = partial(answer, executor="rollout-0", limit=Limit(CALL_TIMEOUT_S, "rollout.call_timeout_s"))
    return PartExchange(handle, lambda pending, call: bounded(pending, call=call), LocalStore()), handle


@pytest.mark.parametrize("seed", range(16))
def test_every_part_comes_back_once_with_its_own_arrays_and_calls_do_not_grow_with_parts(seed):
    rng = random.Random(seed)
    num_parts, at_once = rng.randint(1, 120), rng.randint(1, 24)
    durations = [rng.choice([0.0, rng.uniform(0.01, 0.3), rng.uniform(0.3, 3.0)]) for _ in range(num_parts)]

    async def main() -> None:
        began_s = asyncio.get_running_loop().time()
        exchange, handle, runner = exchange_with(lambda request: durations[request.seed])
        places, requests = (
            asyncio.Semaphore(at_once),
            [part(index // 3, index % 3) for index in range(num_parts)],
        )
        requests = [replace(request, seed=index) for index, request in enumerate(requests)]

        async def run(request: PartRequest) -> None:
            async with places:
                await follower.run(request)

        async with followed(exchange) as follower:
            await asyncio.gather(*map(run, requests))
        for key, (result, _) in follower.ended.items():
            (stored,) = exchange.store.stored([str(key)])
            ((_, values),) = (await stored.pieces[0].content)[HEADS]
            assert (key, values["of"], result.failures) == (
                result.key,
                str(key),
                (TrajectoryFailure("reward", str(key)),),
            )
        assert follower.ended.keys() == runner.ended.keys() == {request.key for request in requests}
        whole_s = asyncio.get_running_loop().time() - began_s
        # An answer comes DEBOUNCE_S after the last, or with all that ran, or at once if it leaves ended parts
        # behind.
        idle_times = sum(duration < 0.02 for duration in durations) + num_parts / at_once
        assert (
            handle.calls.count("exchange")
            <= 2 + whole_s / DEBOUNCE_S + num_parts / OBJECTS_PER_ANSWER + idle_times
        )
        answers = at_once / OBJECTS_PER_ANSWER + 2
        late_s = [came_s - runner.ended[key] for key, (_, came_s) in follower.ended.items()]
        assert max(late_s) <= DEBOUNCE_S + answers * (2 * WAY_S + SETTLE_S + 0.001)

    run_virtual(main(), loop_factory=loop_of(seed))


def test_the_last_part_of_a_worker_is_told_without_delay():
    """Nothing is left that could come along: on-policy's windows, and colocate's phases, end with it."""

    async def main() -> float:
        exchange, _, runner = exchange_with(lambda request: 0.5 if request.seed == 0 else 0.51)
        async with followed(exchange) as follower:
            await follower.run(part(0), part(1))
            return asyncio.get_running_loop().time() - runner.ended[part(1).key]

    assert run_virtual(main()) == pytest.approx(WAY_S)


def test_many_parts_that_end_together_come_one_answer_after_the_other():
    """No debounce between them: all trajectories at the token limit, say."""

    async def main() -> float:
        exchange, _, runner = exchange_with(lambda request: 1.0)
        async with followed(exchange) as follower:
            await follower.run(*map(part, range(24)))
            return asyncio.get_running_loop().time() - max(runner.ended.values())

    assert run_virtual(main()) == pytest.approx(
        WAY_S + (24 / OBJECTS_PER_ANSWER - 1) * (2 * WAY_S + SETTLE_S)
    )


def test_a_request_does_not_wait_for_an_answer_that_is_not_due():
    async def main() -> tuple[float, list[str]]:
        exchange, handle, runner = exchange_with(lambda request: 0.01)
        now = asyncio.get_running_loop().time
        async with followed(exchange) as follower:
            await asyncio.sleep(POLL_S / 2)  # an exchange is under way, and there is nothing to tell
            asked_s = now()
            await follower.run(part(0), part(1, 0), part(1, 1))
            return runner.begun[part(1, 1).key] - asked_s, handle.calls

    waited_s, calls = run_virtual(main())
    assert waited_s == pytest.approx(WAY_S)
    assert calls.count("submit") == 1  # all three


def test_a_part_that_raises_fails_the_worker_with_its_own_error():
    async def main() -> tuple[Exception | None, int]:
        exchange, _, _ = exchange_with(lambda request: -0.2 if request.seed == 1 else 60.0)
        async with followed(exchange) as follower:
            with pytest.raises(ExecutorFailed):
                await follower.run(*map(part, range(3)))
            return follower.failure, len(follower.ended)

    failure, num_ended = run_virtual(main())
    assert isinstance(failure, ExecutorFailed)
    assert not isinstance(failure, ExecutorLost)
    assert (failure.message, num_ended) == ("rollout-0 failed: ValueError: no engine for p1@0.0/0", 0)


def test_parts_that_ended_before_a_failure_are_not_lost_with_it():
    async def main() -> tuple[list[str], Any]:
        exchange, _, _ = exchange_with(
            lambda request: -0.25 if request.seed == 0 else 0.2 + request.seed / 1000
        )
        async with followed(exchange) as follower:
            with pytest.raises(ExecutorFailed):
                await follower.run(*map(part, range(9)))
            return [key.attempt.uid for key in follower.ended], follower.failure

    ended, failure = run_virtual(main())
    assert ended == [f"p{index}" for index in range(1, 9)]
    assert failure.message == "rollout-0 failed: ValueError: no engine for p0@0.0/0"


def test_a_part_that_is_cancelled_within_the_worker_fails():
    async def main() -> Any:
        runner = Runner(lambda request: 1.0)
        runner.run = cancelled_from_within  # type: ignore[method-assign]
        exchange, _ = exchange_of(Actor(runner))
        async with followed(exchange) as follower:
            with pytest.raises(ExecutorFailed) as failed:
                await follower.run(part(0))
            return failed.value

    async def cancelled_from_within(*_: Any) -> Any:
        raise asyncio.CancelledError

    assert run_virtual(main()).message == "rollout-0 failed: part p0@0.0/0 was cancelled"


def test_a_process_that_dies_loses_its_parts_at_once():
    async def main() -> tuple[Any, float]:
        exchange, handle, _ = exchange_with(lambda request: 60.0)
        async with followed(exchange) as follower:
            running = asyncio.create_task(follower.run(*map(part, range(3))))
            await asyncio.sleep(1.0)
            died_s = asyncio.get_running_loop().time()
            handle.die()
            with pytest.raises(ExecutorLost) as lost:
                await running
            return lost.value, asyncio.get_running_loop().time() - died_s

    lost, took_s = run_virtual(main())
    assert took_s == 0.0
    assert "its process ended during a progress report" in lost.message


def test_a_part_may_take_longer_than_any_call():
    async def main() -> float:
        exchange, _, _ = exchange_with(lambda request: 10 * CALL_TIMEOUT_S)
        async with followed(exchange) as follower:
            await follower.run(part(0))
            return asyncio.get_running_loop().time()

    assert run_virtual(main()) > 10 * CALL_TIMEOUT_S


def test_the_limit_of_a_load_counts_from_the_end_of_its_drain():
    """Sequences of version 3 run for 900 s; those that begin after the load do not put it off."""

    async def main() -> tuple[str, float]:
        runner = Runner(lambda request: 1.0)
        actor = Actor(runner)
        began_s = asyncio.get_running_loop().time()

        def next_update(seen: int, ended: tuple[PartResult, ...]) -> WorkerUpdate:
            ran_s = asyncio.get_running_loop().time() - began_s
            gauges = {
                "running_sequences": float(ran_s < 900 or ran_s > 950),
                "version": 3.0 if ran_s < 950 else 4.0,
            }
            return WorkerUpdate(seen=seen, ended=ended, freed_slots={}, reports=(rollout_report(gauges),))

        async def never_ends(version: int, interrupt: str) -> None:
            await asyncio.sleep(10_000)

        actor.report, actor.load = next_update, never_ends  # type: ignore[method-assign, assignment]
        profile = small_profile(weights={"timeout_s": 100.0})
        worker = RayRolloutWorker("rollout-0", lambda: Handle(actor), profile, LocalStore())
        async with followed(worker):
            with pytest.raises(ExecutorLost) as lost:
                await worker.load(4, "drain")
        return lost.value.message, asyncio.get_running_loop().time() - began_s

    message, after_s = run_virtual(main())
    assert message == (
        "rollout-0 failed: the load of version 4 (drain) took longer than weights.timeout_s = 100 s"
    )
    assert after_s == pytest.approx(900 + 100, abs=2 * POLL_S)


def rollout_report(gauges: dict[str, float]) -> ExecutorReport:
    return ExecutorReport(
        name="rollout-0",
        role="rollout",
        now_s=0.0,
        state=State.BUSY,
        waiting_for="",
        state_s={},
        spans=(),
        sums={},
        gauges=gauges,
    )


@pytest.mark.parametrize("way_s", [WAY_S, 0.3])
def test_an_abort_never_overtakes_the_requests_of_its_group(way_s):
    """Not even if Ray starts calls in another order."""

    async def main() -> list[AttemptKey]:
        runner = Runner(lambda request: 1.0)
        handle = Handle(Actor(runner), submit=way_s, exchange=way_s)
        worker = RayRolloutWorker("rollout-0", lambda: handle, small_profile(), LocalStore())
        async with followed(worker) as follower:
            for index, wait_s in enumerate((0.0, 0.0005, 0.05)):  # before, in and after the first exchange
                parts = part(index, 0), part(index, 1)
                for request in parts:
                    worker.submit(request)
                await asyncio.sleep(wait_s)
                await worker.abort(parts[0].key.attempt)
                await follower.until(*parts)
        return runner.aborted

    assert run_virtual(main()) == [part(index).key.attempt for index in range(3)]


def test_a_node_that_ray_cannot_tell_of_counts_as_living(monkeypatch, caplog):
    def no_answer() -> None:
        raise RaySystemError("Failed to connect to GCS")

    monkeypatch.setattr("ray.nodes", no_answer)
    worker = RayRolloutWorker("rollout-0", lambda: None, small_profile(), LocalStore())
    assert asyncio.run(worker.node_is_gone()) is False
    assert "cannot tell whether the node of rollout-0 is gone" in caplog.text


def test_parts_that_are_ended_by_a_stop_are_no_failures(caplog):
    """Whether a part is cancelled or its engine, which is closed next, tells it to end."""

    class Closing(Runner):
        async def run(
            self, request: PartRequest, on_sequence: Callable[[int], None]
        ) -> tuple[PartResult, Stored]:
            try:
                return await super().run(request, on_sequence)
            except asyncio.CancelledError:
                if request.key.number % 2:
                    raise ExecutorFailed("the rollout engine is closed") from None
                raise

    async def main() -> None:
        desk = PartDesk(Closing(lambda request: 100.0).run, LongPoll())
        desk.begin([part(0, number) for number in range(4)])
        await asyncio.sleep(1.0)
        await desk.close()
        assert desk.freed_slots == {}
        assert desk.take(OBJECTS_PER_ANSWER) == []

    run_virtual(main())
    assert caplog.records == []
