"""What is compared: profiles that do the same work on the same resources, over how many groups. Refuses
profiles that differ in more, and names the difference. The baseline of a user's own profile is derived from
it: the same model, task, W and resources, taken in turns."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.storage import replace_text
from asyncrl_cli.bench.results import Contestant
from asyncrl_cli.checkpoint.run_directory import stem_of
from asyncrl_cli.job.ray.session import connected
from asyncrl_cli.plan.cluster import ClusterResources, local_cluster
from asyncrl_cli.plan.compiler import compile_job, device_of
from asyncrl_cli.plan.job_plan import ROLLOUT, JobPlan, for_device
from asyncrl_cli.profile.arithmetic import Schedule, mode_of
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.keys import values_of, with_values
from asyncrl_cli.profile.loaded import DEFAULT, Loaded, load
from asyncrl_cli.profile.resolved import to_toml
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.profile.toml_files import is_file_reference, toml_value
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import ANY_STEPS, profile_for
from asyncrl_cli.simulate.world import length_of, virtual_cluster

REAL_GROUPS = 384
LEAST_WINDOWS = 3
"""Fewest windows of any profile in a run: a warm-up, one that is measured, a run-out."""
SAME_KEYS = (
    *("model.", "task.", "run.seed", "trainer.ppo_mini_batch_size", "rollout.engine", "rollout.n"),
    *("rollout.max_prompt_tokens", "rollout.max_response_tokens", "rollout.temperature", "rollout.top_p"),
    *("rollout.top_k", "rollout.min_p", "rollout.stop", "eval.prompts", "eval.temperature"),
)
"""Keys (and sections) that must be equal in all profiles, because they define the work."""
NO_SWITCH = "the bench scores the first and the last version, and writes no checkpoints"
BENCH_KEYS = {
    "run.seed": "use --seed",
    "run.total_rollout_steps": "use --groups",
    "run.train_steps": "use --groups",
    "run.name": "use --out",
    "eval.every_versions": NO_SWITCH,
    "checkpoint.every_steps": NO_SWITCH,
}
"""Keys that the bench sets itself, and the hint for a user who sets one."""
IN_TURNS: dict[str, object] = {
    "async_training.staleness_threshold": Decimal(0),
    "async_training.target_kl": None,
    "async_training.partial_rollout": False,
    "async_training.max_staleness": None,
    "async_training.on_stale": "wait",
    "async_training.mixed_versions": "train",
    "placement.colocate": True,
    "placement.lend": False,
    "placement.ratio": "1:1",
    "placement.tasks": None,
    "placement.ratios": None,
    "placement.rollout_strategy": "pack",
    "placement.rollout_labels": {},
    "placement.disjoint_nodes": False,
    "rollout.interrupt": None,
    "rollout.min_workers": None,
    "rollout.nnodes": None,
    "rollout.n_gpus_per_node": None,
}
"""What has no meaning where both sides take turns on everything."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The profiles to compare, the baseline first. Each runs once per seed and trains `groups` groups: on the
    virtual clock if there is a `workload`, on the Ray cluster at `address` if that is given."""

    entries: Sequence[Entry]
    seeds: Sequence[int]
    groups: int
    workload: Workload | None
    address: str | None = None

    @property
    def baseline(self) -> Entry:
        return self.entries[0]

    @property
    def longest_window(self) -> int:
        return max(entry.window_groups for entry in self.entries)

    @property
    def warnings(self) -> list[str]:
        """About the profiles and, for real runs, about their placement on this machine."""
        warnings = [warning for entry in self.entries for warning in entry.loaded.warnings]
        for entry in self.entries if self.workload is None else ():
            # of the length that its runs will have
            warnings += check(with_values(entry.profile, length_of(entry.profile, self.groups)))
            warnings += entry.plan.warnings
        return list(dict.fromkeys(warnings))


def contest_of(
    baseline: str | None,
    profiles: Sequence[str],
    *,
    directory: Path = Path(),
    keep_k: bool = False,
    sets: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    groups: int | None = None,
    workload: Workload | None = None,
    address: str | None = None,
) -> Contest:
    """Check the profiles and determine the runs' length: `groups`, or about a default.

    Without a `baseline` that of the first profile that is a file is derived and written to `directory`
    (`keep_k`: `baseline_toml`); if all are shipped profiles it is `colocate`. Raises ConfigError if the
    profiles cannot be compared.
    """
    for key in (text.partition("=")[0].strip() for text in sets):
        if key in BENCH_KEYS and (workload is None or key != "eval.every_versions"):
            raise ConfigError(f"--set {key}: the bench sets this for every profile", hint=BENCH_KEYS[key])
    file = next(filter(is_file_reference, profiles), None) if baseline is None else None
    if keep_k and file is None:
        why = "--keep-k is for the baseline that is derived from a profile's file"
        raise ConfigError(why, hint="--profile my.toml, without --compare")

    def loaded(reference: str, sets: Sequence[str]) -> Loaded:
        if workload is not None:
            found = profile_for(workload, reference, sets)
        else:
            flags = {"run.seed": seeds[0], "run.train_steps": ANY_STEPS}
            found = load(reference, sets, flags | {"eval.every_versions": 0, "checkpoint.every_steps": 0})
        # as its runs, or their sizes would be others; simulated ones have those of the workload
        device = device_of(found.profile, cluster(found.profile))
        return for_device(found, device, is_here=address is None and workload is None)

    def cluster(profile: Profile) -> ClusterResources:
        if workload is not None:
            return virtual_cluster(profile)
        return local_cluster() if address is None else _cluster_at(address)

    with ExitStack() as undo:
        references: dict[str, Sequence[str]] = dict.fromkeys([baseline or "colocate", *profiles], sets)
        if file is not None:
            base = loaded(file, sets)
            plan = compile_job(base.profile, cluster(base.profile))
            path = directory / f"{stem_of(base.profile.name)}-colocate.toml"
            replace_text(path, baseline_toml(base, plan, keep_k=keep_k))
            # a contest that is refused leaves no file behind
            undo.callback(path.unlink)
            # the baseline's file has the `--set`s in it
            references = {str(path): (), **dict.fromkeys(profiles, sets)}
        entries = entries_of(references, loaded, cluster)
        if groups is None:
            window_groups = entries[0].window_groups
            default = workload.windows * window_groups if workload else REAL_GROUPS
            groups = groups_for_all(entries, default)
        _check_groups(entries, groups)
        undo.pop_all()
    return Contest(entries=entries, seeds=seeds, groups=groups, workload=workload, address=address)


def baseline_toml(base: Loaded, plan: JobPlan, *, keep_k: bool) -> str:
    """The profile file of the baseline of `base`. `plan`: that of `base`, whose resources the baseline gets.
    `keep_k`: with K = 1, as in the profile `colocate`, instead of the K of `base`.

    Raises ConfigError for a profile that cannot take turns, or already does.
    """
    profile = base.profile
    if mode_of(profile) == "colocate":
        why = f"'{profile.name}' is colocated, like its baseline would be"
        raise ConfigError(why, hint="--compare NAME, another profile")
    if profile.reward_model.path is not None:
        why = f"'{profile.name}' has a reward model, which needs its own resources"
        hint = "--compare NAME, another profile with this reward model"
        raise ConfigError(f"{why}: it has no colocated baseline", hint=hint)
    changed = dict(IN_TURNS)
    if plan.gpus:
        changed |= {"placement.gpus": plan.gpus, "placement.gpus_per_rollout_worker": 1}
        others = ("placement.trainer_workers", "rollout.workers", "rollout.tensor_parallel_size")
        changed |= dict.fromkeys((*others, "trainer.nnodes", "trainer.n_gpus_per_node"))
    else:
        # On CPUs each rank and each worker has a place of its own; scorers' places become ranks'.
        places = plan.cpus // plan.cpus_per_worker
        changed["placement.trainer_workers"] = places - plan.role(ROLLOUT).workers
    if profile.weights.transport in DIRECT_TRANSPORTS:
        changed["weights.transport"] = "ipc" if plan.gpus == 1 else "object-store"
    if keep_k:
        changed["async_training.trigger_parameter_sync_step"] = 1
    origins = {**base.origins, **dict.fromkeys(changed, "bench"), **dict.fromkeys(BENCH_KEYS, DEFAULT)}
    purpose = f"The baseline of {profile.name}: trainer and rollout workers take turns on all resources."
    names = {"name": f"{profile.name}-colocate", "purpose": purpose}
    return to_toml(with_values(profile, changed).model_copy(update=names), origins)


@cache
def _cluster_at(address: str) -> ClusterResources:
    with connected(address) as cluster:
        return cluster


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
        name, schedule = loaded.profile.name, Schedule.of(loaded.profile)
        if any(name == other.name for other in entries):
            what = f"two of the profiles are named '{name}'"
            raise ConfigError(what, hint="give one of them another `name`")
        entries.append(
            Entry(
                name=name,
                mode=schedule.mode,
                step_groups=schedule.step_groups,
                window_groups=schedule.window_groups,
                reference=reference,
                sets=tuple(sets),
                loaded=loaded,
                plan=plan,
            )
        )
    if len(entries) < 2:
        what = f"'{entries[0].reference}' cannot be compared with itself"
        raise ConfigError(what, hint="--profile partial-rollout")
    baseline, *others = entries
    for entry in others:
        _check_comparable(baseline, entry)
    return entries


def _check_comparable(baseline: Entry, entry: Entry) -> None:
    """Raises ConfigError unless both do the same work on the same resources."""
    theirs = values_of(entry.profile)
    for key, value in values_of(baseline.profile).items():
        is_work = key in SAME_KEYS or f"{key.partition('.')[0]}." in SAME_KEYS
        if is_work and value != theirs[key]:
            given = theirs[key] if value is None else value
            # `--set` takes a string without quotes
            setting = shlex.quote(f"{key}={given if isinstance(given, str) else toml_value(given)}")
            values = f"{key} is {value!r} and {theirs[key]!r}"
            what = f"'{baseline.name}' and '{entry.name}' do different work: {values}"
            raise ConfigError(what, hint=f"--set {setting} sets it for all of them")
    left, right = baseline.plan, entry.plan
    if left.device != right.device:
        what = f"'{baseline.name}' runs on {left.device} and '{entry.name}' on {right.device}"
        raise ConfigError(what, hint="--set placement.device=cpu")
    here, there, unit = left.gpus, right.gpus, "GPUs"
    hint = f"--set placement.gpus={left.gpus}"
    if left.device != "cuda":
        here, there, unit = left.cpus, right.cpus, "CPU cores"
        ranks, workers = left.trainer_workers, left.rollout_workers
        if left.colocate:
            # half of a colocated plan's processes become rollout workers
            ranks, workers = max(ranks // 2, 1), max(ranks - ranks // 2, 1)
        hint = f"--set placement.trainer_workers={ranks} --set rollout.workers={workers} "
        hint += f"--set placement.cpus_per_worker={left.cpus_per_worker}"
    if here != there:
        what = f"'{baseline.name}' uses {here} {unit} and '{entry.name}' {there}"
        raise ConfigError(f"{what}: a comparison needs the same resources", hint=hint)


def groups_for_all(entries: Sequence[Entry], wanted: int) -> int:
    """The smallest number of groups, at least `wanted`, that every profile can train exactly, with
    `LEAST_WINDOWS` windows."""
    unit = math.lcm(*(entry.step_groups for entry in entries))
    least = max(wanted, *(LEAST_WINDOWS * entry.window_groups for entry in entries))
    return -(-least // unit) * unit


def _check_groups(entries: Sequence[Entry], groups: int) -> None:
    """Raises ConfigError unless every profile can train exactly `groups`, with windows to measure."""
    for entry in entries:
        if groups % entry.step_groups:
            wrong = f"no multiple of R = {entry.step_groups} groups per train step of '{entry.name}'"
        elif groups < LEAST_WINDOWS * entry.window_groups:
            windows = f"{LEAST_WINDOWS} windows of '{entry.name}', which has W = {entry.window_groups}"
            wrong = f"not {windows}: the first one is warm-up, in the last one nothing is generated ahead, "
            wrong += "and what is measured lies between"
        else:
            continue
        raise ConfigError(f"{groups} groups are {wrong}", hint=f"--groups {groups_for_all(entries, groups)}")
