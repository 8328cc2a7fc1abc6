"""The number of nodes of a role and of GPUs per node: the way in which verl and SkyRL give counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.profile.rollout_sections import RolloutSection
from asyncrl_cli.profile.schema import Profile, TrainerSection


class Shape(NamedTuple):
    """A role uses `gpus` GPUs on each of `nodes` nodes."""

    nodes: int
    gpus: int


def shape_of(section: TrainerSection | RolloutSection) -> Shape | None:
    """The section's shape. None if it has none: the role's processes may then be on any nodes."""
    return None if section.n_gpus_per_node is None else Shape(section.nnodes or 1, section.n_gpus_per_node)


def asked_ranks(profile: Profile) -> int | None:
    """The number of trainer ranks; None if no key gives it."""
    shape = shape_of(profile.trainer)
    return profile.placement.trainer_workers if shape is None else shape.nodes * shape.gpus


def asked_workers(profile: Profile) -> int | None:
    """The number of rollout workers; None if no key gives it."""
    shape = shape_of(profile.rollout)
    if shape is None:
        return profile.rollout.workers
    return shape.nodes * (shape.gpus // profile.placement.gpus_per_rollout_worker)


def conflicts(profile: Profile) -> Iterator[ConfigError]:
    """Errors in the shapes, and contradictions between shapes and counts."""
    each = profile.placement.gpus_per_rollout_worker
    counts = {
        "trainer": ("placement.trainer_workers", profile.placement.trainer_workers, asked_ranks(profile)),
        "rollout": ("rollout.workers", profile.rollout.workers, asked_workers(profile)),
    }
    for name, (key, given, asked) in counts.items():
        section = getattr(profile, name)
        shape = shape_of(section)
        if shape is None:
            if section.nnodes is not None:
                yield ConfigError(
                    f"{name}.nnodes = {section.nnodes} without {name}.n_gpus_per_node: the number of GPUs "
                    "per node is missing",
                    hint=f"--set {name}.n_gpus_per_node=N; `asyncrl plan` says what fits",
                )
            continue
        if name == "rollout" and shape.gpus % each:
            yield ConfigError(
                f"rollout.n_gpus_per_node = {shape.gpus} is not a multiple of "
                f"placement.gpus_per_rollout_worker = {each}: the GPUs "
                "of a worker are on one node",
                hint=f"--set rollout.n_gpus_per_node={max(shape.gpus // each, 1) * each}",
            )
        elif given not in (None, asked):
            yield ConfigError(
                f"{name}.nnodes = {shape.nodes} with {name}.n_gpus_per_node = {shape.gpus} means {asked}, "
                f"but {key} = {given}",
                hint=f"leave out {key}, or the other two",
            )
