"""A workload from a real run: what its metrics, events and profile say of the machine, in the units of a workload.

    decode step     its mean batch over tokens/s while busy, against that mean batch                     -> [decoding]
    train step      timing/train_s                    against trained tokens                             -> [training]
    old logprobs    timing/old_logprob_s              over train/old_logprob_tokens
    sync            medians of `published` and `loaded`                                                  -> [syncing]

The first two are lines (`simulate/fit.py`), with the interference of a machine that both sides share. Prompts and prefills are not
measured by themselves: they are in the constants. A load's pause is idle time of its worker, so no decode step contains it.
Steps with an eval or a checkpoint are left out, as are the first ones. What one run cannot tell stands in the notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from pydantic import ValidationError

from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.observe.lines import EventLine, Line, read_events, read_metrics, spent_s
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, compile_job
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.layers import Layer, load
from asyncrl_cli.profile.resolved import read_document
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.sources import shipped_profiles
from asyncrl_cli.safe_files import first_of
from asyncrl_cli.simulate.fit import Fit, fit_line
from asyncrl_cli.simulate.observed import decode_points, lengths_of, old_logprob_s_per_token, train_points, undisturbed
from asyncrl_cli.simulate.workload import Decoding, Reference, Syncing, Training, Workload
from asyncrl_cli.simulate.world import virtual_cluster

Found = TypeVar("Found")
LEAST_STEPS = 8
COMMON_KEYS = {
    "trainer": ("ppo_mini_batch_size", "max_tokens_per_microbatch"),
    "rollout": ("workers", "slots", "n", "prefetch_groups", "max_prompt_tokens", "max_response_tokens"),
    "async_training": ("require_batches",),
    "placement": ("trainer_workers", "gpus", "ratio", "gpus_per_rollout_worker", "cpus_per_worker"),
}
"""What every profile on this workload shares with the calibrated run; K and eta make the profiles."""
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
"""What makes the run's schedule its own: its row sets those in which it differs from the profile of that name."""
PARTS = ("wait_data", "old_logprob", "train", "gather", "other")


def calibrate(run_directory: Path) -> Workload:
    """Raises ConfigError if the run has too few undisturbed train steps that say something, or lacks its files."""
    try:
        return _calibrated(run_directory)
    except (ValueError, ArithmeticError) as error:
        what = first_of(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"{run_directory}: its figures cannot be those of a run: {what}", hint="take another run") from None


def _calibrated(run_directory: Path) -> Workload:
    profile = _profile(run_directory)
    everything = read_metrics(run_directory / "metrics.jsonl")
    lines = undisturbed(everything)
    _enough(lines, run_directory, f"of {len(everything)} train steps are whole and free of evals and checkpoints")
    job = compile_job(profile, virtual_cluster(profile))
    workers, ranks = job.role(ROLLOUT).workers, job.role(TRAINER).workers
    schedule = Schedule.of(profile)
    decoded = _enough(decode_points(lines, workers), run_directory, "train steps have decoding beside them")
    trained = _enough(train_points(lines), run_directory, "train steps have trained tokens")
    decode_fit, train_fit = fit_line(decoded), fit_line(trained)
    scored_s = old_logprob_s_per_token(lines, train_fit)
    return Workload(
        name=run_directory.name,
        purpose=f"Calibrated from the run {run_directory.name} ({profile.name}).",
        notes="\n".join(_notes(len(lines), profile, decode_fit, train_fit, scored_s)),
        windows=24,
        profile=_common(profile, job.device),
        profiles={},
        lengths=lengths_of(lines, profile),
        decoding=Decoding(
            step_s=max(decode_fit.constant, 1e-9),
            step_s_per_sequence=decode_fit.slope,
            interference_ratio=decode_fit.interference,
        ),
        training=Training(
            step_s=train_fit.constant / (schedule.step_groups // schedule.mini_batch_groups),
            s_per_token=train_fit.slope,
            old_logprob_s_per_token=scored_s or 0.0,
            reference_gpus=ranks,
            step_overhead_s=max(0.0, median(spent_s(line, "other") for line in lines)),
            interference_ratio=train_fit.interference,
        ),
        syncing=_syncing(read_events(run_directory / "events.jsonl"), lines, sends_in_pause=not profile.weights.dual_buffer),
        references=(_reference(lines, profile, schedule, run_directory),),
    )


def _enough(found: Sequence[Found], run_directory: Path, what: str) -> Sequence[Found]:
    if len(found) >= LEAST_STEPS:
        return found
    raise ConfigError(
        f"{run_directory}: {len(found)} {what}; a calibration needs {LEAST_STEPS}",
        hint="a longer run, with --set eval.every_versions=0 --set checkpoint.every_steps=0",
    )


def _notes(num_lines: int, profile: Profile, decode_fit: Fit, train_fit: Fit, scored_s: float | None) -> list[str]:
    """What the figures rest on, and what one run cannot tell."""
    notes = [
        f"From {num_lines} train steps of one run, lengths as observed (at its own stage of learning).",
        "One run does not tell: scaling with devices (taken as scaling_exponent 1, nothing fixed); how alike the responses to one "
        "prompt are (prompt_variance_ratio 0); the latency of rewards (0: waits for them are not in the prediction); prompts and "
        "prefills (in the constants, prompt_tokens 0: a recompute-kv load costs nothing more); how workers differ "
        "(speed_spread 0).",
    ]
    if scored_s is None:
        notes.append("Nor old-logprob passes: the run has none, they are free here (old_logprob_s_per_token 0).")
    sides = [name for name, fit in (("generation", decode_fit), ("training", train_fit)) if not fit.tells_interference]
    if sides:
        notes.append(
            f"Nor how much the other side slows {' and '.join(sides)} (which ran beside it always, or never): "
            "interference_ratio 0; what there was of it is in the times."
        )
    if profile.placement.colocate:
        notes.append("The run was colocated: another placement's transfers may take longer than its own.")
    return notes


def _profile(run_directory: Path) -> Profile:
    try:
        return read_document(run_directory / "config.resolved.json").profile
    except RefusedError as error:
        raise ConfigError(error.message, hint="give the directory of a run, as runs/NAME") from None


def _common(profile: Profile, device: str) -> dict[str, Any]:
    """The profile keys that size the work, as nested tables; a colocated run's own placement is its profile's affair."""
    tables: dict[str, Any] = {}
    for section, names in COMMON_KEYS.items():
        values = {name: getattr(getattr(profile, section), name) for name in names}
        tables[section] = {name: value for name, value in values.items() if value is not None}
    tables["placement"]["device"] = device
    return tables


def _syncing(events: Sequence[EventLine], lines: Sequence[Line], *, sends_in_pause: bool) -> Syncing:
    """Medians over the run's syncs; a run without any says nothing, and then a sync costs nothing.

    `sends_in_pause`: the run had no second buffer, so its pauses contain its sends.
    """
    published = [event for event in events if event["event"] == "published" and {"num_bytes", "publish_s"} <= event.keys()]
    loaded = [event for event in events if event["event"] == "loaded" and {"send_s", "load_s", "pause_s"} <= event.keys()]
    num_bytes = max(1.0, float(published[-1]["num_bytes"])) if published else 1.0
    gather_s = median([line["sync/gather_s"] for line in lines if "sync/gather_s" in line] or [0.0])
    publish_s = median([event["publish_s"] for event in published] or [0.0])
    send_s = median([event["send_s"] for event in loaded] or [0.0])
    load_s = median([event["load_s"] for event in loaded] or [0.0])
    pause_s = median([event["pause_s"] for event in loaded] or [0.0])
    return Syncing(
        parameter_bytes=num_bytes,
        gather_bytes_per_s=num_bytes / max(gather_s, 1e-6),
        send_bytes_per_s=num_bytes / max(publish_s + send_s, 1e-6),
        load_bytes_per_s=num_bytes / max(load_s, 1e-6),
        pause_s=max(0.0, pause_s - load_s - (send_s if sends_in_pause else 0.0)),
        colocated_s=gather_s + publish_s + send_s + load_s,
    )


def _reference(lines: Sequence[Line], profile: Profile, schedule: Schedule, run_directory: Path) -> Reference:
    """The run itself: what the simulation must give back."""
    per_window = schedule.window_steps / len(lines)
    name = profile.name if profile.name in shipped_profiles() else str((run_directory / "profile.toml").resolve())
    return Reference(
        profile=name,
        set=_differing(profile, name),
        window_time_s=sum(spent_s(line, "step") for line in lines) * per_window,
        parts_s={part: sum(spent_s(line, part) for line in lines) * per_window for part in PARTS},
        source="the calibrated run",
    )


def _differing(profile: Profile, reference: str) -> dict[str, Any]:
    """The run's own values of `OWN_KEYS`, where the profile of that name has others."""
    plain = load(reference, environ={}, layers=[Layer(origin="calibration", values={"run.train_steps": 1})]).profile
    tables: dict[str, Any] = {}
    for section, names in OWN_KEYS.items():
        own, others = getattr(profile, section), getattr(plain, section)
        values = {name: getattr(own, name) for name in names if getattr(own, name) not in (None, getattr(others, name))}
        if values:
            tables[section] = values
    return tables
