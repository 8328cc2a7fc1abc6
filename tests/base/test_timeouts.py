"""`timeout` in cleanup, where `asyncio.timeout` fails until Python 3.11.2."""

import asyncio

import pytest

from asyncrl_cli.base.errors import timeout
from asyncrl_cli.simulate.world import run_virtual


async def ends_of(*cancel_after_s: float) -> list[str]:
    """How a block of 0.02 s in the cleanup of a cancelled task ends, if the task is cancelled again at these
    times."""
    ends = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            try:
                async with timeout(0.02):
                    await asyncio.sleep(60)
            except BaseException as error:
                ends.append(type(error).__name__)
                raise

    task = asyncio.create_task(work())
    for delay_s in (0, *cancel_after_s):
        await asyncio.sleep(delay_s)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return ends


def test_a_timeout_in_a_task_that_is_being_cancelled_is_a_timeout():
    assert run_virtual(ends_of()) == ["TimeoutError"]


def test_a_further_cancel_within_the_block_stays_a_cancel():
    assert run_virtual(ends_of(0.001)) == ["CancelledError"]


def test_a_block_without_a_limit_and_one_in_time_end_as_they_are():
    async def main() -> None:
        for limit_s in (None, 60):
            async with timeout(limit_s) as limit:
                await asyncio.sleep(0)
            assert not limit.expired()
        with pytest.raises(TimeoutError):
            async with timeout(0):
                await asyncio.sleep(60)

    run_virtual(main())
