"""A reference with processes of its own on real actors: its columns reach the trainer, and a lost process is replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.errors import ExecutorLost
from asyncrl_cli.loop.ports import TrainBatch
from asyncrl_cli.profile.schema import AlgorithmSection

from .crew import make_model, nodes, small_profile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TASKS = (("train",), ("ref",), ("rollout",))


def test_two_processes_score_what_the_trainer_then_trains_and_are_restarted_as_one(tmp_path: Path) -> None:
    from asyncrl_cli.job.session import ray_session

    kl = {"algorithm": AlgorithmSection(use_kl_loss=True)}
    profile = small_profile(placement={"tasks": TASKS, "ratios": (1, 2, 1)}).model_copy(update=kl)
    model_dir = make_model(tmp_path / "model")
    with ray_session(profile, cluster=nodes((2, 0), elastic_cpus=True)) as plan:
        assert plan.ref_workers == 2
        asyncio.run(_score_and_train(plan, profile, model_dir, tmp_path))


async def _score_and_train(plan: Any, profile: Any, model_dir: Path, tmp_path: Path) -> None:
    import ray

    from asyncrl_cli.job.alone import Work, made_up_group
    from asyncrl_cli.job.workers import make_reference, make_trainer, placed

    work = Work(profile=profile, prompts=[[1, 2, 3], [4, 5]], response_tokens=(5, 9, 3, 7))
    groups = tuple(made_up_group(work, number) for number in range(2))
    async with placed(plan, timeout_s=60.0) as options:
        trainer = make_trainer(plan, profile, model_dir, options, run_dir=tmp_path, log_dir=tmp_path)
        reference = make_reference(plan, profile, model_dir, options, tmp_path)
        await asyncio.gather(trainer.start(), reference.start())
        columns, report = await reference.score(groups)
        assert report.sums["scored_tokens"] == sum(group.response_tokens for group in groups)
        lengths = [[len(column) for column in ray.get(handle)] for handle in columns]
        assert lengths == [[meta.response_tokens for meta in group.trajectories] for group in groups]
        handles = {group.key: {"ref": column} for group, column in zip(groups, columns, strict=True)}
        batch = TrainBatch(step=1, window=0, step_in_window=0, groups=groups, columns=handles)
        trained, _ = await trainer.train(batch)
        assert trained.metrics["ref/kl"].value == pytest.approx(0.0, abs=1e-9)  # the reference is the policy's first weights
        assert "ref" not in trained.column_s

        ray.kill(reference.actors[1])
        with pytest.raises(ExecutorLost, match="ref failed"):
            await reference.score(groups)
        await reference.restart()
        again, _ = await reference.score(groups[1:])
        for before, after in zip(ray.get(columns[1]), ray.get(again[0]), strict=True):
            assert after == pytest.approx(before, abs=1e-5)
        await asyncio.gather(trainer.stop(5.0), reference.stop(5.0))
