"""In which order a job's processes are made and started, and what is left when they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.job import driver_crew
from asyncrl_cli.job.driver_crew import CrewOrder, started_crew
from asyncrl_cli.job.rank_host import attention_warnings
from asyncrl_cli.plan.cluster import LOOPBACK
from asyncrl_cli.plan.compiler import compile_job

from .crew import REWARD, nodes, small_profile


def recorded(monkeypatch: pytest.MonkeyPatch, *, colocate: bool) -> list[str]:
    """What happens to the trainer and the workers of a job on two GPUs, in order."""
    seen: list[str] = []

    class Recorded(SimpleNamespace):
        async def prepare(self) -> None:
            seen.append(f"{self.name} has its processes")

        async def start(self) -> None:
            seen.append(f"{self.name} begins to start")
            await asyncio.sleep(0)
            seen.append(f"{self.name} has started")

    @asynccontextmanager
    async def placed(*args: Any, **kwargs: Any) -> AsyncIterator[None]:
        yield None

    async def stop(*args: Any) -> None: ...

    def made_worker(name: str, *args: Any) -> Recorded:
        seen.append(f"{name} is made")
        return Recorded(name=name)

    profile = small_profile(placement={"colocate": colocate, "gpus": 2})
    plan = compile_job(profile, nodes((8, 2)))
    for name, fake in {
        "placed": placed,
        "make_trainer": lambda *args, **kwargs: Recorded(name="trainer", actors=[], warnings=["it is slow"]),
        "makers_of": lambda order, role, *args: {
            f"{role}-{i}": None for i in range(order.plan.rollout_workers)
        },
        "RayRolloutWorker": made_worker,
        "partial": lambda *args: None,
        "_stop": stop,
    }.items():
        monkeypatch.setattr(driver_crew, name, fake)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: LOOPBACK)

    async def main() -> None:
        where = dict.fromkeys(("model_dir", "run_dir", "log_dir"), Path("/nowhere"))
        order = CrewOrder(plan=plan, profile=profile, further={}, reward=REWARD, warn=warn, **where)
        async with started_crew(order) as crew:
            assert (crew.trainer.name, [worker.name for worker in crew.workers]) == ("trainer", names)

    def warn(text: str) -> None:
        seen.append(f"warned: {text}")

    names = [f"rollout-{index}" for index in range(plan.rollout_workers)]
    asyncio.run(main())
    return seen


def test_where_gpus_are_shared_the_trainer_takes_its_memory_only_when_every_worker_has_measured_what_is_free(
    monkeypatch,
):
    seen = recorded(monkeypatch, colocate=True)
    assert seen.index("trainer has its processes") < seen.index("rollout-0 is made")
    assert seen.index("trainer begins to start") > max(
        seen.index(f"rollout-{index} has started") for index in range(2)
    )


def test_sides_with_gpus_of_their_own_start_at_once(monkeypatch):
    seen = recorded(monkeypatch, colocate=False)
    assert seen.index("rollout-0 begins to start") < seen.index("trainer has started")
    assert seen.count("warned: it is slow") == 1


@pytest.mark.parametrize(
    ("attention", "device", "is_warned"),
    [("eager", "cuda", True), ("eager", "cpu", False), ("sdpa", "cuda", False)],
)
def test_a_trainer_on_a_gpu_warns_of_attention_that_is_slow_there(attention, device, is_warned):
    found = attention_warnings(attention, is_on_gpu=device == "cuda")
    assert bool(found) == is_warned
    assert all("eager" in warning and "trainer-0" in warning for warning in found)
