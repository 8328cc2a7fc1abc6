"""Fits profiles/workloads/verl-7b-math-128.toml to its four published rows, and prints every parameter and
all residuals.

    python benchmarks/calibrate_published.py [--evaluations 20] [--windows 5] [--processes 2]

Four parameters are fitted, by Nelder-Mead on simulated runs of all rows at once, starting from the file's
values: median and sigma of the response lengths, how alike the responses to one prompt are, and the effective
memory bandwidth of decoding. It stops after `--evaluations`, so the result is the best point found, not a
proven optimum. Other parameters are derived from these four and the rows (`derived`), and the rest is
assumed:

    decode step             weight bytes / bandwidth + LAUNCH_S
    ... per sequence        KV bytes of the mean running context / bandwidth + its FLOP
    update, per token       6 FLOP per parameter at the assumed TRAIN_FLOP_PER_S
    update, fixed           least squares over the four published updates, given the time per token
    old logprobs            the two published passes, exactly, if tokens allow it
    overhead, lease         the published rest of the asynchronous rows, then of the colocated ones

The published rows and the sizes of the work are read from the workload file. Nothing is fitted to rows with
`calibrated = false`: they are predictions, which `--predict` also shows. No parameter depends on a profile.
The objective is the sum of squared errors of totals (by ROW_WEIGHTS) and parts (weight 1), each relative to
its row's total.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist, fmean

from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import TRAINER
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.simulate.responses import ResponseLengths
from asyncrl_cli.simulate.workload import Lengths, Workload
from asyncrl_cli.simulate.workload_files import (
    WINDOW,
    Residual,
    load_workload,
    profile_for,
    reference_sets,
    residuals,
)
from asyncrl_cli.simulate.world import virtual_cluster

WORKLOAD = "verl-7b-math-128"
ROW_WEIGHTS = {
    "colocate": 24.0,
    "colocate placement.gpus=64": 4.0,
    "partial-rollout": 24.0,
    "partial-rollout async_training.staleness_threshold=0.1": 24.0,
}
"""Of a row's total. Those that a comparison of 128 GPUs rests on come first; the one of 64 contradicts them
in its generation."""

PARAMETERS, WEIGHT_BYTES, KV_BYTES_PER_TOKEN = 7.6e9, 15.2e9, 57_344
DECODE_FLOP_PER_S, TRAIN_FLOP_PER_S, LAUNCH_S = 495e12, 445e12, 1e-3

FITTED, DERIVED, ASSUMED = "fitted", "derived", "assumed"
MARKS = {
    "lengths": {"median_tokens": FITTED, "sigma": FITTED, "prompt_variance_ratio": FITTED},
    "decoding": {"step_s": DERIVED, "step_s_per_sequence": DERIVED, "prefill_s_per_token": DERIVED},
    "training": {
        "s_per_token": DERIVED,
        "fixed_step_s": DERIVED,
        "old_logprob_s_per_token": DERIVED,
        "old_logprob_fixed_step_s": DERIVED,
        "step_overhead_s": DERIVED,
    },
    "syncing": {"parameter_bytes": DERIVED, "colocated_s": DERIVED},
    "rewarding": {},
}
"""All other keys of these sections are assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published row: its parts in seconds per window, and the work of a window. `gpus` are the
    trainer's."""

    gpus: int
    colocate: bool
    parts_s: Mapping[str, float]
    trajectories: int
    mini_batches: int
    train_steps: int
    cap: int
    """Longest response, in tokens."""


def published_rows(workload: Workload) -> list[Row]:
    """The rows that the workload is fitted to, each with what its profile comes to."""
    rows = []
    for reference in calibrated(workload).references:
        profile = profile_for(workload, reference.profile, reference_sets(reference), environ={}).profile
        schedule = Schedule.of(profile)
        rows.append(
            Row(
                gpus=compile_job(profile, virtual_cluster(profile)).role(TRAINER).workers,
                colocate=profile.placement.colocate,
                parts_s={part: float(seconds) for part, seconds in reference.parts_s.items()},
                trajectories=schedule.window_groups * profile.rollout.n,
                mini_batches=schedule.window_groups // schedule.mini_batch_groups,
                train_steps=schedule.window_steps,
                cap=profile.rollout.max_response_tokens,
            )
        )
    return rows


def calibrated(workload: Workload) -> Workload:
    """The workload with only the rows that it is fitted to."""
    return workload.model_copy(
        update={"references": tuple(row for row in workload.references if row.calibrated)}
    )


def workload_at(
    base: Workload, median_tokens: float, sigma: float, variance_ratio: float, bandwidth: float
) -> Workload:
    """The workload whose fitted parameters have these values (bandwidth in bytes per second)."""
    fitted = {"median_tokens": median_tokens, "sigma": sigma, "prompt_variance_ratio": variance_ratio}
    lengths = base.lengths.model_copy(update=fitted)
    rows = published_rows(base)
    ahead, *_ = apart = [row for row in rows if not row.colocate]
    tokens = ahead.trajectories * (ResponseLengths(lengths, ahead.cap).mean + lengths.prompt_tokens)
    flop_s = 2 * PARAMETERS / DECODE_FLOP_PER_S
    decoding = {
        "step_s": WEIGHT_BYTES / bandwidth + LAUNCH_S,
        "step_s_per_sequence": running_context(lengths, ahead.cap) * KV_BYTES_PER_TOKEN / bandwidth + flop_s,
        "prefill_s_per_token": flop_s,
    }
    gather_s = WEIGHT_BYTES / base.syncing.gather_bytes_per_s
    overhead_s = fmean((row.parts_s["rest"] - gather_s) / row.train_steps for row in apart)
    training = training_of(rows, tokens) | {"step_overhead_s": overhead_s}
    leases_s = [row.parts_s["rest"] - row.train_steps * overhead_s for row in rows if row.colocate]
    syncing = {"parameter_bytes": WEIGHT_BYTES, "colocated_s": fmean(leases_s)}
    return base.model_copy(
        update={
            "lengths": lengths,
            "decoding": base.decoding.model_copy(update=decoding),
            "training": base.training.model_copy(update=training),
            "syncing": base.syncing.model_copy(update=syncing),
        }
    )


def free_parameters(workload: Workload) -> tuple[float, float, float, float]:
    """As the file has them: median, sigma, ratio of variances, and the bandwidth that its decode step stands
    for."""
    lengths = workload.lengths
    assert lengths.median_tokens is not None
    assert lengths.sigma is not None
    bandwidth = WEIGHT_BYTES / (workload.decoding.step_s - LAUNCH_S)
    return lengths.median_tokens, lengths.sigma, lengths.prompt_variance_ratio, bandwidth


def to_coordinates(
    median_tokens: float, sigma: float, variance_ratio: float, bandwidth: float
) -> list[float]:
    """Unbounded ones for the search: logarithms, and a logit for what lies between 0 and 1."""
    ratio = min(max(variance_ratio, 0.01), 0.99)
    return [math.log(median_tokens), math.log(sigma), math.log(ratio / (1 - ratio)), math.log(bandwidth)]


def from_coordinates(point: Sequence[float]) -> tuple[float, float, float, float]:
    median, sigma, logit, bandwidth = point
    return math.exp(median), math.exp(sigma), 1 / (1 + math.exp(-logit)), math.exp(bandwidth)


def training_of(rows: Sequence[Row], tokens: float) -> dict[str, float]:
    """Seconds per token at `reference_gpus` and fixed seconds per mini-batch, of the update and of the
    old-logprob pass."""
    few, many = min(row.gpus for row in rows), max(row.gpus for row in rows)
    per_token = 6 * PARAMETERS / TRAIN_FLOP_PER_S / few
    rests = [row.parts_s["train"] - tokens * per_token * few / row.gpus for row in rows]
    (mini_batches,) = {row.mini_batches for row in rows}
    scored = tokens * (mini_batches - 1) / mini_batches
    passes_s = {row.gpus: row.parts_s["old_logprob"] for row in rows if "old_logprob" in row.parts_s}
    assert many == 2 * few, "what twice the GPUs save is half of what they share"
    shared_s = 2 * (passes_s[few] - passes_s[many])
    return {
        "s_per_token": per_token,
        "fixed_step_s": max(0.0, fmean(rests) / mini_batches),
        "old_logprob_s_per_token": shared_s / scored,
        "old_logprob_fixed_step_s": max(0.0, (passes_s[few] - shared_s) / (mini_batches - 1)),
    }


def running_context(lengths: Lengths, cap: int) -> float:
    """Mean tokens in the cache of a running sequence: a running one is a long one (E[x^2] / E[x]), on average
    half done."""
    assert lengths.median_tokens is not None
    assert lengths.sigma is not None
    mu, sigma, share = math.log(lengths.median_tokens), lengths.sigma, NormalDist().cdf
    z = (math.log(cap) - mu) / sigma
    second_moment = math.exp(2 * mu + 2 * sigma**2) * share(z - 2 * sigma) + cap**2 * (1 - share(z))
    return lengths.prompt_tokens + second_moment / ResponseLengths(lengths, cap).mean / 2


def loss(found: Sequence[Residual]) -> float:
    totals = {residual.profile: residual.measured_s for residual in found if residual.part == WINDOW}
    assert set(totals) == set(ROW_WEIGHTS)
    return sum(
        (ROW_WEIGHTS[residual.profile] if residual.part == WINDOW else 1.0)
        * ((residual.predicted_s - residual.measured_s) / totals[residual.profile]) ** 2
        for residual in found
    )


def nelder_mead(
    f: Callable[[list[float]], float], start: Sequence[float], steps: Sequence[float], evaluations: int
) -> tuple[list[float], float]:
    """Nelder and Mead's simplex (1965): reflect, expand, contract, else shrink. Ends with the evaluation that
    reaches the limit, or with the shrink that does; returns the best point and its value."""
    points = [list(start)] + [
        [x + (step if i == j else 0.0) for j, x in enumerate(start)] for i, step in enumerate(steps)
    ]
    simplex = sorted((f(point), point) for point in points)
    used = len(points)
    while used < evaluations:
        centre = [fmean(values) for values in zip(*(point for _, point in simplex[:-1]), strict=True)]
        (best, best_point), second_worst, (worst, worst_point) = simplex[0], simplex[-2][0], simplex[-1]

        def at(
            factor: float, centre: list[float] = centre, away: list[float] = worst_point
        ) -> tuple[float, list[float]]:
            point = [c + factor * (c - w) for c, w in zip(centre, away, strict=True)]
            return f(point), point

        reflected, used = at(1.0), used + 1
        if best <= reflected[0] < second_worst:
            simplex[-1] = reflected
        else:
            further, used = (
                at(2.0 if reflected[0] < best else 0.5 if reflected[0] < worst else -0.5),
                used + 1,
            )
            if further[0] < min(reflected[0], worst):
                simplex[-1] = further
            elif reflected[0] < best:
                simplex[-1] = reflected
            else:
                closer = [
                    [(b + x) / 2 for b, x in zip(best_point, point, strict=True)] for _, point in simplex[1:]
                ]
                simplex[1:], used = [(f(point), point) for point in closer], used + len(closer)
        simplex.sort()
    return simplex[0][1], simplex[0][0]


def show(workload: Workload, found: Sequence[Residual]) -> None:
    """Every parameter with where it comes from, then every row's parts."""
    cap = published_rows(workload)[0].cap
    context = running_context(workload.lengths, cap)
    print(
        f"bandwidth = {free_parameters(workload)[-1]:.4g} bytes/s  # fitted; no key of its own: decoding "
        "follows from it"
    )
    print(
        f"mean response {ResponseLengths(workload.lengths, cap).mean:.0f} tokens, mean running context "
        f"{context:.0f} tokens,"
    )
    print(
        f"of which {workload.profile['rollout']['slots']} slots take {_cache_gb(workload, context):.1f} GB "
        "of KV cache"
    )
    for section, marks in MARKS.items():
        print(f"\n[{section}]")
        for name, value in getattr(workload, section):
            text = f"{value:.4g}" if isinstance(value, float) else value
            print(f"{name + ' = ' + str(text):<44}# {_mark(marks, name)}")
    print(f"\n{'row':<34}{'part':<14}{'measured':>10}{'predicted':>11}{'ratio':>8}")
    for one in found:
        print(
            f"{one.profile:<34}{one.part:<14}{one.measured_s:>9.2f}s{one.predicted_s:>10.2f}s"
            f"{one.ratio:>8.3f}"
        )


def _cache_gb(workload: Workload, context: float) -> float:
    return float(workload.profile["rollout"]["slots"] * context * KV_BYTES_PER_TOKEN / 1e9)


def _mark(marks: Mapping[str, str], name: str) -> str:
    return marks.get(name, ASSUMED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=20)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="rows simulated at once")
    parser.add_argument(
        "--start",
        type=float,
        nargs=4,
        metavar=("MEDIAN", "SIGMA", "RATIO", "BANDWIDTH"),
        help="not the file's",
    )
    parser.add_argument(
        "--predict", action="store_true", help="also show the rows to which nothing is fitted"
    )
    arguments = parser.parse_args()
    base = load_workload(WORKLOAD)
    tried: dict[float, list[Residual]] = {}

    with ProcessPoolExecutor(arguments.processes) as pool:

        def found_at(workload: Workload) -> list[Residual]:
            row_residuals = partial(residuals, workload, windows=arguments.windows)
            return [one for found in pool.map(row_residuals, workload.references) for one in found]

        def value(point: list[float]) -> float:
            found = found_at(calibrated(workload_at(base, *from_coordinates(point))))
            tried[loss(found)] = found
            print(
                f"{loss(found):.5f}  "
                + "  ".join(f"{parameter:.4g}" for parameter in from_coordinates(point)),
                flush=True,
            )
            return loss(found)

        start = to_coordinates(*(arguments.start or free_parameters(base)))
        best, least = nelder_mead(value, start, [-0.12, 0.06, 0.8, -0.1], arguments.evaluations)
        fitted = workload_at(base, *from_coordinates(best))
        print(f"\nloss {least:.5f} after {len(tried)} evaluations of {arguments.windows} windows")
        show(fitted, found_at(fitted) if arguments.predict else tried[least])


if __name__ == "__main__":
    main()
