"""Calibrates a workload (costs of a machine and a model) from a real run's metrics, events and profile.

    decode step     (mean batch) / (tokens/s while busy), against the mean batch            -> [decoding]
    train step      timing/train_s                    against trained tokens                -> [training]
    old logprobs    timing/old_logprob_s              per train/old_logprob_tokens
    scorers         their busy time                   per scored token
    sync            medians of `published` and `loaded`                                     -> [syncing]

Straight lines are fitted to the first two (`observations.py`), after counting how many processes shared how
many cores. Prompts and prefills are not measured separately: the lines' constants include them. During
a load the worker counts as idle, so no decode step includes the pause. The first steps, and steps with an
eval or a checkpoint, are left out. The workload's notes say what one run cannot show.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from asyncrl_cli.base.errors import ConfigError, RefusedError, counted
from asyncrl_cli.base.paths import as_typed
from asyncrl_cli.base.safe_files import first_problem
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.run_lines import Line, spent_s
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER
from asyncrl_cli.profile.arithmetic import (
    CRITIC,
    PROX,
    REF,
    REWARD,
    SCORERS,
    TEACHER,
    TRAIN,
    sends_rows,
    step_optimizer_steps,
)
from asyncrl_cli.profile.keys import values_of, with_values
from asyncrl_cli.profile.loaded import Layer, load
from asyncrl_cli.profile.resolved import read_document
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import Table, Values, shipped_profiles
from asyncrl_cli.simulate.costs import LEARNING
from asyncrl_cli.simulate.observations import (
    Fit,
    Sharing,
    decode_points,
    fit_line,
    lengths_of,
    old_logprob_s_per_token,
    reasons_against,
    scorer_s_per_token,
    train_points,
    turns_of,
)
from asyncrl_cli.simulate.workload import Decoding, Reference, Syncing, Training, Unknown, Workload
from asyncrl_cli.simulate.workload_files import ANY_STEPS
from asyncrl_cli.simulate.world import virtual_cluster

LEAST_STEPS, ENOUGH_STEPS = 3, 8
"""Train steps without which there is no calibration; those from which its times are more than a rough
guess."""
NUM_DRAWS = 24
COMMON_KEYS = (
    *("trainer.ppo_mini_batch_size", "trainer.ppo_epochs", "trainer.max_tokens_per_microbatch"),
    *("rollout.workers", "rollout.slots", "rollout.n", "rollout.prefetch_groups"),
    *("rollout.max_prompt_tokens", "rollout.max_response_tokens", "async_training.require_batches"),
    *("placement.trainer_workers", "placement.gpus", "placement.ratio"),
    *("placement.gpus_per_rollout_worker", "placement.cpus_per_worker"),
)
"""Keys that the workload takes from the calibrated run for every profile. The schedule (K, eta, ...) remains
each profile's."""
TURN_KEYS = (
    *("rollout.hold_slots", "env.max_turns", "env.max_context_tokens"),
    *("env.tool_timeout_s", "env.episode_timeout_s"),
)
"""More of them, if trajectories have several turns."""
SCHEDULE_KEYS = (
    *("algorithm.old_logprobs", "rollout.interrupt", "placement.colocate"),
    *("async_training.trigger_parameter_sync_step", "async_training.staleness_threshold"),
    *("async_training.target_kl", "async_training.partial_rollout", "async_training.max_staleness"),
    *("async_training.on_stale", "async_training.max_requeues", "async_training.on_exhausted"),
    *("async_training.mixed_versions", "placement.lend"),
)
"""Keys of a schedule. The run's reference row sets those in which it differs from the profile of that
name."""
PARTS = ("wait_data", "old_logprob", "train", "gather", "other")


def calibrate(run_directory: Path) -> Workload:
    """The workload of a run. Raises ConfigError if files are missing, or if too few of its train steps can be
    used."""
    try:
        return _calibrated(run_directory)
    except (ValueError, ArithmeticError) as error:
        what = first_problem(error) if isinstance(error, ValidationError) else str(error)
        why = f"{run_directory}: its figures cannot be those of a run: {what}"
        raise ConfigError(why, hint="use another run") from None


def _calibrated(run_directory: Path) -> Workload:
    try:
        profile = read_document(run_directory / "config.resolved.json").profile
    except RefusedError as error:
        raise ConfigError(error.message, hint="give the directory of a run, such as runs/NAME") from None
    recorded = Recorded(run_directory)
    if replayed := recorded.replay_of:
        why = f"{run_directory} is a replay, in which nothing was generated"
        raise ConfigError(why, hint=f"asyncrl tune {as_typed(Path(replayed))}")
    everything, published = list(recorded.metrics()), list(recorded.events("published"))
    loaded, status = list(recorded.events("loaded")), recorded.status
    # all files have been read: what is damaged is known
    damage, reasons = recorded.damage.notes, reasons_against(everything)
    lines = [line for line, reason in zip(everything, reasons, strict=True) if not reason]
    left_out = ", ".join(f"{times} {reason}" for reason, times in Counter(filter(None, reasons)).items())
    why = "".join([f" ({left_out})" if left_out else "", *(f"; {note}" for note in damage)])
    _check_enough(lines, run_directory, f"of {len(everything)} train steps can be used{why}")
    job = compile_job(profile, virtual_cluster(profile))
    profile = with_values(profile, {"placement.device": job.device})
    ranks = job.role(TRAINER).workers
    cores = status.cores if status is not None else None
    places = (cores or math.inf) / profile.placement.cpus_per_worker
    sharing = Sharing({ROLLOUT: job.role(ROLLOUT).workers, TRAIN: ranks, **job.scorers}, places)
    decoded, trained = decode_points(lines, sharing), train_points(lines, sharing)
    _check_enough(decoded, run_directory, "train steps have decoding beside them")
    _check_enough(trained, run_directory, "train steps have trained tokens")
    decoding, training, turns = fit_line(decoded), fit_line(trained), turns_of(lines)
    # seconds per token of each scorer, on the trainer's number of devices
    found = {task: scorer_s_per_token(lines, task, sharing) for task in SCORERS}
    scoring = {task: s and s * job.scorers.get(task, ranks) / ranks for task, s in found.items()}
    scored_s = old_logprob_s_per_token(lines, sharing) or scoring[PROX]
    epochs = profile.trainer.ppo_epochs
    values_s, train_s = scoring[CRITIC], training.slope / epochs
    if values_s and CRITIC in job.scorers:
        values_s /= 1 + LEARNING * epochs  # apart, its time includes learning
    elif values_s:
        train_s = max(0.0, train_s - LEARNING * values_s)  # in the trainer, the train step's does
    values = values_of(profile)
    keys = (*COMMON_KEYS, "placement.device", *(TURN_KEYS if turns else ()))
    return Workload(
        name=run_directory.name,
        purpose=f"Calibrated from the run {run_directory.name} ({profile.name}).",
        notes="\n".join([*_notes(lines, profile, decoding, scored_s, cores), *damage]),
        windows=24,
        profile=_tables({key: values[key] for key in keys}),
        profiles={},
        lengths=lengths_of(lines, profile),
        turns=turns,
        cores=cores,
        decoding=Decoding(
            step_s=max(decoding.constant, 1e-9),
            step_s_per_sequence=decoding.slope,
            tells_batch=decoding.tells_slope,
        ),
        training=Training(
            step_s=training.constant / step_optimizer_steps(profile),
            s_per_token=train_s,
            old_logprob_s_per_token=scored_s or 0.0,
            ref_s_per_token=scoring[REF],
            teacher_s_per_token=scoring[TEACHER],
            reward_s_per_token=scoring[REWARD],
            critic_s_per_token=values_s,
            reference_gpus=ranks,
            step_overhead_s=max(0.0, median(spent_s(line, "other") for line in lines)),
        ),
        syncing=_syncing(published, loaded, lines, profile),
        references=(_reference(lines, profile, run_directory),),
        unknowns=(
            *_unknowns(
                "decoding", {"step_s": decoding.constant, "step_s_per_sequence": decoding.slope}, decoding
            ),
            *_unknowns("training", {"step_s": training.constant, "s_per_token": train_s}, training),
        ),
    )


def _unknowns(section: str, times: Mapping[str, float], fit: Fit) -> list[Unknown]:
    """Draws of the times on a fitted line: its height is known to within its error. All times of a section
    have the same factor."""
    rng = random.Random(section)
    factors = tuple(math.exp(fit.error * rng.gauss(0.0, 1.0)) for _ in range(NUM_DRAWS))
    spread = max(fit.error, 1e-9)
    return [
        Unknown(key=f"{section}.{name}", prior=(seconds, spread), factors=factors)
        for name, seconds in times.items()
        if seconds > 0
    ]


def _check_enough(found: Sequence[object], run_directory: Path, what: str) -> None:
    """Raises ConfigError if there are fewer than `LEAST_STEPS`."""
    if len(found) < LEAST_STEPS:
        why = f"{run_directory}: {len(found)} {what}; a calibration needs {LEAST_STEPS}"
        hint = "a longer run, with --set eval.every_versions=0 --set checkpoint.every_steps=0"
        raise ConfigError(why, hint=hint)


def _notes(
    lines: Sequence[Line], profile: Profile, decode_fit: Fit, scored_s: float | None, cores: int | None
) -> list[str]:
    """Notes on what the figures are based on, and what one run cannot show."""
    notes = [
        f"From {len(lines)} train steps of one run, lengths as observed (at its own stage of learning).",
        "One run does not show: scaling with devices (taken as scaling_exponent 1, nothing fixed); how "
        "alike the responses to one prompt are (prompt_variance_ratio 0); the latency of rewards (0: waits "
        "for them are not predicted); prompts and prefills (included in the constants, prompt_tokens 0: a "
        "recompute-kv load costs nothing extra); how workers differ (speed_spread 0).",
    ]
    if len(lines) < ENOUGH_STEPS:
        rough = f"ROUGH: only {len(lines)} train steps could be used; {ENOUGH_STEPS} or more make the times "
        notes.insert(0, f"{rough}reliable.")
    if turns_of(lines) is not None:
        notes.append(
            "A run records only means of turns and tools: all trajectories have the same number of turns "
            "here, all tools take the same time, and the tokens of their results are included in the "
            "constants of decoding and training."
        )
    if scored_s is None:
        notes.append(
            "The run had no old-logprob passes, so their cost is unknown and they are free here "
            "(old_logprob_s_per_token 0)."
        )
    if not decode_fit.tells_slope:
        notes.append(
            "Its batch was always of about the same size (full slots, say), so the two costs of a decode "
            "step cannot be told apart, and what other slots would do is a guess."
        )
    if cores:
        notes.append(
            f"All its processes shared {counted(cores, 'core')}: while more compute at once, each gets an "
            "equal share. What Ray and other programs took is in the times."
        )
    elif profile.placement.device != "cuda":
        why = "How many cores its processes shared is unknown: how they slowed each other is in the times."
        notes.append(why)
    if profile.placement.colocate:
        notes.append("The run was colocated: with another placement, transfers may take longer.")
    return notes


def _tables(values: Values) -> Table:
    """By section and name; values that are None are left out."""
    tables: Table = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if value is not None:
            tables.setdefault(section, {})[name] = value
    return tables


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
        gathers_rows=sends_rows(profile) and not profile.lora.rank,
        send_bytes_per_s=num_bytes / max(publish_s + send_s, 1e-6),
        load_bytes_per_s=num_bytes / max(load_s, 1e-6),
        pause_s=max(0.0, pause_s - within_pause_s),
        colocated_s=gather_s + publish_s + send_s + load_s,
    )


def _median(rows: Sequence[Line], key: str) -> float:
    """The median over rows that have `key`; 0 if none has."""
    return float(median([row[key] for row in rows if key in row] or [0.0]))


def _reference(lines: Sequence[Line], profile: Profile, run_directory: Path) -> Reference:
    """The run itself as a measured row: a simulation of the workload should reproduce it."""
    per_window = profile.async_training.trigger_parameter_sync_step / len(lines)
    is_shipped = profile.name in shipped_profiles()
    name = profile.name if is_shipped else str((run_directory / "profile.toml").resolve())
    length = Layer(origin="calibration", values={"run.train_steps": ANY_STEPS})
    ours, others = values_of(profile), values_of(load(name, environ={}, layers=[length]).profile)
    return Reference(
        profile=name,
        set=_tables({key: ours[key] for key in SCHEDULE_KEYS if ours[key] != others[key]}),
        window_time_s=sum(spent_s(line, "step") for line in lines) * per_window,
        parts_s={part: sum(spent_s(line, part) for line in lines) * per_window for part in PARTS},
        source="the calibrated run",
    )
