"""A small profile, clusters, a tiny random model, and witnesses of placement, for the tests of this room."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from asyncrl_cli.contracts.environment import RewardSpec
from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult, TrajectoryMeta
from asyncrl_cli.data.sample_fields import BUILT_IN, NOT_SAMPLED
from asyncrl_cli.data.store import Store
from asyncrl_cli.data.trajectories import segment_of, trajectory_of
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.profile.schema import (
    AlgorithmSection,
    AsyncTrainingSection,
    PlacementSection,
    Profile,
    RolloutSection,
    RunSection,
    TrainerSection,
    WeightsSection,
)

CHARACTERS = "0123456789+=#., "
REWARD = RewardSpec(kind="exact-match")


def small_profile(
    *,
    placement: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    weights: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
) -> Profile:
    """2 groups of 4 per train step, at most 16 tokens per response."""
    small = {"slots": 16, "n": 4, "max_prompt_tokens": 16, "max_response_tokens": 16, "call_timeout_s": 120.0}
    return Profile(
        run=RunSection(train_steps=4),
        algorithm=AlgorithmSection(),
        async_training=AsyncTrainingSection(),
        trainer=TrainerSection(**({"ppo_mini_batch_size": 2} | (trainer or {}))),
        rollout=RolloutSection(**(small | (rollout or {}))),
        placement=PlacementSection(**(placement or {})),
        weights=WeightsSection(**(weights or {})),
    )


def nodes(*cpus_and_gpus: tuple[int, int], elastic_cpus: bool = False) -> ClusterResources:
    return ClusterResources(
        nodes=tuple(
            NodeResources(name=f"node-{index}", cpus=cpus, gpus=gpus)
            for index, (cpus, gpus) in enumerate(cpus_and_gpus)
        ),
        elastic_cpus=elastic_cpus,
    )


def make_model(directory: Path) -> Path:
    from asyncrl_cli.builtin.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer(CHARACTERS)
    tiny_model(len(tokenizer), seed=1).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def made_up_group(number: int, n: int, store: Store) -> GroupResult:
    """Group `number`: its `n` responses go on with the prompt's tokens; every second one has reward 1."""
    metas, trajectories = [], []
    for index in range(n):
        prompt, length = [[4, 5, 6], [7, 8]][number % 2], (5, 9, 3, 7)[index % 4]
        end: dict[str, Any] = {"reward": float(index % 2), "finish_reason": "length"}
        versions = ((0, length),)
        metas.append(
            TrajectoryMeta(prompt_tokens=len(prompt), response_tokens=length, version_tokens=versions, **end)
        )
        segment = segment_of(
            [*prompt, *islice(cycle(prompt), length)],
            [0.0] * len(prompt) + [-1.0] * length,
            [NOT_SAMPLED] * len(prompt) + [0] * length,
        )
        trajectories.append(trajectory_of((segment,), BUILT_IN, **end))
    key = AttemptKey(str(number), 0, 0)
    store.hold(store.put(f"{key}/0", trajectories))
    return GroupResult(
        key=key, trajectories=tuple(metas), failures=(), failed_tokens=0, payload=(f"{key}/0",)
    )


def make_classifier(directory: Path) -> Path:
    import torch
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    from asyncrl_cli.builtin.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer(CHARACTERS)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


class Witness:
    """Says which devices and which node it got."""

    def seen(self) -> tuple[str, str]:
        import ray

        return os.environ.get("CUDA_VISIBLE_DEVICES", ""), ray.get_runtime_context().get_node_id()


def witnesses(plan: JobPlan, options: Any) -> dict[str, list[tuple[str, str]]]:
    import ray

    made, seen = [], {}
    for role in plan.roles:  # the ranks have their devices before the workers come, as in a job
        actors = [
            ray.remote(Witness).options(**options(role.role, index)).remote() for index in range(role.workers)
        ]
        seen[role.role] = ray.get([actor.seen.remote() for actor in actors], timeout=200)
        made += actors
    for actor in made:
        ray.kill(actor)
    return seen


def in_place(check: Callable[[JobPlan, Any], Any], cluster: Any, **placement_keys: Any) -> Any:
    return reserved(compile_job(small_profile(placement=placement_keys), cluster), check)


def reserved(
    plan: JobPlan, check: Callable[[JobPlan, Any], Any] = lambda plan, options: None, timeout_s: float = 30.0
) -> Any:
    from asyncrl_cli.job.ray.placement import placed

    async def main() -> Any:
        async with placed(plan, timeout_s=timeout_s) as options:
            return check(plan, options)

    return asyncio.run(main())
