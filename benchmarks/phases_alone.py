"""Is colocate a fair baseline? Compares each of its phases alone, on the whole machine, with the same phase
of the split job.

    python benchmarks/phases_alone.py [--repeats 5]

Prints the ratios of the median tokens/s over repeats measured in turns, and the share of its cores that each
side's processes got. Below 70% others use the machine, and the ratios mean little. On two real cores
colocate's ratios are above 1. If the two cores are threads of one core, the ratios are 1 within the 3% by
which repeats differ on a quiet machine.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence

from asyncrl_cli.bench.phases import measure_all, side_of
from asyncrl_cli.models.resolve import resolve_model
from asyncrl_cli.plan.cluster import local_cluster
from asyncrl_cli.plan.compiling import compile_job
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.tasks.task import load_task

NUM_LENGTHS = 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        sets = ("model.warm_start_steps=2", f'model.cache_dir="{cache}"')
        profiles = {name: load(name, sets).profile for name in ("partial-rollout", "colocate")}
        task = load_task(profiles["colocate"])
        model_dir = resolve_model(profiles["colocate"], task)
        sides = {
            name: side_of(profile, compile_job(profile, local_cluster()))
            for name, profile in profiles.items()
        }
        measured = measure_all(sides, model_dir, task.train, response_lengths(), repeats=arguments.repeats)
    split, colocate = measured["partial-rollout"], measured["colocate"]
    ours, theirs = colocate.capacities, split.capacities
    print(
        f"generation  {ours.rollout_tokens_per_s / theirs.rollout_tokens_per_s:.2f} times the split side's "
        "tokens/s"
    )
    print(
        f"training    {ours.trainer_tokens_per_s / theirs.trainer_tokens_per_s:.2f} times the split side's "
        "tokens/s"
    )
    print(f"of its cores the split side got {split.cpu_share:.0%}, colocate {colocate.cpu_share:.0%}")


def response_lengths() -> Sequence[int]:
    rng = random.Random(0)
    return [min(96, max(1, round(rng.lognormvariate(3.0, 0.75)))) for _ in range(NUM_LENGTHS)]


if __name__ == "__main__":
    main()
