"""Placement on logical GPUs: which actor sees which device, and what happens when there is no room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.job.ray.session import ray_session
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan

from .crew import in_place, nodes, reserved, small_profile, witnesses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def eight_gpus() -> Iterator[None]:
    with ray_session(small_profile(), cluster=nodes((16, 8))):
        yield


def free_gpus(expected: float, within_s: float = 60.0) -> float:
    import ray

    end_s = time.monotonic() + within_s
    while ray.available_resources().get("GPU", 0.0) != expected and time.monotonic() < end_s:
        time.sleep(0.1)
    return float(ray.available_resources().get("GPU", 0.0))


@pytest.mark.usefixtures("eight_gpus")
def test_every_worker_sees_its_own_gpus_and_no_others():
    seen = in_place(witnesses, nodes((16, 8)), ratio="1:3", gpus_per_rollout_worker=2)
    devices = {name: [gpus.split(",") for gpus, _ in found] for name, found in seen.items()}
    assert [len(gpus) for gpus in devices[TRAINER]] == [1, 1]
    assert [len(gpus) for gpus in devices[ROLLOUT]] == [2, 2, 2]
    assert sorted(gpu for found in devices.values() for gpus in found for gpu in gpus) == [
        str(i) for i in range(8)
    ]
    assert free_gpus(8.0) == 8.0


@pytest.mark.usefixtures("eight_gpus")
def test_a_colocated_rank_and_worker_see_the_same_gpu():
    seen = in_place(witnesses, nodes((16, 8)), colocate=True, gpus=4)
    pairs = [(rank[0], worker[0]) for rank, worker in zip(seen[TRAINER], seen[ROLLOUT], strict=True)]
    assert all(rank == worker != "" for rank, worker in pairs), pairs
    assert len({rank for rank, _ in pairs}) == 4


@pytest.mark.usefixtures("eight_gpus")
def test_colocated_ranks_that_share_a_bundle_of_several_gpus_have_one_each_and_so_have_the_workers():
    profile = small_profile(placement={"colocate": True}, trainer={"n_gpus_per_node": 4})
    plan = compile_job(profile, nodes((16, 8)))
    assert [bundle.gpus for bundle in plan.bundles] == [4]
    seen = reserved(plan, witnesses)
    for role in (TRAINER, ROLLOUT):
        assert len({gpu for gpu, _ in seen[role]}) == 4, seen
    assert {gpu for gpu, _ in seen[TRAINER]} == {gpu for gpu, _ in seen[ROLLOUT]}


@pytest.mark.usefixtures("eight_gpus")
def test_a_plan_that_the_cluster_cannot_hold_is_refused_at_once():
    plan = compile_job(small_profile(placement={"gpus": 16}), nodes((16, 8), (16, 8)))
    began_s = time.monotonic()
    with pytest.raises(
        PreflightError, match=r"ask for 16 GPUs .* it has 8 GPUs and 16 CPUs on 1 node"
    ) as refused:
        reserved(plan, timeout_s=60.0)
    assert time.monotonic() - began_s < 20.0  # of the 60 that it might wait
    assert "--set placement.trainer_workers=4 --set rollout.workers=4" in refused.value.hint


@pytest.mark.usefixtures("eight_gpus")
def test_a_cluster_that_others_use_is_refused_after_the_timeout_and_nothing_stays_reserved():
    def taken(plan: JobPlan, options: Any) -> float:
        wanted = compile_job(small_profile(placement={"gpus": 4}), nodes((16, 8)))
        began_s = time.monotonic()
        with pytest.raises(PreflightError, match=r"placement.timeout_s = 2 s: .*; free: 2 GPUs") as refused:
            run_in_thread(lambda: reserved(wanted, timeout_s=2.0))
        assert "--set placement.trainer_workers=1 --set rollout.workers=1" in refused.value.hint
        return time.monotonic() - began_s

    assert in_place(taken, nodes((16, 8)), gpus=6) < 29.0  # of the 30 that it has by default
    assert free_gpus(8.0) == 8.0


def run_in_thread(work: Callable[[], Any]) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
