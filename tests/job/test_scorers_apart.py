"""Scorers with processes of their own on real actors: their columns reach the trainer, and lost processes are
replaced."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.base.errors import ExecutorLost, RefusedError
from asyncrl_cli.contracts.ports import LoopSnapshot
from asyncrl_cli.contracts.prompt_group import GroupResult, TrainBatch
from asyncrl_cli.data.ray_store import RayStore
from asyncrl_cli.profile.algorithm_section import RewardModelSection, TeacherSection
from asyncrl_cli.profile.schema import AlgorithmSection

from .crew import REWARD, made_up_group, make_classifier, make_model, nodes, small_profile

pytestmark = pytest.mark.slow

TASKS = (("train",), ("ref",), ("teacher",), ("prox",), ("reward",), ("critic",), ("rollout",))


def test_all_scorers_score_what_the_trainer_trains_and_are_restarted_as_one_but_not_the_critic(tmp_path):
    from asyncrl_cli.job.ray.session import ray_session

    model_dir, judge = make_model(tmp_path / "model"), make_classifier(tmp_path / "judge")
    profile = small_profile(placement={"tasks": TASKS, "ratios": (1, 2, 1, 1, 1, 2, 1)})
    algorithm = AlgorithmSection(adv_estimator="gae", use_kl_loss=True, old_logprobs="recompute")
    profile = profile.model_copy(
        update={
            "algorithm": algorithm,
            "reward_model": RewardModelSection(path=str(judge)),
            "teacher": TeacherSection(path=str(model_dir)),
        }
    )
    with ray_session(profile, cluster=nodes((2, 0), elastic_cpus=True)) as plan:
        assert plan.scorers == {"ref": 2, "teacher": 1, "prox": 1, "reward": 1, "critic": 2}
        asyncio.run(_score_and_train(plan, profile, model_dir, tmp_path))


async def _score_and_train(plan: Any, profile: Any, model_dir: Path, tmp_path: Path) -> None:
    import ray

    from asyncrl_cli.job.driver_crew import CrewOrder, make_scorer, make_trainer, share_frozen_logprobs
    from asyncrl_cli.job.ray.calls import Limit
    from asyncrl_cli.job.ray.placement import placed
    from asyncrl_cli.models.model_directory import further_models

    store = RayStore()
    groups = tuple(made_up_group(number, profile.rollout.n, store) for number in range(2))
    items = [{"prompt": "1+1"}, {"prompt": "2+"}]
    where = {"model_dir": model_dir, "run_dir": tmp_path, "log_dir": tmp_path}
    further = further_models(profile, model_dir)
    order = CrewOrder(plan=plan, profile=profile, further=further, reward=REWARD, store=store, **where)
    async with placed(plan, timeout_s=60.0) as options:
        scorers = {task: make_scorer(task, order, options) for task in plan.scorers}
        critic, ref = scorers["critic"], scorers["ref"]
        trainer = make_trainer(order, options, critic)
        await asyncio.gather(trainer.start(), *(scorer.start() for scorer in scorers.values()))
        await trainer.gather(0)
        await scorers["prox"].load(await trainer.publish(0))
        rewards = []
        for task, scorer in scorers.items():
            returned, report = await scorer.score(groups, items)
            rewards = returned if task == "reward" else rewards
            assert report.sums["scored_tokens"] == sum(group.response_tokens for group in groups)
        assert [len(scores) for scores in rewards] == [len(group.trajectories) for group in groups]
        assert len({score for scores in rewards for score in scores}) > 1

        def column_of(group: GroupResult, name: str) -> list[list[float]]:
            (found,) = store.get(store.stored(group.payload or ()), [name])
            return [one.per_sampled[name].tolist() for one in found]

        async def values() -> list[list[list[float]]]:
            await critic.score(groups, [])
            return [column_of(group, "critic") for group in groups]

        columns = [name for name in scorers if name != "reward"]
        for name, group in product(columns, groups):
            lengths = [len(values) for values in column_of(group, name)]
            assert lengths == [meta.response_tokens for meta in group.trajectories]
        batch = TrainBatch(step=1, window=0, step_in_window=0, groups=groups, columns=tuple(columns))
        (trained, _), (learned, report) = await asyncio.gather(trainer.train(batch), critic.learn(batch))
        # reference and teacher are the policy's first weights
        assert trained.metrics["ref/kl"].value == pytest.approx(0.0, abs=1e-9)
        assert trained.metrics["distill/kl"].value == pytest.approx(0.0, abs=1e-6)
        assert "train/old_logprob_tokens" not in trained.metrics
        assert not {"ref", "teacher"} & trained.column_s.keys()
        assert ("critic/loss" in learned.metrics, report.name) == (True, "critic")
        assert not any(name.startswith("critic") for name in (*trained.metrics, *trained.column_s))
        after_one = await values()
        assert any(any(one) for group in after_one for one in group)

        await share_frozen_logprobs(trainer, [*scorers.values()], profile)
        await trainer.snapshot(1)
        snapshot = LoopSnapshot(step=1, version=0, at_window_boundary=True, loop_state={})
        await trainer.write(tmp_path / "step", snapshot)
        await critic.learn(batch)
        assert await values() != after_one
        await trainer.restore(tmp_path / "step")
        assert await values() == after_one
        counters = json.loads((tmp_path / "step" / "trainer.json").read_text())
        assert counters["teacher_logprob"] == pytest.approx(counters["reference_logprob"], abs=1e-5)
        others = {"teacher_logprob": counters["teacher_logprob"] - 1}
        await trainer.collective("another teacher", "add_frozen_logprobs", others, limit=Limit(60.0))
        with pytest.raises(RefusedError, match="a teacher that had other weights"):
            await trainer.restore(tmp_path / "step")

        ray.kill(ref.actors[1])
        with pytest.raises(ExecutorLost, match="ref failed"):
            await scored_until_it_fails(ref, groups, items)
        await ref.restart()
        before = column_of(groups[1], "ref")
        await ref.score(groups[1:], items[1:])
        for old, new in zip(before, column_of(groups[1], "ref"), strict=True):
            assert new == pytest.approx(old, abs=1e-5)
        ray.kill(critic.actors[1])
        with pytest.raises(ExecutorLost, match="critic failed"):
            await scored_until_it_fails(critic, groups, [])
        others_left = [scorer for scorer in scorers.values() if scorer is not critic]
        await asyncio.gather(trainer.stop(5.0), *(scorer.stop(5.0) for scorer in others_left))


async def scored_until_it_fails(scorer: Any, groups: Any, items: Any) -> None:
    """A killed process may answer before the signal reaches it."""
    async with asyncio.timeout(60):
        while True:
            await scorer.score(groups, items)
