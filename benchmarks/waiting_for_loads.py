"""Run times if groups wait for a lagging worker's load: never (unless due at once), always, or by the rule of
admission.

    python -m benchmarks.waiting_for_loads [--seeds 100] [--first 0] [--processes 2]

Run it in the project's root, because it uses the worlds of the tests. Every seed gives another world, which
the loop runs on the virtual clock: eta, slack, workers, slots, long-tailed lengths, which side is faster, and
loads that take from a hundredth of a window to a whole one. The three runs of a seed train the same prompts
with the same lengths.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
from collections.abc import Callable
from fractions import Fraction
from statistics import fmean
from typing import Any

import pytest
from tests.loop.keywords import loop_settings
from tests.loop.worlds import run_world

from asyncrl_cli.loop.admission import Admission

RULE = "_should_wait"
WINDOWS, TOKEN_S, MEAN_TOKENS = 40, 0.02, 15
Rule = Callable[[Admission, int, int], bool]


def never(admission: Admission, version: int, deadline: int) -> bool:
    """Only what would be due in the window that has begun already waits."""
    return version < admission.version and deadline <= admission.version


def always(admission: Admission, version: int, deadline: int) -> bool:
    return version < admission.version


RULES: dict[str, Rule] = {"never": never, "always": always, "admission's": getattr(Admission, RULE)}


def draw(seed: int) -> dict[str, Any]:
    """Arguments of `run_world`."""
    rng = random.Random(f"waiting {seed}")
    eta, n = Fraction(rng.choice(("1/4", "1/2", "3/4", "1", "3/2", "2"))), rng.choice((2, 4))
    window_steps, step_groups, workers = rng.choice((1, 4)), rng.choice((4, 8)), rng.randint(1, 8)
    slots, alpha, longest = (
        n * rng.choice((1, 2, 4, 8)),
        rng.choice((1.1, 1.3, 2.0)),
        rng.choice((100, 400, 1500)),
    )
    group_s = n * MEAN_TOKENS * TOKEN_S / (workers * slots)
    train_s = step_groups * group_s * rng.choice((0.5, 0.8, 1.0, 1.5, 3.0))
    window_s = window_steps * max(train_s, step_groups * group_s)
    lag_s = window_s * rng.choice((0.01, 0.03, 0.1, 0.3, 1.0))
    chosen = loop_settings(
        seed=seed,
        step_groups=step_groups,
        window_steps=window_steps,
        train_steps=WINDOWS * window_steps,
        eta=eta,
        max_staleness=math.ceil(eta) + rng.choice((0, 1, 2)),
        n=n,
        interrupt=rng.choice(("keep-kv", "drain")),
    )
    times = {
        "response_tokens": lambda rng: min(int(5 * rng.paretovariate(alpha)), longest),
        "prefetch_s": lambda rng: lag_s * rng.uniform(0, 2),
        "load_s": lambda rng: 0.0,
    }
    trainer_times = {"train_s": lambda batch: train_s, "gather_s": 0.0, "publish_s": 0.0}
    return {
        "chosen": chosen,
        "seed": seed,
        "workers": workers,
        "slots": slots,
        "times": times,
        "trainer_times": trainer_times,
    }


def compare(seed: int) -> dict[str, float]:
    """Seconds of the run by rule."""
    seconds = {}
    for name, rule in RULES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Admission, RULE, rule)
            ran = run_world(**draw(seed))
        assert ran.error is None, (seed, name, ran.error)
        seconds[name] = ran.elapsed_s
    return seconds


def summary(found: list[dict[str, float]]) -> str:
    lines = [
        f"{len(found)} worlds, {WINDOWS} windows each: seconds by each rule over those by the better "
        "one of never and always"
    ]
    for name in RULES:
        ratios = [run[name] / min(run["never"], run["always"]) for run in found]
        slower = sum(ratio > 1.02 for ratio in ratios) / len(ratios)
        lines.append(
            f"  {name:<20} mean {fmean(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}, "
            f"{slower:.1%} of the worlds more than 2% slower"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        print(summary(pool.map(compare, range(options.first, options.first + options.seeds), chunksize=1)))


if __name__ == "__main__":
    main()
