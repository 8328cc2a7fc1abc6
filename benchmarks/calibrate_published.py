"""Fit profiles/workloads/verl-7b-math-128.toml to its three published rows, and print parameters and residuals.

    python benchmarks/calibrate_published.py [--evaluations 40] [--windows 3]

Searched (Nelder-Mead, on short simulated runs of all rows at once): median and sigma of the lengths, and the memory bandwidth
that decoding sees. Everything else follows from them:

    decode step             weight bytes / bandwidth + LAUNCH_S
    ... per sequence        KV bytes of its length-biased mean context / bandwidth + its FLOP at half of the peak
    update, per token       6 FLOP per parameter at UPDATE_EFFICIENCY of the peak: the least it can take
    update, fixed           least squares over the three published updates, given that
    old logprob             the two published passes, exactly, where tokens allow it

None of it knows of a profile. The objective is the sum of squared errors of totals (weight 4; 24 for the two rows that acceptance
names) and parts (weight 1), each relative to its row's total.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence

from asyncrl_cli.simulate.lengths import ResponseLengths, mean_tokens
from asyncrl_cli.simulate.references import WINDOW, Residual, residuals
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workloads import load_workload

WORKLOAD = "verl-7b-math-128"
PARAMETERS = 7.6e9
WEIGHT_BYTES = 15.2e9
KV_BYTES_PER_TOKEN = 57_344
PEAK_FLOP_PER_S = 989e12
LAUNCH_S = 1e-3
UPDATE_EFFICIENCY = 0.45
UPDATES_S = {64: (113.16, 133.41), 128: (113.81,)}
OLD_LOGPROBS_S = {64: 70.26, 128: 53.92}
TRAJECTORIES, MINI_BATCHES, CAP = 8192, 16, 28_672


def workload_at(base: Workload, median_tokens: float, sigma: float, bandwidth: float) -> Workload:
    """The workload whose free parameters have these values (bytes per second)."""
    lengths = base.lengths.model_copy(update={"median_tokens": median_tokens, "sigma": sigma})
    tokens = TRAJECTORIES * (mean_tokens(lengths, CAP) + lengths.prompt_tokens)
    context = lengths.prompt_tokens + _length_biased_mean(ResponseLengths(lengths, CAP)) / 2
    flop_s = 2 * PARAMETERS / (PEAK_FLOP_PER_S / 2)
    decoding = base.decoding.model_copy(
        update={
            "step_s": WEIGHT_BYTES / bandwidth + LAUNCH_S,
            "step_s_per_sequence": context * KV_BYTES_PER_TOKEN / bandwidth + flop_s,
            "prefill_s_per_token": flop_s,
        }
    )
    training = base.training.model_copy(update=training_of(tokens))
    return base.model_copy(update={"lengths": lengths, "decoding": decoding, "training": training})


def free_parameters(workload: Workload) -> tuple[float, float, float]:
    """As the file has them."""
    assert workload.lengths.median_tokens is not None
    assert workload.lengths.sigma is not None
    return workload.lengths.median_tokens, workload.lengths.sigma, WEIGHT_BYTES / (workload.decoding.step_s - LAUNCH_S)


def training_of(tokens: float) -> dict[str, float]:
    """Seconds per token at 64 GPUs and fixed seconds per mini-batch, of the update and of the old-logprob pass."""
    per_token = 6 * PARAMETERS / (UPDATE_EFFICIENCY * PEAK_FLOP_PER_S) / 64
    rests = [seconds - tokens * per_token * 64 / gpus for gpus, rows in UPDATES_S.items() for seconds in rows]
    scored = tokens * (MINI_BATCHES - 1) / MINI_BATCHES
    shared_s = 2 * (OLD_LOGPROBS_S[64] - OLD_LOGPROBS_S[128])
    return {
        "s_per_token": per_token,
        "fixed_step_s": max(0.0, sum(rests) / len(rests) / MINI_BATCHES),
        "old_logprob_s_per_token": shared_s / scored,
        "old_logprob_fixed_step_s": max(0.0, (OLD_LOGPROBS_S[64] - shared_s) / (MINI_BATCHES - 1)),
    }


def _length_biased_mean(lengths: ResponseLengths) -> float:
    """E[x^2] / E[x]: a running sequence is a long one; on the way its context is half of that, on average."""
    drawn = lengths(random.Random(0), 50_000)
    return sum(x * x for x in drawn) / sum(drawn)


def loss(found: Sequence[Residual]) -> float:
    totals = {residual.profile: residual.measured_s for residual in found if residual.part == WINDOW}
    weight = {name: 4.0 if "=" in name else 24.0 for name in totals}
    return sum(
        (weight[residual.profile] if residual.part == WINDOW else 1.0)
        * ((residual.predicted_s - residual.measured_s) / totals[residual.profile]) ** 2
        for residual in found
    )


def nelder_mead(
    f: Callable[[list[float]], float], start: Sequence[float], steps: Sequence[float], evaluations: int
) -> tuple[list[float], float]:
    """The usual simplex search; returns the best point and its value."""
    points = [list(start)] + [[x + (step if i == j else 0.0) for j, x in enumerate(start)] for i, step in enumerate(steps)]
    simplex = sorted((f(point), point) for point in points)
    used = len(points)
    while used < evaluations:
        centre = [sum(values) / len(start) for values in zip(*(point for _, point in simplex[:-1]), strict=True)]
        worst = simplex[-1][1]

        def along(factor: float, centre: list[float] = centre, worst: list[float] = worst) -> list[float]:
            return [c + factor * (c - w) for c, w in zip(centre, worst, strict=True)]

        tried = along(1.0)
        value, used = f(tried), used + 1
        if value < simplex[0][0]:
            further = along(2.0)
            value_further, used = f(further), used + 1
            value, tried = min((value, tried), (value_further, further))
        elif value >= simplex[-2][0]:
            tried = along(-0.5)
            value, used = f(tried), used + 1
        simplex[-1] = (value, tried)
        simplex.sort()
    return simplex[0][1], simplex[0][0]


def show(workload: Workload, found: Sequence[Residual]) -> None:
    lengths, decoding, training = workload.lengths, workload.decoding, workload.training
    print(f"median_tokens = {lengths.median_tokens:.0f}\nsigma = {lengths.sigma:.3f}")
    print(f"mean response = {mean_tokens(lengths, CAP):.0f} tokens")
    for section, names in ((decoding, ("step_s", "step_s_per_sequence", "prefill_s_per_token")), (training, training_of(1.0))):
        for name in names:
            print(f"{name} = {getattr(section, name):.4g}")
    print(f"\n{'row':<34}{'part':<14}{'measured':>10}{'predicted':>11}{'ratio':>8}")
    for residual in found:
        print(
            f"{residual.profile:<34}{residual.part:<14}{residual.measured_s:>9.2f}s{residual.predicted_s:>10.2f}s{residual.ratio:>8.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=40)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--start", type=float, nargs=3, metavar=("MEDIAN", "SIGMA", "BANDWIDTH"), help="instead of the file's")
    arguments = parser.parse_args()
    base = load_workload(WORKLOAD)

    def at(point: Sequence[float]) -> Workload:
        return workload_at(base, *(math.exp(value) for value in point))

    def value(point: list[float]) -> float:
        found = loss(residuals(at(point), windows=arguments.windows))
        print(f"{found:.5f}  " + "  ".join(f"{math.exp(coordinate):.4g}" for coordinate in point), flush=True)
        return found

    start = [math.log(value) for value in arguments.start or free_parameters(base)]
    best, _ = nelder_mead(value, start, [0.25, 0.12, 0.12], arguments.evaluations)
    print()
    show(at(best), residuals(at(best)))


if __name__ == "__main__":
    main()
