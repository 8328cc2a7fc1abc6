"""% of the bound never passes 100 in simulated comparisons: small ones of every kind, with warm-up and
run-out of any length."""

from __future__ import annotations

import random

import pytest

from asyncrl_cli.bench.compare import contest_of
from asyncrl_cli.bench.entries import Entry
from asyncrl_cli.bench.measure import stretch_of, tokens_made
from asyncrl_cli.bench.results import FinishedRun, summarise
from asyncrl_cli.bench.simulated import with_capacities
from asyncrl_cli.simulate.costs import Costs
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import simulate
from tests.bench.test_measure import line

PROFILES = ("on-policy-pipeline", "stream-off-policy", "stale-samples", "partial-rollout", "one-step-off")
CHUNK_SEEDS = 6
FULL = 0.9


def drawn(rng: random.Random) -> Workload:
    return Workload.model_validate(
        {
            "windows": rng.choice([12, 15, 16, 24]),
            "profile": {
                "placement": {"gpus": rng.choice([2, 4, 8])},
                "trainer": {"ppo_mini_batch_size": rng.choice([2, 4])},
                "rollout": {
                    "n": rng.choice([2, 4]),
                    "slots": rng.choice([8, 16, 64]),
                    "prefetch_groups": rng.choice([0, 2]),
                },
                "async_training": {"require_batches": rng.choice([1, 2])},
            },
            "lengths": {
                "median_tokens": rng.choice([10.0, 40.0, 200.0]),
                "sigma": rng.choice([0.0, 0.5, 1.2]),
                "prompt_tokens": rng.choice([0, 50]),
            },
            "decoding": {
                "step_s": 0.01,
                "step_s_per_sequence": rng.choice([0.0, 0.001]),
                "speed_spread": rng.choice([0.0, 0.2]),
                "prefill_s_per_token": rng.choice([0.0, 1e-4]),
            },
            "training": {
                "s_per_token": 10 ** rng.uniform(-5, -2.5),
                "step_s": rng.choice([0.0, 0.2]),
                "old_logprob_s_per_token": 1e-5,
                "interference_ratio": rng.choice([0.0, 0.3]),
            },
            "syncing": {
                "parameter_bytes": 1e6,
                "gather_bytes_per_s": 1e8,
                "send_bytes_per_s": 1e8,
                "load_bytes_per_s": 1e8,
            },
        }
    )


def simulated(entry: Entry, workload: Workload, seed: int, groups: int) -> tuple[FinishedRun, Costs]:
    run = simulate(
        profile_for(workload, entry.reference, (), groups=groups).profile, workload, seed=seed, groups=groups
    )
    assert run.error is None
    return FinishedRun(profile=entry.name, seed=seed, lines=run.lines), run.costs


def bound_ratios(seed: int) -> dict[str, float]:
    workload = drawn(random.Random(seed))
    contest = contest_of("colocate", PROFILES, workload=workload)
    made = [simulated(entry, workload, seed, contest.groups) for entry in contest.entries]
    runs = with_capacities(made, contest.longest_window)
    compared = summarise(contest.entries, runs)
    return {result.profile: result.figures["bound_ratio"].median for result in compared}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 24, CHUNK_SEEDS))
def test_no_schedule_is_faster_than_its_bound(first: int) -> None:
    ratios = {
        (seed, name): ratio
        for seed in range(first, first + CHUNK_SEEDS)
        for name, ratio in bound_ratios(seed).items()
    }
    assert {key: ratio for key, ratio in ratios.items() if ratio > 1 + 1e-9} == {}
    assert max(ratios.values()) > FULL, "a bound that nobody comes near says nothing"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [32, 34, 39, 49])
def test_comparisons_that_once_passed_their_bound_do_so_no_more(seed: int) -> None:
    """32, 34: steps with more tokens than the run's average cost less per token. 39: workers of unlike speeds
    (`speed_spread`) drew fast ones. 49: groups that were sampled before the measured stretch."""
    assert max(bound_ratios(seed).values()) <= 1 + 1e-9


def test_what_was_sampled_before_the_stretch_is_not_its_work() -> None:
    """Two steps of 5 s train 80 tokens each; workers sampled 20, then 4 tokens a second: 120 of the 160."""
    lines = [
        line(step, step, 5.0 * step, 5.0, **{"rollouter/tokens_per_s": rate})
        for step, rate in enumerate((9.0, 20.0, 4.0), 1)
    ]
    lines.append(line(4, 4, 20.0, 5.0))
    stretch = stretch_of(lines)
    assert (tokens_made(stretch), stretch.tokens) == (120.0, 160)
    idle_before = [entry | {"rollouter/tokens_per_s": 100.0} for entry in lines]
    assert tokens_made(stretch_of(idle_before)) == 160.0
