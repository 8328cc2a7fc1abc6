"""The profiles of a comparison. Refuses those that do different work or use different resources, and names
the difference."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.bench.results import Contestant
from asyncrl_cli.plan.cluster import ClusterResources
from asyncrl_cli.plan.compiling import compile_job
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.plan.resolving import for_device
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.keys import values_of
from asyncrl_cli.profile.loaded import Loaded
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import toml_value

NO_SWITCH = "the bench scores the first and the last version, and writes no checkpoints"
OWN_KEYS = {
    "run.seed": "use --seed",
    "run.total_rollout_steps": "use --groups",
    "run.train_steps": "use --groups",
    "run.name": "use --out",
    "eval.every_versions": NO_SWITCH,
    "checkpoint.every_steps": NO_SWITCH,
}
"""Keys that the bench sets itself, and the hint for a user who sets one."""

LEAST_WINDOWS = 3
"""Fewest windows of any profile in a run: a warm-up, one that is measured, a run-out."""

SAME_KEYS = (
    "model.",
    "task.",
    "run.seed",
    "trainer.ppo_mini_batch_size",
    "rollout.engine",
    "rollout.n",
    "rollout.max_prompt_tokens",
    "rollout.max_response_tokens",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.stop",
    "eval.prompts",
    "eval.temperature",
)
"""Keys (and sections) that must be equal in all profiles, because they define the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Contestant):
    """A profile that can be run. `reference`: its name or file; `sets`: the `--set`s on top of it; `plan`:
    its resources."""

    reference: str
    sets: tuple[str, ...]
    loaded: Loaded
    plan: JobPlan

    @property
    def profile(self) -> Profile:
        return self.loaded.profile


def entries_of(
    references: Mapping[str, Sequence[str]],
    load: Callable[[str, Sequence[str]], Loaded],
    cluster: Callable[[Profile], ClusterResources],
) -> list[Entry]:
    """`references`: the profiles with the `--set`s of each, the baseline first. `cluster` says what a profile
    may use. Raises ConfigError where the profiles cannot be compared."""
    entries: list[Entry] = []
    for reference, sets in references.items():
        loaded = load(reference, sets)
        plan = compile_job(loaded.profile, cluster(loaded.profile))
        loaded = for_device(loaded, plan.device)
        schedule = Schedule.of(loaded.profile)
        entry = Entry(
            name=loaded.profile.name,
            mode=schedule.mode,
            step_groups=schedule.step_groups,
            window_groups=schedule.window_groups,
            reference=reference,
            sets=tuple(sets),
            loaded=loaded,
            plan=plan,
        )
        if any(entry.name == other.name for other in entries):
            raise ConfigError(
                f"two of the profiles are named '{entry.name}'", hint="give one of them another `name`"
            )
        entries.append(entry)
    if len(entries) < 2:
        raise ConfigError(
            f"'{entries[0].reference}' cannot be compared with itself", hint="--profile partial-rollout"
        )
    for entry in entries[1:]:
        _check_same_work(entries[0], entry)
        _check_same_resources(entries[0], entry)
    return entries


def check_sets(sets: Sequence[str]) -> None:
    """Raises ConfigError for keys that the bench sets for all profiles alike."""
    for text in sets:
        key = text.partition("=")[0].strip()
        if key in OWN_KEYS:
            raise ConfigError(f"--set {key}: the bench sets this for every profile", hint=OWN_KEYS[key])


def check_groups(entries: Sequence[Entry], groups: int) -> None:
    """Raises ConfigError unless every profile can train exactly `groups`, with windows to measure."""
    for entry in entries:
        wrong = ""
        if groups % entry.step_groups:
            wrong = f"no multiple of R = {entry.step_groups} groups per train step of '{entry.name}'"
        elif groups < LEAST_WINDOWS * entry.window_groups:
            wrong = (
                f"not {LEAST_WINDOWS} windows of '{entry.name}', which has W = {entry.window_groups}: the "
                "first one is warm-up, "
                "in the last one nothing is generated ahead, and what is measured lies between"
            )
        if wrong:
            raise ConfigError(
                f"{groups} groups are {wrong}", hint=f"--groups {groups_for_all(entries, groups)}"
            )


def groups_for_all(entries: Sequence[Entry], wanted: int) -> int:
    """The smallest number of groups, at least `wanted`, that every profile can train exactly, with
    `LEAST_WINDOWS` windows."""
    unit = math.lcm(*(entry.step_groups for entry in entries))
    longest = max(entry.window_groups for entry in entries)
    least = max(wanted, LEAST_WINDOWS * longest)
    return -(-least // unit) * unit


def _check_same_work(baseline: Entry, entry: Entry) -> None:
    others = values_of(entry.profile)
    for key, ours in values_of(baseline.profile).items():
        theirs = others[key]
        if ours != theirs and (key in SAME_KEYS or f"{key.partition('.')[0]}." in SAME_KEYS):
            value = ours if ours is not None else theirs
            # `--set` takes a string without quotes
            written = value if isinstance(value, str) else toml_value(value)
            raise ConfigError(
                f"'{baseline.name}' and '{entry.name}' do different work: {key} is {ours!r} and {theirs!r}",
                hint=f"--set {shlex.quote(f'{key}={written}')} sets it for all of them",
            )


def _check_same_resources(baseline: Entry, entry: Entry) -> None:
    left, right = baseline.plan, entry.plan
    if left.device != right.device:
        raise ConfigError(
            f"'{baseline.name}' runs on {left.device} and '{entry.name}' on {right.device}",
            hint="--set placement.device=cpu",
        )
    what, ours, theirs = (
        ("GPUs", left.gpus, right.gpus) if left.device == "cuda" else ("CPU cores", left.cpus, right.cpus)
    )
    if ours != theirs:
        raise ConfigError(
            f"'{baseline.name}' uses {ours} {what} and '{entry.name}' {theirs}: a comparison needs the same "
            "resources",
            hint=_same_resources(left),
        )


def _same_resources(plan: JobPlan) -> str:
    """The `--set`s that give every profile the resources of `plan`. Half of a colocated plan's processes
    become rollout workers."""
    if plan.device == "cuda":
        return f"--set placement.gpus={plan.gpus}"
    ranks, workers = plan.trainer_workers, plan.rollout_workers
    if plan.colocate:
        ranks, workers = max(ranks // 2, 1), max(ranks - ranks // 2, 1)
    return (
        f"--set placement.trainer_workers={ranks} --set rollout.workers={workers} "
        f"--set placement.cpus_per_worker={plan.cpus_per_worker}"
    )
