"""One round of everything on real actors with a tiny random model: generate, train, publish, load,
checkpoint."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from ray._private.worker import global_worker

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.ports import EvalRequest, EvalTry, LoopSnapshot
from asyncrl_cli.contracts.prompt_group import (
    AttemptKey,
    GroupResult,
    PartKey,
    PartRequest,
    PartResult,
    TrainBatch,
    TrajectoryMeta,
)
from asyncrl_cli.job.driver_crew import CrewOrder, started_crew
from asyncrl_cli.job.rollout_weights import RayRankZero
from asyncrl_cli.measure.states import State
from asyncrl_cli.plan.cluster import LOOPBACK
from asyncrl_cli.plan.compiler import compile_job

from .crew import REWARD, make_model, nodes, small_profile

pytestmark = pytest.mark.slow


def part(index: int, number: int = 0, indices: tuple[int, ...] = (0, 1, 2, 3)) -> PartRequest:
    item = {"uid": f"p{index}", "prompt": f"{index}+1=", "answer": "2", "metadata": {}}
    return PartRequest(
        key=PartKey(AttemptKey(f"p{index}", 0, 0), number), item=item, indices=indices, seed=index
    )


def group_of(*parts: PartResult) -> GroupResult:
    return GroupResult.of(parts[0].key.attempt, parts)


def batch_of(groups: list[GroupResult], step: int) -> TrainBatch:
    return TrainBatch(step=step, window=step - 1, step_in_window=0, groups=tuple(groups))


async def run_parts(worker: Any, *requests: PartRequest) -> list[PartResult]:
    """Results in the order of the requests: they travel with the calls of `next_update`."""
    for request in requests:
        worker.submit(request)
    seen, ended = 0, {}
    while len(ended) < len(requests):
        update = await worker.next_update(seen)
        seen = update.seen
        ended |= {result.key: result for result in update.ended}
    return [ended[request.key] for request in requests]


def test_a_round_of_generate_train_publish_load_checkpoint_and_resume(tmp_path, monkeypatch):
    from asyncrl_cli.job.ray.session import ray_session

    # vLLM's tests leave an OpenMP in it, which would load before any log is open
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "true")  # OpenMP says what it goes by, in every actor's log
    profile = small_profile(
        placement={"trainer_workers": 2}, rollout={"workers": 2}, weights={"keep_versions": "all"}
    )
    model_dir = make_model(tmp_path / "model")
    cluster = nodes((2, 0), elastic_cpus=True)
    with ray_session(profile, cluster=cluster) as plan:
        versions = asyncio.run(_first_attempt(plan, profile, model_dir, tmp_path))
        smaller = small_profile(weights={"keep_versions": "all"})
        asyncio.run(_second_attempt(compile_job(smaller, cluster), smaller, model_dir, tmp_path))
    assert versions == [1, 1]
    assert sorted(path.name for path in (tmp_path / "run/versions").iterdir()) == [
        "version-000000",
        "version-000001",
    ]
    for name in ("trainer-1", "rollout-0"):
        assert "OMP_WAIT_POLICY = 'PASSIVE'" in (tmp_path / f"logs/{name}.log").read_text()


def crew_of(plan: Any, profile: Any, model_dir: Path, tmp_path: Path, **more: Any) -> Any:
    where = {"model_dir": model_dir, "run_dir": tmp_path / "run", "log_dir": tmp_path / "logs"}
    return started_crew(CrewOrder(plan=plan, profile=profile, further={}, reward=REWARD, **where, **more))


async def _first_attempt(plan: Any, profile: Any, model_dir: Path, tmp_path: Path) -> list[int]:
    said: list[str] = []
    began_s = time.monotonic()
    async with crew_of(plan, profile, model_dir, tmp_path, say=said.append) as crew:
        trainer, workers = crew.trainer, crew.workers
        print("workers started", time.monotonic() - began_s)
        assert crew.payloads == []
        assert {"trainer is ready", "rollout-0 is ready", "rollout-1 is ready"} <= set(said)
        await _meet_on_loopback(trainer.actors[0])
        await _publish_and_load(trainer, workers, 0)
        left, right = await asyncio.gather(
            run_parts(workers[0], part(0), part(1, 0, (0, 2)), part(2)),
            run_parts(workers[1], part(3), part(1, 1, (1,)), part(1, 2, (3,))),
        )
        groups = [
            group_of(left[0]),
            group_of(left[1], right[1], right[2]),
            group_of(left[2]),
            group_of(right[0]),
        ]
        for index, group in enumerate(groups):
            assert group.key == AttemptKey(f"p{index}", 0, 0)
            assert len(group.trajectories) == 4
            assert all(meta.version_tokens == ((0, meta.response_tokens),) for meta in group.trajectories)
        stored = crew.store.stored([result.payload for result in (*left, *right)])
        await _nothing_passes_through_the_driver([piece.content for one in stored for piece in one.pieces])
        began_s = time.monotonic()
        report, executor = await trainer.train(batch_of(groups[:2], step=1))
        print("train", time.monotonic() - began_s, report.train_s)
        sampled = sum(meta.response_tokens for group in groups[:2] for meta in group.trajectories)
        assert report.tokens == sampled
        assert executor.sums["trained_tokens"] == sampled
        # that of rank 0, busy at its start, too
        assert 0 < executor.sums["busy_s"] <= executor.state_s[State.BUSY] + 0.05
        gather_s, _ = await trainer.gather(1)
        published = await trainer.publish(1)
        print("gather", gather_s, "publish", published.publish_s, published.num_bytes)
        sends = await asyncio.gather(*(worker.prefetch(published) for worker in workers))
        loads = await asyncio.gather(workers[0].load(1, "keep-kv"), workers[1].load(1, "drain"))
        print("send", sends, loads)
        assert all(load.logprob_abs_diff is not None and load.logprob_abs_diff < 1e-4 for load in loads)
        (later,) = await run_parts(workers[0], part(7))
        assert {version for meta in later.trajectories for version, _ in meta.version_tokens} == {1}
        update = await workers[0].next_update(-1)
        rollout, reward = update.reports
        assert (rollout.name, reward.name) == ("rollout-0", "reward-0")
        tokens = sum(meta.response_tokens for result in (*left, later) for meta in result.trajectories)
        assert rollout.sums["sampled_tokens"] == tokens
        assert rollout.gauges["version"] == 1
        assert rollout.gauges["running_sequences"] == 0
        assert rollout.gauges["running_tokens"] == 0
        evaluated = await workers[0].evaluate(EvalRequest(version=1, tries=(EvalTry(part(1).item),), seed=3))
        assert len(evaluated.outcomes) == 1
        assert isinstance(evaluated.outcomes[0], TrajectoryMeta)
        await _checkpoint(trainer, groups, tmp_path)
        return [load.version for load in loads]


async def _nothing_passes_through_the_driver(payloads: list[Any]) -> None:
    """The arrays of these short responses lie in the object store, and outlive their worker, because the
    driver owns them. Ray's own way with so few bytes is to send them to the caller."""
    await asyncio.to_thread(ray.wait, payloads, num_returns=len(payloads), fetch_local=False)
    found = ray.experimental.get_object_locations(payloads)
    assert all(300 < at["object_size"] < 100_000 and at["node_ids"] for at in found.values()), found
    owner = global_worker.core_worker.get_owner_address(payloads[0])
    assert owner == global_worker.core_worker.get_owner_address(ray.put(0))


async def _meet_on_loopback(rank_zero: Any) -> None:
    """Where `nccl` meets in a local session; gloo is in NCCL's place."""
    host, port = await RayRankZero(rank_zero, "rollout-0", 10.0, 1).meeting_point()
    assert host == LOOPBACK
    sums = await asyncio.gather(
        *(asyncio.to_thread(_sum_of_two_ranks, host, port, rank) for rank in range(2))
    )
    assert sums == [3.0, 3.0]


def _sum_of_two_ranks(host: str, port: int, rank: int) -> float:
    wait = timedelta(seconds=60)
    store = dist.TCPStore(host, port, 2, is_master=rank == 0, timeout=wait)
    values = torch.full((4,), rank + 1.0)
    dist.ProcessGroupGloo(store, rank, 2, wait).allreduce([values]).wait()
    return values[0].item()


async def _publish_and_load(trainer: Any, workers: list[Any], version: int) -> None:
    """As the loop does at its start: also version 0 is published, and so verified."""
    await trainer.gather(version)
    published = await trainer.publish(version)
    await asyncio.gather(*(worker.prefetch(published) for worker in workers))
    loads = await asyncio.gather(*(worker.load(version, "drain") for worker in workers))
    assert all(load.logprob_abs_diff < 1e-4 for load in loads)


async def _checkpoint(trainer: Any, groups: list[GroupResult], tmp_path: Path) -> None:
    await trainer.snapshot(1)
    writing = asyncio.create_task(
        trainer.write(tmp_path / "step-1", _snapshot([groups[1].payload, groups[3].payload]))
    )
    await trainer.train(batch_of(groups[2:], step=2))
    await writing


def _snapshot(payloads: list[Any]) -> LoopSnapshot:
    return LoopSnapshot(step=1, version=1, at_window_boundary=True, loop_state={}, payloads=tuple(payloads))


async def _second_attempt(plan: Any, profile: Any, model_dir: Path, tmp_path: Path) -> None:
    """On one rank and one worker."""
    from asyncrl_cli.checkpoint.reader import Checkpoint

    checkpoint = Checkpoint(
        directory=tmp_path / "step-1",
        step=1,
        version=1,
        at_window_boundary=True,
        loop_state={"groups": {"running": []}},
        run="run",
    )
    async with crew_of(plan, profile, model_dir, tmp_path, checkpoint=checkpoint) as crew:
        trainer, workers = crew.trainer, crew.workers
        assert [len(payload) for payload in crew.payloads] == [1, 1]  # each group as one object
        await _publish_and_load(trainer, workers, 1)
        (group,) = await run_parts(workers[0], part(9))
        assert {version for meta in group.trajectories for version, _ in meta.version_tokens} == {1}
        with pytest.raises(ExecutorFailed, match=r"rollout-0 failed: ValueError: asked to load version 5"):
            await workers[0].load(5, "drain")
        with pytest.raises(ExecutorFailed, match=r"trainer-0 failed: ValueError: version 9 is not held"):
            await trainer.publish(9)
