"""A workload from a real run: what its metrics, events and profile say of the machine, in the units of a workload.

    decode step     running / (tokens/s while busy)      = (step_s + step_s_per_sequence * running) * (1 + i * shared)
    train step      timing/train_s                       = (steps * step_s + tokens * s_per_token) * (1 + j * shared)

`shared` is the share of that side's busy time in which the other was busy too; i and j are the interference ratios of a machine
that both share. Each is a least-squares fit over the run's train steps, with coefficients that cannot be negative. Prompts and
prefills are not measured by themselves: they are in the constants. Steps with an eval or a checkpoint are left out, as are the
first ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.job.plan import ROLLOUT, TRAINER, compile_job
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.resolved import from_document
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.workload import Decoding, Lengths, Reference, Syncing, Training, Workload
from asyncrl_cli.simulate.world import virtual_cluster

WARMING_STEPS = 4
LEAST_STEPS = 8
LENGTHS_KEPT = 2000
LENGTHS_PER_STEP = 64
MAX_SIGMA = 4.0
MAX_INTERFERENCE = 2.0
COMMON_KEYS = {
    "trainer": ("ppo_mini_batch_size", "max_tokens_per_microbatch"),
    "rollout": ("workers", "slots", "n", "prefetch_groups", "max_prompt_tokens", "max_response_tokens"),
    "async_training": ("require_batches",),
    "placement": ("trainer_workers", "gpus", "ratio", "gpus_per_rollout_worker", "cpus_per_worker"),
}
"""What every profile on this workload shares with the calibrated run; K and eta make the profiles."""
PARTS = ("wait_data", "old_logprob", "train", "gather", "other")

NEEDED = (
    "trainer/idle_ratio",
    "rollouter/idle_ratio",
    "rollouter/slot_utilization",
    "rollouter/tokens_per_s",
    "response_tokens/mean",
    "response_tokens/median",
    "staleness/histogram",
)
"""Keys that a line has unless some executor did not report in time: then it says too little."""

Line = Mapping[str, Any]


def calibrate(run_directory: Path) -> Workload:
    """Raises ConfigError if the run has too few undisturbed train steps, or lacks its files."""
    profile = _profile(run_directory)
    everything = _json_lines(run_directory / "metrics.jsonl")
    lines = undisturbed(everything)
    if len(lines) < LEAST_STEPS:
        raise ConfigError(
            f"{run_directory}: {len(lines)} of {len(everything)} train steps are free of evals and checkpoints; "
            f"a calibration needs {LEAST_STEPS}",
            hint="a longer run, with --set eval.every_versions=0 --set checkpoint.every_steps=0",
        )
    job = compile_job(profile, virtual_cluster(profile))
    workers, ranks = job.role(ROLLOUT).workers, job.role(TRAINER).workers
    schedule = Schedule.of(profile)
    return Workload(
        name=run_directory.name,
        purpose=f"Calibrated from the run {run_directory.name} ({profile.name}).",
        notes=f"From {len(lines)} train steps of one run. Lengths as observed; prompts and prefills are part of the constants.",
        windows=24,
        profile=_common(profile, job.device),
        profiles={},
        lengths=_lengths(lines, profile),
        decoding=_decoding(lines, workers, profile.rollout.slots),
        training=_training(lines, ranks, schedule),
        syncing=_syncing(_json_lines(run_directory / "events.jsonl"), lines),
        references=(_reference(lines, profile, schedule),),
    )


def undisturbed(lines: Sequence[Line]) -> list[Line]:
    """Train steps beside which nothing else was done, from the fifth one on and without the last."""
    return [line for line in lines[WARMING_STEPS:-1] if _is_whole(line)]


def _is_whole(line: Line) -> bool:
    beside_s = _spent(line, "eval") + _spent(line, "checkpoint")
    return beside_s < 0.02 * _spent(line, "step") and all(key in line for key in NEEDED)


def _spent(line: Line, part: str) -> float:
    return float(line.get(f"timing/{part}_s", 0.0))


def _profile(run_directory: Path) -> Profile:
    path = run_directory / "config.resolved.json"
    try:
        return from_document(json.loads(path.read_text(encoding="utf-8")), where=str(path)).profile
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="give the directory of a run, as runs/NAME") from None


def _json_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="give the directory of a run, as runs/NAME") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}", hint="a half-written last line can be deleted") from None


def _common(profile: Profile, device: str) -> dict[str, Any]:
    """The profile keys that size the work, as nested tables; a colocated run's own placement is its profile's affair."""
    tables: dict[str, Any] = {}
    for section, names in COMMON_KEYS.items():
        values = {name: getattr(getattr(profile, section), name) for name in names}
        tables[section] = {name: value for name, value in values.items() if value is not None}
    tables["placement"]["device"] = device
    return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """seconds = (constant + slope * amount) * (1 + interference * shared); `error` is the mean squared relative one."""

    constant: float
    slope: float
    interference: float
    error: float


def fit_line(amounts: Sequence[float], seconds: Sequence[float], shared: Sequence[float]) -> Fit:
    """Least squares of relative errors, so that slow steps (a disturbed machine) do not rule; all coefficients >= 0."""
    grid = [MAX_INTERFERENCE * step / 200 for step in range(201)] if max(shared) - min(shared) > 0.05 else [0.0]
    return min((_fit_with(amounts, seconds, shared, ratio) for ratio in grid), key=lambda fit: fit.error)


def _fit_with(amounts: Sequence[float], seconds: Sequence[float], shared: Sequence[float], ratio: float) -> Fit:
    """With the interference given: two normal equations in (1, amount) / seconds, and their edges where one is 0."""
    ones = [(1 + ratio * share) / second for share, second in zip(shared, seconds, strict=True)]
    slopes = [one * amount for one, amount in zip(ones, amounts, strict=True)]
    a, b, c = _dot(ones, ones), _dot(ones, slopes), _dot(slopes, slopes)
    p, q = sum(ones), sum(slopes)
    determinant = a * c - b * b
    pairs = [(p / a, 0.0), (0.0, q / c if c else 0.0)]
    if determinant > 1e-12 * a * c:
        pairs.append(((p * c - q * b) / determinant, (q * a - p * b) / determinant))
    allowed = [(constant, slope) for constant, slope in pairs if constant >= 0 and slope >= 0]

    def error(pair: tuple[float, float]) -> float:
        predicted = (pair[0] * one + pair[1] * slope for one, slope in zip(ones, slopes, strict=True))
        return sum((value - 1) ** 2 for value in predicted) / len(ones)

    constant, slope = min(allowed, key=error)
    return Fit(constant=constant, slope=slope, interference=ratio, error=error((constant, slope)))


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))


def _busy(line: Line) -> tuple[float, float, float]:
    """Shares of the step's time: trainer busy, rollout busy, both."""
    trainer, rollout = 1 - line["trainer/idle_ratio"], 1 - line["rollouter/idle_ratio"]
    return trainer, rollout, line.get("overlap_ratio", 0.0) * min(trainer, rollout)


def _decoding(lines: Sequence[Line], workers: int, slots: int) -> Decoding:
    running, step_s, shared = list[float](), list[float](), list[float]()
    for line in lines:
        _, busy, both = _busy(line)
        if busy < 0.05 or not line["rollouter/tokens_per_s"]:
            continue
        sequences = line["rollouter/slot_utilization"] * slots / busy
        running.append(sequences)
        step_s.append(sequences * workers * busy / line["rollouter/tokens_per_s"])
        shared.append(both / busy)
    fit = fit_line(running, step_s, shared)
    return Decoding(step_s=max(fit.constant, 1e-9), step_s_per_sequence=fit.slope, interference_ratio=fit.interference)


def _training(lines: Sequence[Line], ranks: int, schedule: Schedule) -> Training:
    """`shared` of the train call itself: the trainer is busy in it alone."""
    tokens = [_response_tokens(lines, index) for index in range(len(lines))]
    shared = [both / trainer if trainer > 0 else 0.0 for trainer, _, both in map(_busy, lines)]
    fit = fit_line(tokens, [_spent(line, "train") for line in lines], shared)
    old_s = sum(_spent(line, "old_logprob") for line in lines)
    per_step = schedule.step_groups // schedule.mini_batch_groups
    return Training(
        step_s=fit.constant / per_step,
        s_per_token=fit.slope,
        old_logprob_s_per_token=old_s / sum(tokens)
        if old_s > 0.01 * sum(_spent(line, "train") for line in lines)
        else fit.slope / 3,
        reference_gpus=ranks,
        step_overhead_s=median(_spent(line, "other") for line in lines),
        interference_ratio=fit.interference,
    )


def _response_tokens(lines: Sequence[Line], index: int) -> float:
    """Trained by that step: mean length times trajectories (the histogram of staleness counts them all)."""
    line = lines[index]
    return float(line["response_tokens/mean"] * sum(line["staleness/histogram"]))


def _lengths(lines: Sequence[Line], profile: Profile) -> Lengths:
    """Observed lengths: each step's quantiles if the run logged them, else those of a lognormal with its mean and median."""
    cap = profile.rollout.max_response_tokens
    drawn = [tokens for line in lines for tokens in _step_lengths(line, cap)]
    drawn.sort()
    kept = min(LENGTHS_KEPT, len(drawn))
    picked = [drawn[int((index + 0.5) / kept * len(drawn))] for index in range(kept)]
    return Lengths(prompt_tokens=0, distribution="list", response_tokens=tuple(picked))


def _step_lengths(line: Line, cap: int) -> list[int]:
    shares = [(index + 0.5) / LENGTHS_PER_STEP for index in range(LENGTHS_PER_STEP)]
    if "response_tokens/quantiles" in line:
        quantile = _interpolated(line["response_tokens/quantiles"])
        return [max(1, min(round(quantile(share)), cap)) for share in shares]
    return _lognormal(line["response_tokens/median"], line["response_tokens/mean"], min(cap, line["response_tokens/max"]), shares)


def _interpolated(values: Sequence[float]) -> Callable[[float], float]:
    def quantile(share: float) -> float:
        place = share * (len(values) - 1)
        below = min(int(place), len(values) - 2)
        return values[below] + (place - below) * (values[below + 1] - values[below])

    return quantile


def _lognormal(middle: float, mean: float, longest: int, shares: Sequence[float]) -> list[int]:
    """Quantiles of the lognormal of that median which, cut at `longest`, have the observed mean (by bisection on sigma)."""
    normals = [NormalDist().inv_cdf(share) for share in shares]

    def lengths(sigma: float) -> list[int]:
        return [max(1, round(min(middle * math.exp(sigma * normal), longest))) for normal in normals]

    low, high = 0.0, MAX_SIGMA
    for _ in range(30):
        sigma = (low + high) / 2
        is_short = sum(lengths(sigma)) < mean * len(shares)
        low, high = (sigma, high) if is_short else (low, sigma)
    return lengths(low)


def _syncing(events: Sequence[Mapping[str, Any]], lines: Sequence[Line]) -> Syncing:
    """Medians over the run's syncs; a run without any says nothing, and then a sync costs nothing."""
    published = [event for event in events if event["event"] == "published"]
    loaded = [event for event in events if event["event"] == "loaded"]
    num_bytes = float(published[-1]["num_bytes"]) if published else 1.0
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
        pause_s=max(0.0, pause_s - load_s),
        colocated_s=gather_s + publish_s + send_s + load_s,
    )


def _reference(lines: Sequence[Line], profile: Profile, schedule: Schedule) -> Reference:
    """The run itself: what the simulation must give back."""
    per_window = schedule.window_steps / len(lines)
    return Reference(
        profile=profile.name,
        set={"async_training": _schedule_keys(profile)},
        window_time_s=sum(_spent(line, "step") for line in lines) * per_window,
        parts_s={part: sum(_spent(line, part) for line in lines) * per_window for part in PARTS},
        source="the calibrated run",
    )


def _schedule_keys(profile: Profile) -> dict[str, Any]:
    training = profile.async_training
    return {
        "trigger_parameter_sync_step": training.trigger_parameter_sync_step,
        "staleness_threshold": training.staleness_threshold,
    }
