"""What a policy trainer is made from: a profile with a few keys changed, and a place on this machine's
CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl_cli.contracts.prompt_group import GroupResult
from asyncrl_cli.data.trajectories import GroupPayload
from asyncrl_cli.profile.algorithm_section import CriticSection, TeacherSection
from asyncrl_cli.profile.rollout_sections import AsyncTrainingSection
from asyncrl_cli.profile.schema import (
    AlgorithmSection,
    LoraSection,
    ProcessPlace,
    Profile,
    RunSection,
    TrainerSection,
)
from asyncrl_cli.train.step_plan import RankPlan, plan_train_step

SECTIONS = {
    "dtype": "model",
    **dict.fromkeys(AlgorithmSection.model_fields, "algorithm"),
    "activation_checkpointing": "trainer",
    "sequence_parallel_size": "trainer",
    "shared_prefixes": "trainer",
    "router_replay": "trainer",
    **dict.fromkeys(LoraSection.model_fields, "lora"),
    "lr": "trainer",
    "ppo_epochs": "trainer",
    "lr_schedule": "trainer",
    "grad_clip": "trainer",
    "cliprange_value": "critic",
    "head_start_steps": "critic",
    "warmup_steps": "trainer",
    "max_tokens_per_microbatch": "trainer",
    "temperature": "rollout",
    "trigger_parameter_sync_step": "async_training",
    "gather_bucket_size_mb": "weights",
    "overlap": "weights",
    "probe_sequences": "weights",
    "tasks": "placement",
    "colocate": "placement",
}


class TrainerParts(NamedTuple):
    profile: Profile
    place: ProcessPlace
    total_optimizer_steps: int

    def made(self, init_method: str, rank: int = 0) -> Any:
        """A `PolicyTrainer`, whose import takes seconds."""
        from asyncrl_cli.train.policy_trainer import PolicyTrainer

        return PolicyTrainer(
            self.profile,
            self.place,
            rank=rank,
            init_method=init_method,
            total_optimizer_steps=self.total_optimizer_steps,
        )


def trainer_parts(
    model_dir: Path | str,
    *,
    workers: int = 1,
    device: str = "cpu",
    threads: int = 1,
    total_optimizer_steps: int = 1,
    ref_dir: Path | str = "",
    teacher_dirs: Mapping[str, Path | str] | None = None,
    **keys: Any,
) -> TrainerParts:
    """`keys` are the profile's, without their section; their values are not validated, so that a bucket may
    have 0.1 MB."""
    profile = Profile(run=RunSection(train_steps=1))
    for key, value in keys.items():
        section = getattr(profile, SECTIONS[key]).model_copy(update={key: value})
        profile = profile.model_copy(update={SECTIONS[key]: section})
    dirs = {
        "ref_dir": str(ref_dir),
        "teacher_dirs": {n: str(path) for n, path in (teacher_dirs or {}).items()},
    }
    if teacher_dirs:
        profile = profile.model_copy(update={"teacher": TeacherSection(path=dirs["teacher_dirs"])})
    place = ProcessPlace(model_dir=str(model_dir), device=device, threads=threads, workers=workers, **dirs)
    return TrainerParts(profile, place, total_optimizer_steps)


def planned(
    groups: Sequence[GroupResult],
    *,
    ranks: int = 1,
    num_minibatches: int = 1,
    step: int = 1,
    window: int = 0,
    head_start_steps: int = 0,
    sequence_parallel_size: int = 1,
    ppo_epochs: int = 1,
    shares_prefixes: bool = True,
    **algorithm: Any,
) -> list[RankPlan]:
    """The plan of a train step on `groups`; `algorithm`: keys of that section."""
    profile = Profile(
        run=RunSection(train_steps=1),
        async_training=AsyncTrainingSection(require_batches=num_minibatches),
        trainer=TrainerSection(sequence_parallel_size=sequence_parallel_size, ppo_epochs=ppo_epochs),
        algorithm=AlgorithmSection(**algorithm),
        critic=CriticSection(head_start_steps=head_start_steps),
    )
    return plan_train_step(
        groups, profile, ranks=ranks, step=step, window=window, shares_prefixes=shares_prefixes
    )


def rank_batch(
    metas: Sequence[GroupResult], payloads: Sequence[GroupPayload], *, step_in_window: int = 0, **keys: Any
) -> dict[str, Any]:
    """What the only rank's `train` takes; `keys`: those of `planned`."""
    (plan,) = planned(metas, **keys)
    return {"step_in_window": step_in_window, "plan": plan, "payloads": dict(enumerate(payloads))}


def weights_of(trainer: Any) -> dict[str, Any]:
    """Copies of a model's shards, or of a trainer's policy's."""
    return {name: local.clone() for name, local in getattr(trainer, "model", trainer).locals().items()}


def save(trainer: Any, directory: Path, step: int = 0, *, with_published: bool = False) -> None:
    trainer.snapshot(step)
    trainer.write(step, directory, with_published=with_published)


def with_columns(groups: Mapping[int, GroupPayload], **columns: Any) -> dict[int, GroupPayload]:
    """The groups with further fields of their sampled tokens: by name and group, an array per trajectory."""
    found = dict(groups)
    for name, column in columns.items():
        for group, arrays in column.items():
            pairs = zip(found[group].trajectories, arrays, strict=True)
            own = tuple(replace(one, per_sampled={**one.per_sampled, name: array}) for one, array in pairs)
            found[group] = replace(found[group], trajectories=own)
    return found
