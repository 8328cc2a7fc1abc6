"""Which tasks share resources (`placement.tasks`), and how much each list of tasks gets
(`placement.ratios`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.profile.toml_files import toml_value

TRAIN, PROX, REF, CRITIC, REWARD, ROLLOUT = "train", "prox", "ref", "critic", "reward", "rollout"
SCORERS = (REF, PROX, REWARD, CRITIC)
"""Tasks that can have their own processes, which score finished groups while others are trained."""
KEY, RATIOS = "placement.tasks", "placement.ratios"


def tasks_apart(profile: Profile) -> tuple[str, ...]:
    """The scorers with their own processes. The reward model always has its own."""
    alone = [sharing[0] for sharing in profile.placement.tasks or () if len(sharing) == 1]
    implied = [REWARD] if profile.reward_model.path is not None else []
    return tuple(dict.fromkeys(task for task in (*alone, *implied) if task in SCORERS))


def is_apart(profile: Profile, task: str) -> bool:
    """Whether the task has resources of its own."""
    return task in tasks_apart(profile)


def share_of(profile: Profile, task: str) -> int | None:
    """The share that `placement.ratios` gives to the task's list. None without ratios, or if no list names
    the task."""
    tasks, ratios = profile.placement.tasks, profile.placement.ratios
    if tasks is None or ratios is None:
        return None
    return next((ratio for sharing, ratio in zip(tasks, ratios, strict=True) if task in sharing), None)


def conflicts(profile: Profile) -> Iterator[ConfigError]:
    """Errors in `placement.tasks` and `placement.ratios`."""
    placement = profile.placement
    tasks, ratios = placement.tasks, placement.ratios
    if placement.colocate and tasks is None and tasks_apart(profile):
        because = (
            "trainer and rollout workers take turns on all resources, but the reward model needs its own"
        )
        yield ConfigError(
            f"placement.colocate = true with a reward model: {because}", hint="--set placement.colocate=false"
        )
    if tasks is None:
        if ratios is not None:
            yield ConfigError(
                f"{RATIOS} = {toml_value(ratios)} without {KEY}: the ratios have no tasks",
                hint="give both, or placement.ratio",
            )
        return
    shown = f"{KEY} = {toml_value(tasks)}"
    counts = Counter[str](task for sharing in tasks for task in sharing)
    for task in (TRAIN, ROLLOUT):
        if not counts[task]:
            yield ConfigError(f"{shown} has no {task}", hint=f"add it: {_example(profile)}")
    if doubled := [task for task, count in counts.items() if count > 1]:
        yield ConfigError(
            f"{shown} names {doubled[0]} more than once", hint=f"name each task once: {_example(profile)}"
        )
        return
    if not all(tasks):
        yield ConfigError(f"{shown} has an empty list", hint="leave it out")
    yield from _wrong_lists(profile, shown)
    yield from _without_use(profile, shown)
    if placement.colocate:
        yield ConfigError(
            f"{shown} with placement.colocate = true, where everything shares all resources",
            hint="leave one of the two out",
        )
    if ratios is not None and len(ratios) != len(tasks):
        hint = "one number for each list of placement.tasks, in their order"
        yield ConfigError(
            f"{RATIOS} = {toml_value(ratios)} has {len(ratios)} numbers for {len(tasks)} lists of tasks",
            hint=hint,
        )
    if ratios is not None and placement.ratio != "1:1":
        yield ConfigError(
            f'{RATIOS} with placement.ratio = "{placement.ratio}": both say who gets what',
            hint="leave placement.ratio out",
        )


def _wrong_lists(profile: Profile, shown: str) -> Iterator[ConfigError]:
    """Errors for tasks that cannot share a list."""
    for sharing in profile.placement.tasks or ():
        others = [task for task in sharing if task != ROLLOUT]
        if ROLLOUT in sharing and others:
            hint = "--set placement.colocate=true, or a list of its own for rollout"
            yield ConfigError(
                f"{shown}: {others[0]} and rollout share resources only if they take turns", hint=hint
            )
        elif TRAIN in sharing and REWARD in sharing:
            hint = f"give it a list of its own: {_example(profile)}"
            yield ConfigError(f"{shown}: rewards are needed before groups are taken to be trained", hint=hint)
        elif TRAIN not in sharing and len(sharing) > 1:
            hint = f"a list of its own for each: {_example(profile)}"
            yield ConfigError(f"{shown}: {' and '.join(sharing)} share resources only with train", hint=hint)


def _without_use(profile: Profile, shown: str) -> Iterator[ConfigError]:
    """Errors for tasks with their own processes that the profile does not need, or that cannot run there."""
    algorithm, weights = profile.algorithm, profile.weights
    if is_apart(profile, REF) and not algorithm.has_reference:
        hint = "--set algorithm.use_kl_loss=true (or algorithm.use_kl_in_reward=true), or leave ref out"
        yield ConfigError(f"{shown}: nothing asks for the reference's logprobs", hint=hint)
    if is_apart(profile, CRITIC) and not algorithm.has_critic:
        yield ConfigError(
            f"{shown}: nothing asks for values", hint="--set algorithm.adv_estimator=gae, or leave critic out"
        )
    elif is_apart(profile, CRITIC) and algorithm.use_kl_in_reward and not is_apart(profile, REF):
        because = "the critic's returns need the reference's logprobs, which only the trainer would have"
        yield ConfigError(
            f"{shown} with algorithm.use_kl_in_reward = true: {because}",
            hint="give ref a list of its own, too",
        )
    if REWARD in tasks_apart(profile) and profile.reward_model.path is None:
        yield ConfigError(
            f"{shown}: there is no reward model", hint="--set reward_model.path=..., or leave reward out"
        )
    if not is_apart(profile, PROX):
        return
    if algorithm.old_logprobs != "recompute":
        hint = "--set algorithm.old_logprobs=recompute, or leave prox out"
        yield ConfigError(
            f'{shown}: algorithm.old_logprobs = "{algorithm.old_logprobs}" has no such pass', hint=hint
        )
    if weights.transport in DIRECT_TRANSPORTS:
        because = (
            "versions go directly from the trainer's GPU memory to that of rollout workers, and nowhere else"
        )
        hint = "--set weights.transport=object-store, or name prox beside train"
        yield ConfigError(f'{shown} with weights.transport = "{weights.transport}": {because}', hint=hint)
    if profile.lora.rank and profile.model.dtype == "bfloat16":
        because = (
            "prox would use merged weights, where rounding to bfloat16 is larger than the adapters' change"
        )
        hint = "name prox beside train, or --set model.dtype=float32"
        yield ConfigError(f"{shown} with lora.rank = {profile.lora.rank} in bfloat16: {because}", hint=hint)


def _example(profile: Profile) -> str:
    algorithm = profile.algorithm
    wanted = {
        REF: algorithm.has_reference,
        CRITIC: algorithm.has_critic,
        REWARD: profile.reward_model.path is not None,
    }
    apart = [[task] for task, is_wanted in wanted.items() if is_wanted]
    return f"{KEY} = {toml_value([['train', 'prox'], *apart, ['rollout']])}"
