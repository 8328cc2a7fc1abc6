"""Which tasks share resources (`placement.tasks`), and how many each list of them gets (`placement.ratios`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import toml_value

TRAIN, REF, ROLLOUT = "train", "ref", "rollout"
KEY, RATIOS = "placement.tasks", "placement.ratios"
BOUND_TO_TRAIN = {
    "prox": "it needs the weights of its window's start, and the groups that are trained in a window are known when they are taken",
    "critic": "it learns from every group that is trained",
}
"""Tasks that only the trainer's processes can do, and why."""


def is_apart(profile: Profile, task: str) -> bool:
    """Whether the task has resources of its own."""
    return any(tuple(sharing) == (task,) for sharing in profile.placement.tasks or ())


def share_of(profile: Profile, task: str) -> int | None:
    """What `placement.ratios` gives the task and those that it shares with; None without ratios, or if it is not named."""
    tasks, ratios = profile.placement.tasks, profile.placement.ratios
    if tasks is None or ratios is None:
        return None
    return next((ratio for sharing, ratio in zip(tasks, ratios, strict=True) if task in sharing), None)


def conflicts(profile: Profile) -> Iterator[ConfigError]:
    """What is wrong with `placement.tasks` and `placement.ratios`."""
    placement = profile.placement
    tasks, ratios = placement.tasks, placement.ratios
    if tasks is None:
        if ratios is not None:
            yield ConfigError(
                f"{RATIOS} = {toml_value(ratios)}, and no {KEY}: nothing says of what", hint="give both, or placement.ratio"
            )
        return
    shown = f"{KEY} = {toml_value(tasks)}"
    counts = Counter[str](task for sharing in tasks for task in sharing)
    for task in (TRAIN, ROLLOUT):
        if not counts[task]:
            yield ConfigError(f"{shown} has no {task}", hint=f"add it: {_example(profile)}")
    if doubled := [task for task, count in counts.items() if count > 1]:
        yield ConfigError(f"{shown} names {doubled[0]} more than once", hint=f"name each task once: {_example(profile)}")
        return
    if not all(tasks):
        yield ConfigError(f"{shown} has an empty list", hint="leave it out")
    yield from _wrong_lists(profile, shown)
    if is_apart(profile, REF) and not profile.algorithm.has_reference:
        hint = "--set algorithm.use_kl_loss=true (or use_kl_in_reward), or leave ref out"
        yield ConfigError(f"{shown}: nothing asks for the reference's logprobs", hint=hint)
    if placement.colocate:
        yield ConfigError(
            f"{shown} with placement.colocate = true: everything shares all resources there", hint="leave one of the two out"
        )
    if ratios is not None and len(ratios) != len(tasks):
        hint = "one number for each list of placement.tasks, in their order"
        yield ConfigError(f"{RATIOS} = {toml_value(ratios)} are {len(ratios)} numbers for {len(tasks)} lists of tasks", hint=hint)
    if ratios is not None and placement.ratio != "1:1":
        yield ConfigError(
            f'{RATIOS} with placement.ratio = "{placement.ratio}": both say who gets what', hint="leave placement.ratio out"
        )


def _wrong_lists(profile: Profile, shown: str) -> Iterator[ConfigError]:
    """Tasks that cannot be where they are."""
    for sharing in profile.placement.tasks or ():
        others = [task for task in sharing if task != ROLLOUT]
        if ROLLOUT in sharing and others:
            hint = "--set placement.colocate=true, or a list of its own for rollout"
            yield ConfigError(f"{shown}: {others[0]} and rollout share resources only if they take turns", hint=hint)
        for task in (task for task in sharing if task in BOUND_TO_TRAIN and TRAIN not in sharing):
            yield ConfigError(
                f"{shown}: {task} is for the trainer: {BOUND_TO_TRAIN[task]}", hint=f"name it beside train: {_example(profile)}"
            )


def _example(profile: Profile) -> str:
    apart = [["ref"]] if profile.algorithm.has_reference else []
    return f"{KEY} = {toml_value([['train', 'prox'], *apart, ['rollout']])}"
