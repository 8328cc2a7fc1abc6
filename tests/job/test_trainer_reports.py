"""The trainer's reports, which the driver asks for once a second."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

from benchmarks.local_store import LocalStore

from asyncrl_cli.job.driver_ranks import RayTrainer
from asyncrl_cli.measure.meters import TrainerMeter
from asyncrl_cli.simulate.world import run_virtual

from .crew import small_profile


def test_only_the_first_rank_is_asked_each_second_and_the_others_every_five(tmp_path):
    asked, found = Counter[int](), list[int]()

    def rank(index: int) -> SimpleNamespace:
        async def report():
            asked[index] += 1
            now = asyncio.get_running_loop().time
            return TrainerMeter("trainer-0", f"trainer-{index}", (), now).report()

        return SimpleNamespace(report=SimpleNamespace(remote=report))

    async def main() -> None:
        trainer = RayTrainer(
            lambda: [rank(index) for index in range(3)], small_profile(), LocalStore(), samples_dir=tmp_path
        )
        for _ in range(12):
            found.append(len((await trainer.report()).machines))
            await asyncio.sleep(1.0)

    run_virtual(main())
    assert asked == {0: 12, 1: 3, 2: 3}
    assert found == [3, 1, 1, 1, 1, 3, 1, 1, 1, 1, 3, 1]
