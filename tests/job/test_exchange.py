"""The real actor's `exchange` and the driver's side of it, in one event loop on a virtual clock: only Ray's way between them is not
there. With it: test_real_actors.py and tests/run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from asyncrl_cli.errors import ExecutorFailed, ExecutorLost
from asyncrl_cli.job.adapters import RayRolloutWorker
from asyncrl_cli.job.calls import Limit, answer
from asyncrl_cli.job.exchange import GROUPS_PER_ANSWER, SETTLE_S, GroupDesk, GroupExchange
from asyncrl_cli.job.rollout_actor import RolloutActor
from asyncrl_cli.loop.attempts import AttemptKey, GroupResult
from asyncrl_cli.loop.meters import DEBOUNCE_S, POLL_S, LongPoll
from asyncrl_cli.loop.ports import GroupRequest, Progress
from asyncrl_cli.loop.states import ExecutorReport, State
from asyncrl_cli.samples import GroupPayload
from asyncrl_cli.simulate.world import run_virtual
from tests.loop.proof.shuffled import loop_of

from .crew import small_profile

CALL_TIMEOUT_S = 30.0
WAY_S = 0.001
"""Of a call to the actor, and of its answer back."""

Takes = Callable[[GroupRequest], float]
"""How many seconds a group runs; -1: it raises."""


class Runner:
    """Groups that take as long as we say."""

    def __init__(self, takes_s: Takes) -> None:
        self._takes_s = takes_s
        self.begun: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.aborted: list[str] = []

    async def run(self, request: GroupRequest, on_sequence: Callable[[int], None]) -> tuple[GroupResult, GroupPayload]:
        now = asyncio.get_running_loop().time
        uid, seconds = request.key.uid, self._takes_s(request)
        assert uid not in self.begun, f"{uid} was begun twice"
        self.begun[uid] = now()
        for finished in range(1, request.n + 1):
            await asyncio.sleep(abs(seconds) / request.n)
            on_sequence(finished)
        if seconds < 0:
            raise ValueError(f"no engine for {uid}")
        self.ended[uid] = now()
        result = GroupResult(key=request.key, trajectories=(), failures=(uid,), failed_tokens=0, payload=None)
        return result, GroupPayload(uid=uid, epoch=0, attempt=0, trajectories=())

    async def abort(self, key: AttemptKey) -> None:
        assert key.uid in self.begun, f"the abort of {key} came before its request"
        self.aborted.append(key.uid)


class Actor(RolloutActor):
    """The real one without an engine: it runs `runner`'s groups."""

    def __init__(self, runner: Any) -> None:
        self._name = "rollout-0"
        self._runner = runner
        self._changes = LongPoll()
        self._desk = GroupDesk(runner.run, self._changes)

    def _progress(self, seen: int) -> Progress:
        return Progress(seen=seen, finished_sequences=self._desk.finished_sequences, reports=())


class Handle:
    """What Ray makes of an actor: methods with `remote`, one future per returned object, errors wrapped. Counts the calls."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
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
        return [whole_or_part(whole, index) for index in range(1 + GROUPS_PER_ANSWER)]

    async def _call(self, args: tuple[Any, ...]) -> Any:
        try:
            await asyncio.sleep(WAY_S)
            returned = await self._method(*args)
            await asyncio.sleep(WAY_S)
            return returned
        except asyncio.CancelledError as error:
            if error.args != ("died",):
                raise
            raise ActorDiedError from None
        except Exception as error:
            raise RayTaskError(self._name, "", error) from error


def whole_or_part(whole: asyncio.Future[Any], index: int) -> asyncio.Future[Any]:
    part: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def settle(_: Any) -> None:
        if part.done() or whole.cancelled():  # nobody waits for it any more
            part.cancel()
        elif (error := whole.exception()) is not None:
            part.set_exception(error)
            part.exception()  # as with Ray, nobody has to look at every object of a failed call
        else:
            part.set_result(whole.result()[index])

    whole.add_done_callback(settle)
    return part


@asynccontextmanager
async def followed(exchange: GroupExchange | RayRolloutWorker) -> AsyncIterator[asyncio.Task[None]]:
    """As the loop does for as long as a worker lives."""

    async def follow() -> None:
        seen = 0
        while True:
            seen = (await exchange.progress(seen)).seen

    task = asyncio.create_task(follow())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def request(index: int) -> GroupRequest:
    return GroupRequest(key=AttemptKey(f"p{index}", 0, 0), item={}, n=4, seed=index)


def exchange_with(takes_s: Takes) -> tuple[GroupExchange, Handle, Runner]:
    runner = Runner(takes_s)
    return *exchange_of(Actor(runner)), runner


def exchange_of(actor: Actor) -> tuple[GroupExchange, Handle]:
    handle = Handle(actor)
    bounded = partial(answer, executor="rollout-0", limit=Limit(CALL_TIMEOUT_S, "rollout.call_timeout_s"))
    return GroupExchange(handle, lambda pending, call: bounded(pending, call=call)), handle


@pytest.mark.parametrize("seed", range(40))
def test_every_group_comes_back_once_with_its_own_arrays_and_calls_do_not_grow_with_groups(seed: int) -> None:
    rng = random.Random(seed)
    num_groups, at_once = rng.randint(1, 120), rng.randint(1, 24)
    durations = [rng.choice([0.0, rng.uniform(0.01, 0.3), rng.uniform(0.3, 3.0)]) for _ in range(num_groups)]

    async def main() -> None:
        now, began_s = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        exchange, handle, runner = exchange_with(lambda request: durations[request.seed])
        places, late_s = asyncio.Semaphore(at_once), []

        async def group(index: int) -> None:
            async with places:
                result = await exchange.generate(request(index))
                payload = await result.payload
                assert (result.key.uid, payload.uid, result.failures) == (f"p{index}", f"p{index}", (f"p{index}",))
                late_s.append(now() - runner.ended[f"p{index}"])

        async with followed(exchange):
            await asyncio.gather(*(group(index) for index in range(num_groups)))
        assert len(runner.ended) == num_groups
        exchanges = handle.calls.count("exchange")
        whole_s = now() - began_s
        # An answer comes DEBOUNCE_S after the last, or with all that ran, or at once if it leaves ended groups behind.
        idle_times = sum(duration < 0.02 for duration in durations) + num_groups / at_once
        assert exchanges <= 2 + whole_s / DEBOUNCE_S + num_groups / GROUPS_PER_ANSWER + idle_times
        answers = at_once / GROUPS_PER_ANSWER + 2
        assert max(late_s) <= DEBOUNCE_S + answers * (2 * WAY_S + SETTLE_S + 0.001)

    run_virtual(main(), loop_factory=loop_of(seed))


def test_the_last_group_of_a_worker_is_told_without_delay() -> None:
    """Nothing is left that could come along: on-policy's windows, and colocate's phases, end with it."""

    async def main() -> float:
        exchange, _, runner = exchange_with(lambda request: 0.5 if request.seed == 0 else 0.51)
        async with followed(exchange):
            await asyncio.gather(exchange.generate(request(0)), exchange.generate(request(1)))
            return asyncio.get_running_loop().time() - runner.ended["p1"]

    assert run_virtual(main()) == pytest.approx(WAY_S)


def test_many_groups_that_end_together_come_one_answer_after_the_other() -> None:
    """No debounce between them: all trajectories at the token limit, say."""

    async def main() -> float:
        exchange, _, runner = exchange_with(lambda request: 1.0)
        async with followed(exchange):
            await asyncio.gather(*(exchange.generate(request(index)) for index in range(24)))
            return asyncio.get_running_loop().time() - max(runner.ended.values())

    assert run_virtual(main()) == pytest.approx(WAY_S + (24 / GROUPS_PER_ANSWER - 1) * (2 * WAY_S + SETTLE_S))


def test_a_request_does_not_wait_for_an_answer_that_is_not_due() -> None:
    async def main() -> tuple[float, list[str]]:
        exchange, handle, runner = exchange_with(lambda request: 0.01)
        now = asyncio.get_running_loop().time
        async with followed(exchange):
            await asyncio.sleep(POLL_S / 2)  # an exchange is under way, and there is nothing to tell
            asked_s = now()
            await asyncio.gather(*(exchange.generate(request(index)) for index in range(3)))
            return runner.begun["p2"] - asked_s, handle.calls

    waited_s, calls = run_virtual(main())
    assert waited_s == pytest.approx(WAY_S)
    assert calls.count("submit") == 1  # all three


def test_a_group_that_raises_fails_what_waits_for_the_worker_with_its_own_error() -> None:
    async def main() -> list[Any]:
        exchange, _, _ = exchange_with(lambda request: -0.2 if request.seed == 1 else 60.0)
        async with followed(exchange) as following:
            groups = [exchange.generate(request(index)) for index in range(3)]
            return list(await asyncio.gather(*groups, following, return_exceptions=True))

    outcomes = run_virtual(main())
    assert len(outcomes) == 4
    for outcome in outcomes:
        assert isinstance(outcome, ExecutorFailed)
        assert not isinstance(outcome, ExecutorLost)
        assert outcome.message == "rollout-0 failed: ValueError: no engine for p1"


def test_groups_that_ended_before_a_failure_are_not_lost_with_it() -> None:
    async def main() -> list[Any]:
        exchange, _, _ = exchange_with(lambda request: -0.25 if request.seed == 0 else 0.2 + request.seed / 1000)
        async with followed(exchange) as following:
            groups = [exchange.generate(request(index)) for index in range(9)]
            return list(await asyncio.gather(*groups, following, return_exceptions=True))

    failed, *ended, following = run_virtual(main())
    assert [result.key.uid for result in ended] == [f"p{index}" for index in range(1, 9)]
    assert failed.message == following.message == "rollout-0 failed: ValueError: no engine for p0"


def test_a_group_that_is_cancelled_within_the_worker_fails() -> None:
    async def main() -> Any:
        runner = Runner(lambda request: 1.0)
        runner.run = cancelled_from_within  # type: ignore[method-assign]
        exchange, _ = exchange_of(Actor(runner))
        async with followed(exchange) as following:
            return (await asyncio.gather(exchange.generate(request(0)), following, return_exceptions=True))[0]

    async def cancelled_from_within(*_: Any) -> Any:
        raise asyncio.CancelledError

    assert run_virtual(main()).message == "rollout-0 failed: group p0@0.0 was cancelled"


def test_a_process_that_dies_loses_its_groups_at_once() -> None:
    async def main() -> tuple[list[Any], float]:
        exchange, handle, _ = exchange_with(lambda request: 60.0)
        async with followed(exchange) as following:
            groups = [asyncio.create_task(exchange.generate(request(index))) for index in range(3)]
            await asyncio.sleep(1.0)
            died_s = asyncio.get_running_loop().time()
            handle.die()
            outcomes = await asyncio.gather(*groups, following, return_exceptions=True)
            return list(outcomes), asyncio.get_running_loop().time() - died_s

    outcomes, took_s = run_virtual(main())
    assert took_s == 0.0
    assert all(isinstance(outcome, ExecutorLost) for outcome in outcomes), outcomes
    assert "its process ended during a progress report" in outcomes[0].message


def test_a_group_may_take_longer_than_any_call() -> None:
    async def main() -> tuple[GroupResult, float]:
        exchange, _, _ = exchange_with(lambda request: 10 * CALL_TIMEOUT_S)
        async with followed(exchange):
            return await exchange.generate(request(0)), asyncio.get_running_loop().time()

    result, ended_s = run_virtual(main())
    assert result.key.uid == "p0"
    assert ended_s > 10 * CALL_TIMEOUT_S


def test_the_limit_of_a_load_counts_from_the_end_of_its_drain() -> None:
    """Sequences of version 3 run for 900 s; those that begin after the load do not put it off."""

    async def main() -> tuple[str, float]:
        runner = Runner(lambda request: 1.0)
        actor = Actor(runner)
        began_s = asyncio.get_running_loop().time()

        def progress(seen: int) -> Progress:
            ran_s = asyncio.get_running_loop().time() - began_s
            gauges = {"running_sequences": float(ran_s < 900 or ran_s > 950), "version": 3.0 if ran_s < 950 else 4.0}
            return Progress(seen=seen, finished_sequences={}, reports=(rollout_report(gauges),))

        async def never_ends(version: int, interrupt: str) -> None:
            await asyncio.sleep(10_000)

        actor._progress, actor.load = progress, never_ends  # type: ignore[method-assign, assignment]
        profile = small_profile(weights={"timeout_s": 100.0})
        worker = RayRolloutWorker("rollout-0", lambda: Handle(actor), profile)
        async with followed(worker):
            with pytest.raises(ExecutorLost) as lost:
                await worker.load(4, "drain")
        return lost.value.message, asyncio.get_running_loop().time() - began_s

    message, after_s = run_virtual(main())
    assert message == "rollout-0 failed: the load of version 4 (drain) took longer than weights.timeout_s = 100 s"
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


def test_a_request_that_is_taken_back_harms_nobody() -> None:
    """Its driver's task is cancelled while the group runs: the result comes and finds nobody."""

    async def main() -> str:
        exchange, _, runner = exchange_with(lambda request: 0.3)
        async with followed(exchange) as following:
            first = asyncio.create_task(exchange.generate(request(0)))
            await asyncio.sleep(0.1)
            first.cancel()
            second = await exchange.generate(request(1))
            assert "p0" in runner.ended
            assert not following.done()
            return second.key.uid

    assert run_virtual(main()) == "p1"


def test_an_abort_never_overtakes_the_request_of_its_group() -> None:
    async def main() -> list[str]:
        runner = Runner(lambda request: 1.0)
        handle = Handle(Actor(runner))
        worker = RayRolloutWorker("rollout-0", lambda: handle, small_profile())
        async with followed(worker):
            for index, wait_s in enumerate((0.0, 0.0005, 0.05)):  # before, in and after the first exchange
                group = asyncio.create_task(worker.generate(request(index)))
                await asyncio.sleep(wait_s)
                await worker.abort(request(index).key)
                await group
        return runner.aborted

    assert run_virtual(main()) == ["p0", "p1", "p2"]
