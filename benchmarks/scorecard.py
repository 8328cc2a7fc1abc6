"""Holds the simulator against published rows: which were fitted, which are predicted, how far off each is,
and whether it lies inside its 90% interval.

    python -m benchmarks.scorecard [WORKLOAD ...]           # the table
    python -m benchmarks.scorecard --fit WORKLOAD ...       # fits the unknowns, writes them into the files

A workload file names its unknowns with priors, and the rows on which they are fitted (`calibrated`); that
choice is part of the file and was made before any other row was simulated. The fit maximizes the posterior:
Gauss and Newton's steps on the logarithms of the unknowns, with derivatives of a closed form (`closed_form`),
whose values are corrected by simulations of the fitted rows. Errors of rows have the file's `noise_ratio`;
those of a row's parts, as much in seconds (at least a tenth of the part).

    posterior  normal in the logarithms: precision = J' W J + prior precision
    interval   exp(+- 1.645 s), s^2 = j' covariance j + noise_ratio^2 + spread between seeds^2, for the
               derivatives j of the row's own time

So the interval has what the fit leaves open, lengths drawn anew, and what two runs of one setting differ by.
What the model itself gets wrong is added to s^2, as large as it takes for 90% of the predicted rows of other
publishers to lie inside their own intervals (split conformal prediction: Lei et al., JASA 2018). A row never
widens its own interval.

Rows are simulated whole. `--miniature` divides GPUs and prompts per mini-batch by the same number, so that
each GPU has the same work. That is faster, but a window then has fewer long responses to wait for.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import re
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import shipped_workloads
from asyncrl_cli.simulate.costs import imbalance
from asyncrl_cli.simulate.responses import ResponseLengths
from asyncrl_cli.simulate.workload import Reference, Workload
from asyncrl_cli.simulate.workload_files import (
    WINDOW,
    load_workload,
    miniature,
    profile_for,
    reference_sets,
    window_parts,
)
from asyncrl_cli.simulate.world import simulate, virtual_cluster

WINDOWS = 2
STEP = 0.1
"""Of a logarithm, for a derivative."""
SEEDS = (0,)
SEED_VARIANCE = 0.02**2
"""Of the logarithm of a row's time between draws of its lengths."""
DRAWS = 24
DAMPING = 0.6
NINETY = 1.645
STALENESS = "staleness"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published figure: a window's seconds or a mean staleness."""

    workload: str
    reference: Reference
    figure: str
    published: float
    predicted: float
    spread: float

    @property
    def interval(self) -> tuple[float, float]:
        return self.predicted * math.exp(-NINETY * self.spread), self.predicted * math.exp(
            NINETY * self.spread
        )

    @property
    def is_inside(self) -> bool:
        low, high = self.interval
        return low <= self.published <= high

    @property
    def is_fitted(self) -> bool:
        return self.reference.calibrated and self.figure == WINDOW

    @property
    def publisher(self) -> str:
        return self.workload.partition("-")[0]

    @property
    def deviation(self) -> float:
        """How much wider than `spread` the row's own would have to be, to just reach the published figure."""
        needed = abs(math.log(self.predicted / self.published)) / NINETY
        return math.sqrt(max(0.0, needed**2 - self.spread**2))

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def row_profile(workload: Workload, reference: Reference, *, is_whole: bool) -> tuple[Profile, int]:
    """The row's profile, in miniature unless `is_whole`, and how many times larger the whole is."""
    whole = profile_for(workload, reference.profile, reference_sets(reference), environ={}).profile
    return (whole, 1) if is_whole else miniature(workload, whole)


def figures(job: tuple[Workload, Profile, int, int]) -> dict[str, float]:
    """The row's simulated parts per window, and its mean staleness."""
    workload, profile, scale, seed = job
    groups = (WINDOWS + 2) * Schedule.of(profile).window_groups
    run = simulate(profile, workload, seed=seed, groups=groups, scale=scale)
    if run.error is not None:
        raise run.error
    last = run.lines[-1]["window"]
    stale = [
        line["staleness/mean"] for line in run.lines if 0 < line["window"] < last and "staleness/mean" in line
    ]
    return window_parts(run) | ({STALENESS: statistics.fmean(stale)} if stale else {})


def shifted(workload: Workload, shifts: Sequence[float]) -> Workload:
    """The workload with the logarithms of its unknowns moved."""
    keys = [one.key for one in workload.unknowns]
    return workload.scaled({key: math.exp(shift) for key, shift in zip(keys, shifts, strict=True)})


def published(workload: Workload, reference: Reference) -> dict[str, tuple[float, float]]:
    """A row's figures that are fitted: value, and standard deviation of the logarithm."""
    total, noise = reference.window_time_s, max(workload.noise_ratio, 0.01)
    parts = {part: float(value) for part, value in reference.parts_s.items()}
    return {WINDOW: (total, noise)} | {
        part: (value, max(0.1, noise * total / value)) for part, value in parts.items()
    }


def closed_form(workload: Workload, profile: Profile, scale: int) -> dict[str, float]:
    """A row's parts without the loop, for its derivatives: the batch decoded on each worker without arrivals
    or a full cache, the trainer's formulas, and their sum (in turns) or their larger one (apart)."""
    plan, schedule = compile_job(profile, virtual_cluster(profile)), Schedule.of(profile)
    work, rollout = workload.on(profile.placement), profile.rollout
    lengths, rng = ResponseLengths(work.lengths, rollout.max_response_tokens), random.Random(0)
    drawn = [tokens for _ in range(schedule.window_groups) for tokens in lengths(rng, rollout.n)]
    tokens = sum(drawn) + len(drawn) * work.lengths.prompt_tokens
    training, mini_batches = work.training, schedule.window_groups // profile.trainer.ppo_mini_batch_size

    def share(exponent: float, devices: int) -> float:
        return float((devices / training.reference_gpus) ** -exponent)

    ranks = plan.trainer_workers
    uneven = 1.0
    if training.gpus_per_rank is not None:
        sequences = [one + work.lengths.prompt_tokens for one in drawn]
        each = scale * len(drawn) / mini_batches
        uneven = imbalance(sequences, each, max(1, scale * ranks // training.gpus_per_rank))
    shared_s = mini_batches * training.step_s + tokens * uneven * training.s_per_token
    parts = {
        "train": mini_batches * training.fixed_step_s
        + shared_s * share(training.scaling_exponent, ranks)
        + profile.placement.colocate * training.colocated_s
    }
    scored = mini_batches - 1 if profile.algorithm.old_logprobs == "recompute" else 0
    each_s = tokens / mini_batches * training.old_logprob_s_per_token
    parts["old_logprob"] = scored * (
        training.old_logprob_fixed_step_s + each_s * share(training.old_logprob_scaling_exponent, ranks)
    )
    ref_s = 0.0
    if profile.algorithm.has_reference:
        each_s = training.ref_s_per_token or training.s_per_token / 3
        devices = plan.scorers.get("ref", ranks)
        ref_s = tokens * each_s * share(training.old_logprob_scaling_exponent, devices)
    parts["ref"] = 0.0 if "ref" in plan.scorers else ref_s
    eta, workers = float(profile.async_training.staleness_threshold), plan.rollout_workers
    if profile.placement.colocate:
        workers //= work.worker_gpus(profile.placement)
    if eta and profile.async_training.partial_rollout:
        batch = min(rollout.slots, (1 + eta) * len(drawn) / workers)
        step_s = work.decoding.batch_step_s(batch) + work.decoding.step_s_per_context_token * batch * (
            work.lengths.prompt_tokens + sum(x * x for x in drawn) / sum(drawn) / 2
        )
        made_s = sum(drawn) / workers / batch * step_s
    else:
        made_s = max(batch_s(drawn[first::workers], work, rollout.slots) for first in range(workers))
    parts["wait_data"] = made_s
    overhead_s = schedule.window_steps * training.step_overhead_s
    trained_s = parts["train"] + parts["old_logprob"] + parts["ref"] + overhead_s
    if profile.placement.colocate:
        return parts | {WINDOW: made_s + trained_s + work.syncing.colocated_s}
    gather_s = work.syncing.parameter_bytes / work.syncing.gather_bytes_per_s
    if not eta and schedule.window_steps == 1:
        return parts | {WINDOW: made_s + trained_s + gather_s}
    sides = (made_s, trained_s + gather_s, ref_s if "ref" in plan.scorers else 0.0)
    return parts | {WINDOW: sum(side**8 for side in sides) ** (1 / 8)}


def batch_s(lengths: Sequence[int], work: Workload, slots: int) -> float:
    """Seconds in which one worker decodes a batch, as its slots become free."""
    decoding, prompt = work.decoding, work.lengths.prompt_tokens
    waiting, ends = list(reversed(lengths)), list[float]()
    steps = seconds = context = 0.0
    while waiting or ends:
        while waiting and len(ends) < slots:
            heapq.heappush(ends, steps + waiting.pop())
            context += prompt
        end, running = heapq.heappop(ends), len(ends) + 1
        passed, each_s = end - steps, decoding.step_s_per_context_token
        seconds += passed * (decoding.batch_step_s(running) + each_s * (context + running * passed / 2))
        context = (context + running * passed) * (1 - 1 / running)  # the one that ends had a mean context
        steps = end
    return seconds


def derivatives(
    workload: Workload, profile: Profile, scale: int
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """A row's closed form, and with each unknown moved by `STEP`."""
    size = len(workload.unknowns)
    moves = [[STEP * (i == j) for j in range(size)] for i in range(size)]
    moved = [closed_form(shifted(workload, move), profile, scale) for move in moves]
    return closed_form(workload, profile, scale), moved


def slopes(at: dict[str, float], moved: Sequence[dict[str, float]], figure: str) -> list[float]:
    return [math.log(max(one[figure], 1e-9) / max(at[figure], 1e-9)) / STEP for one in moved]


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Of the unknowns' logarithms: how far the best values are from the file's, and their covariance."""

    shift: np.ndarray
    covariance: np.ndarray


Biases = dict[tuple[int, str], float]
"""The logarithm of what the loop makes of a row's figure, over its closed form, by the row's place and the
figure."""


def biases(pool: ProcessPoolExecutor, workload: Workload) -> Biases:
    """Those of the fitted rows, from one simulation of each."""
    rows = [row for row in workload.references if row.calibrated]
    profiles = [row_profile(workload, row, is_whole=True) for row in rows]
    simulated = pool.map(figures, [(workload, *profile, 0) for profile in profiles])
    found = {}
    for place, (row, profile, made) in enumerate(zip(rows, profiles, simulated, strict=True)):
        closed = closed_form(workload, *profile)
        for figure in published(workload, row):
            found[place, figure] = math.log(max(made[figure], 1e-9) / max(closed[figure], 1e-9))
    return found


def posterior(workload: Workload, bias: Biases) -> Posterior:
    """One step of Gauss and Newton from the file's values."""
    rows = [row for row in workload.references if row.calibrated]
    matrix, residuals, weights = [], [], []
    for place, row in enumerate(rows):
        now, others = derivatives(workload, *row_profile(workload, row, is_whole=True))
        for figure, (value, deviation) in published(workload, row).items():
            matrix.append(slopes(now, others, figure))
            residuals.append(math.log(value / max(now[figure], 1e-9)) - bias[place, figure])
            weights.append(deviation**-2)
    values = [getattr(getattr(workload, key.split(".")[0]), key.split(".")[1]) for key in keys_of(workload)]
    prior = np.diag([one.prior[1] ** -2 for one in workload.unknowns])
    from_prior = np.array(
        [math.log(one.prior[0] / v) for one, v in zip(workload.unknowns, values, strict=True)]
    )
    j, w = np.array(matrix), np.diag(weights)
    precision = j.T @ w @ j + prior
    covariance = np.linalg.inv(precision)
    shift = covariance @ (j.T @ w @ np.array(residuals) + prior @ from_prior)
    return Posterior(shift=shift, covariance=covariance)


def keys_of(workload: Workload) -> list[str]:
    return [one.key for one in workload.unknowns]


def fit(pool: ProcessPoolExecutor, name: str, steps: int) -> None:
    """Fit the unknowns and write them, with draws from the posterior, into the workload's file."""
    path, workload = shipped_workloads()[name], load_workload(name)
    for step in range(steps):
        if step in (0, steps // 2):
            bias = biases(pool, workload)
        found = posterior(workload, bias)
        workload = shifted(workload, DAMPING * np.clip(found.shift, -0.7, 0.7))
        print(
            name,
            {key: f"{shift:+.2f}" for key, shift in zip(keys_of(workload), found.shift, strict=True)},
            flush=True,
        )
    rng = np.random.default_rng(0)
    draws = np.exp(rng.multivariate_normal(np.zeros(len(found.shift)), found.covariance, DRAWS))
    text = path.read_text()
    for key, factors in zip(keys_of(workload), draws.T, strict=True):
        section, field = key.split(".")
        value = getattr(getattr(workload, section), field)
        text = re.sub(rf"(?ms)(^\[{section}\].*?^{field} = )[^\s#]+", rf"\g<1>{value:.4g}", text, count=1)
        listed = ", ".join(f"{factor:.3f}" for factor in factors)
        entry = rf'(key = "{re.escape(key)}"\nprior = [^\n]+\n)(factors = [^\n]+\n)?'
        text = re.sub(entry, rf"\g<1>factors = [{listed}]\n", text, count=1)
    path.write_text(text)


def scored(pool: ProcessPoolExecutor, name: str, *, is_whole: bool) -> list[Row]:
    """Every row of a workload."""
    workload = load_workload(name)
    profiles = [row_profile(workload, row, is_whole=is_whole) for row in workload.references]
    covariance = None
    if workload.unknowns:
        drawn = np.log(np.array([one.factors for one in workload.unknowns]))
        covariance = np.cov(drawn) if len(drawn) > 1 else np.var(drawn, keepdims=True)
    jobs = [(workload, *profile, seed) for profile in profiles for seed in SEEDS]
    simulated = list(pool.map(figures, jobs))
    rows = []
    for index, reference in enumerate(workload.references):
        runs = simulated[index * len(SEEDS) : (index + 1) * len(SEEDS)]
        wanted = {WINDOW: reference.window_time_s, STALENESS: reference.staleness_mean}
        for figure, value in wanted.items():
            if value is None:
                continue
            seeds = [math.log(max(run[figure], 1e-9)) for run in runs]
            variance = SEED_VARIANCE + workload.noise_ratio**2
            if covariance is not None and figure == WINDOW:
                j = np.array(slopes(*derivatives(workload, *profiles[index]), figure))
                variance += float(j @ covariance @ j)
            rows.append(
                Row(
                    workload=name,
                    reference=reference,
                    figure=figure,
                    published=value,
                    predicted=math.exp(statistics.fmean(seeds)),
                    spread=math.sqrt(variance),
                )
            )
    return rows


def with_model_error(rows: Sequence[Row]) -> list[Row]:
    """The rows with the model's own error in the intervals of those that are predicted."""
    widened = []
    for row in rows:
        found = sorted(
            other.deviation for other in rows if other.publisher != row.publisher and not other.is_fitted
        )
        if found and not row.is_fitted:
            place = min(len(found), math.ceil(0.9 * (len(found) + 1))) - 1
            row = replace(row, spread=math.hypot(row.spread, found[place]))
        widened.append(row)
    return widened


HEADING = f"{'workload':<32}{'row':<44}{'':<10}{'published':>10}{'SIMULATED':>10}{'error':>7}  90% interval"


def show(row: Row) -> None:
    low, high = row.interval
    kind, unit = "fitted" if row.is_fitted else "predicted", " s" if row.figure == WINDOW else " v"
    label = row.reference.source if row.figure == WINDOW else f"{row.reference.source}: staleness"
    print(
        f"{row.workload:<32}{label[:43]:<44}{kind:<10}{row.published:>8.4g}{unit}{row.predicted:>8.4g}{unit}"
        f"{row.error:>+7.0%}  {low:.4g} to {high:.4g}{'' if row.is_inside else '  MISS'}",
        flush=True,
    )


def summary(rows: Sequence[Row]) -> str:
    unseen = [row for row in rows if not row.is_fitted]
    if not unseen:
        return "no predicted rows"
    close, inside = ([abs(row.error) <= 0.1 for row in unseen], [row.is_inside for row in unseen])
    middle = statistics.median(abs(row.error) for row in unseen)
    return (
        f"{len(unseen)} predicted rows: {sum(close)} within 10% ({sum(close) / len(close):.0%}; goal 80%), "
        f"{sum(inside)} inside their 90% intervals ({sum(inside) / len(inside):.0%}; goal 90%), "
        f"median error {middle:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--fit", type=int, default=0, metavar="STEPS", help="steps of Gauss and Newton")
    parser.add_argument("--miniature", action="store_true", help="rows in miniature, not whole")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    known = [name for name in shipped_workloads() if load_workload(name).unknowns]
    with ProcessPoolExecutor(options.processes) as pool:
        rows: list[Row] = []
        for name in options.workloads or known:
            if options.fit:
                fit(pool, name, options.fit)
            else:
                rows += scored(pool, name, is_whole=not options.miniature)
                print(f"{name}: simulated", file=sys.stderr, flush=True)
    if not options.fit:
        print(HEADING)
        rows = with_model_error(rows)
        for row in rows:
            show(row)
        print(f"\n{summary(rows)}")


if __name__ == "__main__":
    main()
