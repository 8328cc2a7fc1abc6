"""Workload files: finds and checks them, applies their keys to a profile, and compares simulations with their
measured rows.

    profile files (`extends`)  <  the workload's [profile]  <  its [profiles.NAME]  <  environment  <  --set

Checkpoints are off, and evals, too, unless `--set` asks for some: they cost every profile about the same and
would only blur the figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from asyncrl_cli.base.errors import MOST_PROBLEMS, AsyncrlError, ConfigError, combine, did_you_mean
from asyncrl_cli.base.paths import expand
from asyncrl_cli.observe.run_lines import Totals
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.profile.arithmetic import window_groups_of
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.keys import flatten, values_of, with_values
from asyncrl_cli.profile.loaded import DEFAULT, Layer, Loaded, file_layer, load
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import (
    Values,
    chain,
    is_file_reference,
    read,
    shipped_profiles,
    shipped_workloads,
    shortened,
)
from asyncrl_cli.simulate.workload import Reference, Workload
from asyncrl_cli.simulate.world import SimulatedRun, length_of, simulate, virtual_cluster

SWITCHED_OFF = {"checkpoint.every_steps": 0, "env.max_context_tokens": None}
"""Besides what a simulation leaves out: the profile's own limit of a context, which is about the tokens of
another task."""
ANY_STEPS = 1_000_000
"""Stands for a length that is not known yet: longer than all that is checked against it."""
UNLESS_SET = {"run.train_steps": ANY_STEPS, "eval.every_versions": 0, "eval.prompts": 0}
"""Only `--set` and the environment override these."""
DIVIDED = (
    "trainer.ppo_mini_batch_size",
    "placement.gpus",
    "placement.trainer_workers",
    "rollout.workers",
    "eval.prompts",
)
"""Of which a miniature has fewer."""
WINDOW = "window"
"""Name of the part that stands for the whole window."""
MEASURED_WINDOWS = 6
MINIATURES = (16, 8, 4, 3, 2)
LEAST_GROUPS, LEAST_TRAJECTORIES = 16, 2000
"""Of a window of a miniature. With fewer trajectories it seldom has one of the longest, for which whole
windows wait (docs/simulation.md)."""


def load_workload(reference: str) -> Workload:
    """The workload NAME or FILE. Raises ConfigError, which names file and key and, for a misspelt key, the
    nearest one."""
    known = shipped_workloads()
    names, path = ", ".join(known), known.get(reference)
    if is_file_reference(reference):
        path = expand(reference)
        if not os.path.isfile(path):
            raise ConfigError(f"there is no workload file {path}", hint=f"workloads by name: {names}")
        path = path.resolve()
    if path is None:
        hint = did_you_mean(reference, known, f"known workloads: {names}.", "`{}`".format)
        hint += " A file is given with its path or .toml"
        raise ConfigError(f"there is no workload '{reference}'", hint=hint)
    content = read(path)
    problems = list(islice(_profile_problems(content, path), MOST_PROBLEMS + 1))
    try:
        workload = Workload.model_validate({"name": path.stem, **content})
    except ValidationError as error:
        unknown_first = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
        problems += [_wrong_value(detail, path) for detail in unknown_first[: MOST_PROBLEMS + 1]]
    if problems:
        raise combine(problems)
    return workload


def profile_for(
    workload: Workload,
    profile_reference: str,
    sets: Sequence[str] = (),
    *,
    groups: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """The profile NAME or FILE with the workload's keys on top, but below environment and `--set`.

    Keys in a FILE that is not shipped override the workload's, because its author chose them. The workload's
    [profiles.NAME] applies to the shipped profile of that name and to files that extend it.

    It trains `groups` groups, if they are given, rounded up to whole train steps.
    """
    shipped = set(shipped_profiles().values())
    files = chain(profile_reference)
    own = [file_layer(file) for file in files if file.path not in shipped]
    name = next((file.name for file in reversed(files) if file.path in shipped), files[-1].name)
    origin = f"workload {workload.name}"
    layers = [*layers_of(workload, name), *own, Layer(origin=origin, values=UNLESS_SET)]
    loaded = load(profile_reference, sets, environ=environ, layers=layers)
    if groups is None:
        return loaded
    length = length_of(loaded.profile, groups)
    known = {"run.train_steps": f"{origin} ({groups} groups)", "run.total_rollout_steps": DEFAULT}
    origins = {**loaded.origins, **known}
    return replace(loaded, profile=with_values(loaded.profile, length), origins=origins)


def miniature(workload: Workload, whole: Profile) -> tuple[Profile, int]:
    """The profile with the devices and the prompts of a mini-batch divided by the same number, as large as
    possible: each device has the same work, and a simulation takes less time. The longest of fewer responses
    is a little shorter. Second, that number; 1 for `whole` itself, if it cannot be smaller."""
    counts = {key: count for key, count in values_of(whole).items() if key in DIVIDED and count}
    least_gpus = workload.worker_gpus(whole.placement) if whole.placement.colocate else 1
    window_groups = window_groups_of(whole)
    for factor in MINIATURES if whole.placement.gpus else ():
        groups = window_groups // factor
        if groups < LEAST_GROUPS or groups * whole.rollout.n < LEAST_TRAJECTORIES:
            continue
        if (
            any(count % factor for count in counts.values())
            or counts["placement.gpus"] // factor % least_gpus
        ):
            continue
        smaller = with_values(whole, {key: count // factor for key, count in counts.items()})
        try:
            check(smaller)
            compile_job(smaller, virtual_cluster(smaller))
        except AsyncrlError:  # its sides cannot be divided so
            continue
        return smaller, factor
    return whole, 1


def layers_of(workload: Workload, profile_name: str) -> list[Layer]:
    """The workload's keys for every profile, then its keys for this one."""
    origin = f"workload {workload.name}"
    common = flatten(workload.profile, origin)
    of_profile = flatten(workload.profiles.get(profile_name, {}), origin)
    return [
        Layer(origin=origin, values=SWITCHED_OFF | common),
        Layer(origin=f"{origin}, profiles.{profile_name}", values=of_profile),
    ]


def _profile_problems(content: Values, path: Path) -> Iterator[ConfigError]:
    """Problems with the profile keys, except a value in place of a table, which the workload's own schema
    reports."""
    by_name, known = content.get("profiles", {}), shipped_profiles()
    by_name = by_name if isinstance(by_name, Mapping) else {}
    for name in (name for name in by_name if name not in known):
        hint = did_you_mean(name, known, f"known profiles: {', '.join(known)}")
        yield ConfigError(f"{path}: profiles.{name}: there is no profile '{name}'", hint=hint)
    tables = {"profile": content.get("profile")}
    tables |= {f"profiles.{name}": table for name, table in by_name.items()}
    for where, table in tables.items():
        try:
            if isinstance(table, Mapping):
                flatten(table, f"{path}, [{where}]")
        except ConfigError as problem:
            yield problem


def _wrong_value(detail: ErrorDetails, path: Path) -> ConfigError:
    key, known = ".".join(part for part in detail["loc"] if isinstance(part, str)), dict(_keys_of(Workload))
    meaning = f"what it is: {known[key]}" if known.get(key) else "the shipped workloads have examples"
    if detail["type"] == "missing":
        return ConfigError(f"{path}: {key} is missing", hint=meaning)
    if detail["type"] == "extra_forbidden":
        sections = ", ".join(name for name in known if "." not in name)
        hint = did_you_mean(key, known, f"keys: {sections}")
        return ConfigError(f"{path}: unknown key {shortened(key)}", hint=hint)
    message = str(detail["msg"])
    if detail["type"] == "value_error":  # of a whole table, which would say nothing
        where = f"{path}: {key}" if key else str(path)
        return ConfigError(f"{where}: {message.removeprefix('Value error, ')}", hint=meaning)
    given = shortened(detail["input"])
    shown = f'"{given}"' if isinstance(detail["input"], str) else given
    return ConfigError(f"{path}: {key} = {shown}: {message.removeprefix('Input ')}", hint=meaning)


def _keys_of(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a workload file, dotted, with its help text; those in `[profile]` and below are a
    profile's."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}", " ".join((field.description or "").split())
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _keys_of(inner, f"{prefix}{name}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Measured and simulated seconds of one part of a reference row. `part`: `window` (the whole) or a name
    in `timing/*_s`."""

    profile: str
    part: str
    measured_s: float
    predicted_s: float
    calibrated: bool
    source: str = ""
    evidence: str = "measured"

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s if self.measured_s else float("inf")


def residuals(workload: Workload, reference: Reference, *, windows: int = MEASURED_WINDOWS) -> list[Residual]:
    """Simulates a measured row for `windows` windows besides the first and the last; in miniature, if the
    workload has `[physics]`. Raises the error of a failed run."""
    sets = reference_sets(reference)
    profile, scale = profile_for(workload, reference.profile, sets, environ={}).profile, 1
    if workload.physics is not None:
        profile, scale = miniature(workload, profile)
    run = simulate(profile, workload, groups=(windows + 2) * window_groups_of(profile), scale=scale)
    if run.error is not None:
        raise run.error
    predicted_s = window_parts(run)
    if unknown := reference.parts_s.keys() - predicted_s.keys():
        what = f"workload {workload.name}: references.parts_s has no part {min(unknown)}"
        raise ConfigError(what, hint=f"parts: {', '.join(predicted_s)}")
    return [
        Residual(
            profile=" ".join([reference.profile, *sets]),
            part=part,
            measured_s=float(measured_s),
            predicted_s=predicted_s[part],
            calibrated=reference.calibrated,
            source=reference.source,
            evidence=reference.evidence,
        )
        for part, measured_s in {WINDOW: reference.window_time_s, **reference.parts_s}.items()
    ]


def reference_sets(reference: Reference) -> list[str]:
    """The row's own keys as arguments of `--set`."""
    values = flatten(reference.set, f"reference {reference.profile}")
    texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
    return [f"{key}={text}" for key, text in texts.items()]


def window_parts(run: SimulatedRun) -> dict[str, float]:
    """Mean seconds per window of every part, without the run's first window (it starts empty) and last (it
    ends with a load)."""
    windows = sorted({line["window"] for line in run.lines})
    kept = windows[1:-1] if len(windows) > 2 else windows
    lines = [line for line in run.lines if kept[0] <= line["window"] <= kept[-1]]
    parts = {part: seconds / len(kept) for part, seconds in Totals(lines).parts_s.items()}
    return {WINDOW: parts.pop("step"), **parts, "rest": parts.get("gather", 0.0) + parts.get("other", 0.0)}
