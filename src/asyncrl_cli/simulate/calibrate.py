"""Calibrates a workload (costs of a machine and a model) from a real run's metrics, events and profile.

    decode step     (mean batch) / (tokens/s while busy), against the mean batch                         -> [decoding]
    train step      timing/train_s                    against trained tokens                             -> [training]
    old logprobs    timing/old_logprob_s              per train/old_logprob_tokens
    scorers         their busy time                   per scored token
    sync            medians of `published` and `loaded`                                                  -> [syncing]

Straight lines are fitted to the first two (`observed.py`), with an interference ratio for a machine that both
sides share. Prompts and prefills are not measured separately: the lines' constants include them. During a
load the worker counts as idle, so no decode step includes the pause. The first steps, and steps with an eval
or a checkpoint, are left out. The workload's notes say what one run cannot show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.base.safe_files import first_of
from asyncrl_cli.observe.lines import Line, spent_s
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.plan.compiling import compile_job
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan
from asyncrl_cli.profile.loaded import Layer, load, read_document
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.sharing import CRITIC, PROX, REF, REWARD, SCORERS
from asyncrl_cli.profile.toml_files import shipped_profiles
from asyncrl_cli.simulate.costs import LEARNING
from asyncrl_cli.simulate.observed import (
    Fit,
    decode_points,
    fit_line,
    lengths_of,
    old_logprob_s_per_token,
    reasons_against,
    scorer_s_per_token,
    train_points,
    turns_of,
    undisturbed,
)
from asyncrl_cli.simulate.workload import Decoding, Reference, Syncing, Training, Turns, Workload
from asyncrl_cli.simulate.world import virtual_cluster

LEAST_STEPS, ENOUGH_STEPS = 3, 8
"""Train steps without which there is no calibration; those from which its times are more than a rough
guess."""
COMMON_KEYS = {
    "trainer": ("ppo_mini_batch_size", "max_tokens_per_microbatch"),
    "rollout": ("workers", "slots", "n", "prefetch_groups", "max_prompt_tokens", "max_response_tokens"),
    "async_training": ("require_batches",),
    "placement": ("trainer_workers", "gpus", "ratio", "gpus_per_rollout_worker", "cpus_per_worker"),
}
"""Keys that the workload takes from the calibrated run for every profile. The schedule (K, eta, ...) remains
each profile's."""
TURN_KEYS = {
    "rollout": (*COMMON_KEYS["rollout"], "hold_slots"),
    "env": ("max_turns", "max_context_tokens", "tool_timeout_s", "episode_timeout_s"),
}
"""The same keys and more, if trajectories have several turns."""
OWN_KEYS = {
    "algorithm": ("old_logprobs",),
    "rollout": ("interrupt",),
    "async_training": (
        "trigger_parameter_sync_step",
        "staleness_threshold",
        "partial_rollout",
        "max_staleness",
        "on_stale",
        "max_requeues",
        "on_exhausted",
    ),
    "placement": ("colocate",),
}
"""Keys of a schedule. The run's reference row sets those in which it differs from the profile of that
name."""
PARTS = ("wait_data", "old_logprob", "train", "gather", "other")


def calibrate(run_directory: Path) -> Workload:
    """The workload of a run. Raises ConfigError if files are missing, or if too few of its train steps can be
    used."""
    try:
        return _calibrated(run_directory)
    except (ValueError, ArithmeticError) as error:
        what = first_of(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(
            f"{run_directory}: its figures cannot be those of a run: {what}", hint="use another run"
        ) from None


def _calibrated(run_directory: Path) -> Workload:
    profile, recorded = _profile(run_directory), Recorded(run_directory)
    everything, published, loaded = (
        list(found) for found in (recorded.metrics(), *map(recorded.events, ("published", "loaded")))
    )
    lines = undisturbed(everything)
    why = "".join([_left_out(everything), *(f"; {note}" for note in recorded.damage.notes)])
    _enough(lines, run_directory, f"of {len(everything)} train steps can be used{why}")
    job = compile_job(profile, virtual_cluster(profile))
    decoded, trained = decode_points(lines, job.role(ROLLOUT).workers), train_points(lines)
    _enough(decoded, run_directory, "train steps have decoding beside them")
    _enough(trained, run_directory, "train steps have trained tokens")
    decoding, training, syncing = (
        fit_line(decoded),
        fit_line(trained),
        _syncing(published, loaded, lines, profile),
    )
    apart = _of_scorers(lines, job)
    of_critic, learned_within = apart[CRITIC], CRITIC not in job.scorers
    # apart, the time includes learning
    values_s = of_critic and of_critic / (1 if learned_within else 1 + LEARNING)
    scored_s, turns = old_logprob_s_per_token(lines, training) or apart[PROX], turns_of(lines)
    return Workload(
        name=run_directory.name,
        purpose=f"Calibrated from the run {run_directory.name} ({profile.name}).",
        notes="\n".join([*_notes(lines, profile, decoding, training, scored_s), *recorded.damage.notes]),
        windows=24,
        profile=_common(profile, job.device, turns),
        profiles={},
        lengths=lengths_of(lines, profile),
        turns=turns,
        decoding=Decoding(
            step_s=max(decoding.constant, 1e-9),
            step_s_per_sequence=decoding.slope,
            interference_ratio=decoding.interference,
        ),
        training=Training(
            step_s=training.constant / profile.async_training.require_batches,
            s_per_token=max(
                0.0, training.slope - (LEARNING * values_s if values_s and learned_within else 0.0)
            ),
            old_logprob_s_per_token=scored_s or 0.0,
            ref_s_per_token=apart[REF],
            reward_s_per_token=apart[REWARD],
            critic_s_per_token=values_s,
            reference_gpus=job.role(TRAINER).workers,
            step_overhead_s=max(0.0, median(spent_s(line, "other") for line in lines)),
            interference_ratio=training.interference,
        ),
        syncing=syncing,
        references=(_reference(lines, profile, run_directory),),
    )


def _of_scorers(lines: Sequence[Line], job: JobPlan) -> dict[str, float | None]:
    """Seconds per token of each scorer, on the trainer's number of devices."""
    ranks = job.role(TRAINER).workers
    found = {task: scorer_s_per_token(lines, task) for task in SCORERS}
    return {task: s and s * job.scorers.get(task, ranks) / ranks for task, s in found.items()}


def _enough(found: Sequence[Any], run_directory: Path, what: str) -> None:
    if len(found) < LEAST_STEPS:
        raise ConfigError(
            f"{run_directory}: {len(found)} {what}; a calibration needs {LEAST_STEPS}",
            hint="a longer run, with --set eval.every_versions=0 --set checkpoint.every_steps=0",
        )


def _left_out(lines: Sequence[Line]) -> str:
    """` (4 warm-up, 1 the last, 2 beside an eval)`."""
    reasons = Counter(filter(None, reasons_against(lines)))
    return f" ({', '.join(f'{times} {reason}' for reason, times in reasons.items())})" if reasons else ""


def _notes(
    lines: Sequence[Line], profile: Profile, decode_fit: Fit, train_fit: Fit, scored_s: float | None
) -> list[str]:
    """Notes on what the figures are based on, and what one run cannot show."""
    notes = [
        f"From {len(lines)} train steps of one run, lengths as observed (at its own stage of learning).",
        "One run does not show: scaling with devices (taken as scaling_exponent 1, nothing fixed); how alike "
        "the responses to one "
        "prompt are (prompt_variance_ratio 0); the latency of rewards (0: waits for them are not predicted); "
        "prompts and "
        "prefills (included in the constants, prompt_tokens 0: a recompute-kv load costs nothing extra); how "
        "workers differ "
        "(speed_spread 0).",
    ]
    if len(lines) < ENOUGH_STEPS:
        notes.insert(
            0,
            f"ROUGH: only {len(lines)} train steps could be used; {ENOUGH_STEPS} or more make "
            "the times reliable.",
        )
    if turns_of(lines) is not None:
        notes.append(
            "A run records only means of turns and tools: all trajectories have the same number of turns "
            "here, all tools take "
            "the same time, and the tokens of their results are included in the constants of decoding and "
            "training."
        )
    if scored_s is None:
        notes.append(
            "The run had no old-logprob passes, so their cost is unknown and they are free here "
            "(old_logprob_s_per_token 0)."
        )
    sides = [
        name
        for name, fit in (("generation", decode_fit), ("training", train_fit))
        if not fit.tells_interference
    ]
    if sides:
        notes.append(
            f"How much the other side slows {' and '.join(sides)} is also unknown (it ran at the same time "
            "always, or never): "
            "interference_ratio 0; any slowdown is included in the times."
        )
    if profile.placement.colocate:
        notes.append("The run was colocated: with another placement, transfers may take longer.")
    return notes


def _profile(run_directory: Path) -> Profile:
    try:
        return read_document(run_directory / "config.resolved.json").profile
    except RefusedError as error:
        raise ConfigError(error.message, hint="give the directory of a run, such as runs/NAME") from None


def _values(profile: Profile, keys: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """The profile's values of `keys` that are not None, by section and name."""
    return {
        section: {
            name: value for name in names if (value := getattr(getattr(profile, section), name)) is not None
        }
        for section, names in keys.items()
    }


def _common(profile: Profile, device: str, turns: Turns | None) -> dict[str, Any]:
    """The profile keys that size the work, without `placement.colocate`, which each profile sets itself."""
    tables = _values(profile, COMMON_KEYS | (TURN_KEYS if turns is not None else {}))
    return tables | {"placement": tables["placement"] | {"device": device}}


def _syncing(
    published: Sequence[Line], loaded: Sequence[Line], lines: Sequence[Line], profile: Profile
) -> Syncing:
    """Medians over the run's syncs. If the run had none, a sync costs nothing."""
    published = [event for event in published if {"num_bytes", "publish_s"} <= event.keys()]
    loaded = [event for event in loaded if {"send_s", "load_s", "pause_s"} <= event.keys()]
    num_bytes = max(1.0, float(published[-1]["num_bytes"])) if published else 1.0
    gather_s, publish_s = _median(lines, "sync/gather_s"), _median(published, "publish_s")
    send_s, load_s, pause_s = (_median(loaded, key) for key in ("send_s", "load_s", "pause_s"))
    # Without a second buffer, the pauses include the sends.
    within_pause_s = load_s if profile.weights.dual_buffer else load_s + send_s
    return Syncing(
        parameter_bytes=num_bytes,
        gather_bytes_per_s=num_bytes / max(gather_s, 1e-6),
        send_bytes_per_s=num_bytes / max(publish_s + send_s, 1e-6),
        load_bytes_per_s=num_bytes / max(load_s, 1e-6),
        pause_s=max(0.0, pause_s - within_pause_s),
        colocated_s=gather_s + publish_s + send_s + load_s,
    )


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """The median over rows that have `key`; 0 if none has."""
    return float(median([row[key] for row in rows if key in row] or [0.0]))


def _reference(lines: Sequence[Line], profile: Profile, run_directory: Path) -> Reference:
    """The run itself as a measured row: a simulation of the workload should reproduce it."""
    per_window = profile.async_training.trigger_parameter_sync_step / len(lines)
    name = (
        profile.name
        if profile.name in shipped_profiles()
        else str((run_directory / "profile.toml").resolve())
    )
    return Reference(
        profile=name,
        set=_differing(profile, name),
        window_time_s=sum(spent_s(line, "step") for line in lines) * per_window,
        parts_s={part: sum(spent_s(line, part) for line in lines) * per_window for part in PARTS},
        source="the calibrated run",
    )


def _differing(profile: Profile, reference: str) -> dict[str, Any]:
    """The run's values of `OWN_KEYS` that differ from the profile called `reference`."""
    plain = load(
        reference, environ={}, layers=[Layer(origin="calibration", values={"run.train_steps": 1})]
    ).profile
    tables, others = _values(profile, OWN_KEYS), _values(plain, OWN_KEYS)
    own = {
        section: {name: value for name, value in table.items() if value != others[section].get(name)}
        for section, table in tables.items()
    }
    return {section: table for section, table in own.items() if table}
