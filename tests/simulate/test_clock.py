"""The virtual clock: jumps, deadlocks, watchers' timers, shuffled callbacks."""

from __future__ import annotations

import asyncio
import gc

import pytest

from asyncrl_cli.simulate.world import DeadlockError, VirtualTimeLoop, run_virtual
from tests.loop.proof.shuffled import loop_of

SEEDS = [None, *range(20)]


def test_a_year_passes_at_once_and_timers_fire_in_their_order():
    async def main():
        woke = []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            woke.append((seconds, asyncio.get_running_loop().time()))

        async with asyncio.TaskGroup() as tasks:
            for seconds in (3e7, 5, 0.25):
                tasks.create_task(sleeper(seconds))
        return woke

    assert run_virtual(main()) == [(0.25, 0.25), (5, 5.0), (3e7, 3e7)]


def test_a_wait_for_nobody_is_a_deadlock():
    async def main():
        await asyncio.sleep(2)
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match=r"^at 2 s nothing is scheduled"):
        run_virtual(main())


@pytest.mark.parametrize("clean_up", ["waits for ever", "sleeps", "raises"])
def test_the_clean_up_after_a_deadlock_neither_hangs_nor_hides_it_nor_leaves_a_task(clean_up, caplog):
    async def stubborn():
        try:
            await asyncio.Event().wait()
        finally:
            if clean_up == "waits for ever":
                await asyncio.Event().wait()
            if clean_up == "sleeps":
                await asyncio.sleep(5)
            raise ValueError("in the clean-up")

    async def main():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stubborn())

    gc.collect()
    caplog.clear()  # of what other tests have left
    with pytest.raises(DeadlockError, match="nothing is scheduled"):
        run_virtual(main())
    gc.collect()
    assert "Task was destroyed but it is pending" not in caplog.text


def test_a_cancelled_timer_is_no_scheduled_work():
    async def main():
        loop = asyncio.get_running_loop()
        for _ in range(300):
            loop.call_later(5, lambda: None).cancel()
        timer = loop.call_later(7, lambda: None)
        await asyncio.sleep(1)
        timer.cancel()
        timer.cancel()
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="at 1 s"):
        run_virtual(main())


async def one_fails():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(50))
        tasks.create_task(asyncio.wait_for(asyncio.Event().wait(), 1))


async def busy_world():
    """TaskGroup, timeout, gather, Queue, Lock, Condition, cancellation, an async generator: what they promise
    in any order."""
    log, queue, lock = [], asyncio.Queue(2), asyncio.Lock()

    async def produce():
        for number in range(6):
            await queue.put(number)

    async def consume():
        for _ in range(3):
            async with lock:
                log.append(await queue.get())

    async def count():
        for number in range(3):
            yield number
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for work in (produce(), consume(), consume()):
            tasks.create_task(work)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            await asyncio.gather(asyncio.sleep(2), asyncio.sleep(5))
    with pytest.raises(ExceptionGroup):
        await one_fails()
    assert [number async for number in count()] == [0, 1, 2]
    order = []
    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(asyncio.sleep(1)).add_done_callback(
                lambda _, number=number: order.append(number)
            )
    await asyncio.sleep(1)
    return sorted(log), asyncio.get_running_loop().time(), tuple(order)


@pytest.mark.parametrize("seed", SEEDS)
def test_asyncio_keeps_its_promises_in_every_order_and_a_seed_repeats_its_order(seed):
    log, time_s, order = run_virtual(busy_world(), loop_factory=loop_of(seed))
    assert (log, time_s) == ([0, 1, 2, 3, 4, 5], 3 + 1 + 1 + 1)
    assert run_virtual(busy_world(), loop_factory=loop_of(seed))[2] == order


def test_seeds_give_different_orders():
    orders = {seed: run_virtual(busy_world(), loop_factory=loop_of(seed))[2] for seed in SEEDS}
    assert len(set(orders.values())) > 15


def test_what_a_callback_raises_goes_to_the_exception_handler_and_the_loop_goes_on():
    async def main():
        loop, heard = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda loop, context: heard.append(str(context["exception"])))
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)
        return heard

    assert run_virtual(main()) == ["division by zero"]


def test_it_is_an_event_loop_of_its_own_that_can_be_closed():
    loop = VirtualTimeLoop()
    assert loop.run_until_complete(asyncio.sleep(5, "slept")) == "slept"
    assert loop.time() == 5
    loop.close()
    assert loop.is_closed()
