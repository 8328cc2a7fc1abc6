"""% of the bound never passes 100 in simulated comparisons: small ones of every kind, with warm-up and
run-out of any length."""

from __future__ import annotations

import random
import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.bench.contest import Entry, contest_of
from asyncrl_cli.bench.figures import Edges, bound_of_costs, bound_of_states, stretch_of, tokens_made
from asyncrl_cli.bench.results import Contestant, FinishedRun, Range, summarise
from asyncrl_cli.simulate.costs import Capacities
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import simulate
from tests.bench.test_figures import line, run_lines
from tests.simulate.small_workload import COSTS

PROFILES = ("on-policy-pipeline", "stream-off-policy", "stale-samples", "partial-rollout", "one-step-off")
CHUNK_SEEDS = 3
FULL = 0.85


def drawn(rng: random.Random) -> Workload:
    return Workload.model_validate(
        dict(
            windows=rng.choice([12, 15, 16, 24]),
            profile=dict(
                placement=dict(gpus=rng.choice([2, 4, 8])),
                trainer=dict(ppo_mini_batch_size=rng.choice([2, 4])),
                rollout=dict(
                    n=rng.choice([2, 4]), slots=rng.choice([8, 16, 64]), prefetch_groups=rng.choice([0, 2])
                ),
                async_training=dict(require_batches=rng.choice([1, 2])),
            ),
            lengths=dict(
                median_tokens=rng.choice([10.0, 40.0, 200.0]),
                sigma=rng.choice([0.0, 0.5, 1.2]),
                prompt_tokens=rng.choice([0, 50]),
            ),
            decoding=dict(
                step_s=0.01,
                step_s_per_sequence=rng.choice([0.0, 0.001]),
                speed_spread=rng.choice([0.0, 0.2]),
                prefill_s_per_token=rng.choice([0.0, 1e-4]),
            ),
            training=dict(
                s_per_token=10 ** rng.uniform(-5, -2.5),
                step_s=rng.choice([0.0, 0.2]),
                old_logprob_s_per_token=1e-5,
            ),
            syncing=tomllib.loads(COSTS)["syncing"],
        )
    )


def simulated(entry: Entry, workload: Workload, seed: int, groups: int) -> FinishedRun:
    profile = profile_for(workload, entry.reference, (), groups=groups).profile
    run = simulate(profile, workload, seed=seed, groups=groups)
    assert run.error is None
    return FinishedRun(profile=entry.name, seed=seed, lines=run.lines, costs=run.costs)


def bound_ratios(seed: int) -> dict[str, float]:
    workload = drawn(random.Random(seed))
    contest = contest_of("colocate", PROFILES, workload=workload)
    runs = [simulated(entry, workload, seed, contest.groups) for entry in contest.entries]
    compared = summarise(contest.entries, runs)
    return {result.profile: result.figures["bound_ratio"].median for result in compared}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 12, CHUNK_SEEDS))
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


def test_lent_devices_generate_for_as_long_as_they_do_not_train() -> None:
    """Generation alone takes 40 s, training 10 s. With as many lent devices as others, 30 of 40 units of work
    would take 20 s in which both generate, and 10 s beside training."""
    stretch = stretch_of([line(step, step, 10.0 * step, 10.0) for step in range(1, 5)])
    rates = tokens_made(stretch) / 40, stretch.tokens / 10
    own, lent = (
        bound_of_costs(
            stretch,
            1.0,
            Capacities(
                rollout_tokens_per_s=rates[0],
                trainer_tokens_per_s=rates[1],
                colocated=False,
                lent_share=share,
            ),
        )
        for share in (0.0, 0.5)
    )
    assert (own["ideal_s"], lent["ideal_s"]) == (pytest.approx(40.0), pytest.approx(25.0))


@pytest.mark.slow
def test_a_run_that_lends_does_not_pass_its_bound() -> None:
    chosen = drawn(random.Random(1))
    training = chosen.training.model_copy(update={"s_per_token": 1e-6, "step_s": 0.0, "wake_s": 0.0})
    starving = chosen.model_copy(update={"training": training})
    sets = ("placement.lend=true", "placement.gpus=4", 'placement.ratio="2:2"')
    loaded = profile_for(starving, "partial-rollout", sets, groups=160)
    run = simulate(loaded.profile, starving, groups=160)
    assert run.error is None
    assert sum(one["placement/lent_s"] for one in run.lines) > 0
    stretch, capacities = stretch_of(run.lines, Edges(8, 152)), run.costs.capacities(8, 152)
    assert capacities.lent_share == pytest.approx(0.5, abs=0.1)
    assert bound_of_costs(stretch, 1.0, capacities)["bound_ratio"] <= 1 + 1e-9
    # their share matters here
    alone = replace(capacities, lent_share=0.0)
    assert bound_of_costs(stretch, 1.0, alone)["bound_ratio"] > 1


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


@pytest.mark.parametrize(("colocated", "ideal_s"), [(False, 10.0), (True, 15.0)])
def test_apart_the_slower_side_bounds_and_colocated_both_do(colocated: bool, ideal_s: float) -> None:
    """240 tokens in 20 s: 10 s of generation at 24 per second, 5 s of training at 48."""
    costs = Capacities(rollout_tokens_per_s=24.0, trainer_tokens_per_s=48.0, colocated=colocated)
    expected = dict(generation_s=10.0, training_s=5.0, ideal_s=ideal_s, bound_ratio=ideal_s / 20)
    expected |= dict(rollout_tokens_per_s=24.0, trainer_tokens_per_s=48.0)
    assert bound_of_costs(stretch_of(run_lines()), 1.0, costs) == pytest.approx(expected)


def costs_of(capacities: Capacities) -> Any:
    return SimpleNamespace(capacities=lambda begin_groups, end_groups: capacities)


def test_each_run_is_held_against_its_own_capacities() -> None:
    contestant = Contestant(name="base", mode="base", step_groups=2, window_groups=2)
    capacities = [
        Capacities(rollout_tokens_per_s=speed, trainer_tokens_per_s=48, colocated=False)
        for speed in (24.0, 16.0)
    ]
    runs = [
        FinishedRun(profile="base", seed=seed, lines=run_lines(), costs=costs_of(own))
        for seed, own in enumerate(capacities)
    ]
    (base,) = summarise([contestant], runs)
    # 240 tokens: 10 or 15 s of generation, 5 s of training, of 20 s. Windows are a third of it.
    assert base.figures["bound_ratio"] == Range(
        median=pytest.approx(0.625), min=pytest.approx(0.5), max=pytest.approx(0.75)
    )
    assert base.limited_by == "generation"
    written = base.to_json()
    assert written["ideal"] == pytest.approx(
        {"window_time_s": 12.5 / 3, "generation_s": 12.5 / 3, "training_s": 5 / 3}
    )
    assert written["capacities"] == dict(colocated=False, rollout_tokens_per_s=20.0, trainer_tokens_per_s=48)


def idle(lines: list[dict[str, Any]], *ratios: tuple[float, float]) -> list[dict[str, Any]]:
    """With these idle ratios of the trainer and of the rollout workers."""
    known = [{"trainer/idle_ratio": trainer, "rollouter/idle_ratio": rollout} for trainer, rollout in ratios]
    return [entry | more for entry, more in zip(lines, known, strict=True)]


@pytest.mark.parametrize(("is_colocated", "ideal_s"), [(False, 11.0), (True, 19.0)])
def test_the_bound_of_a_real_run_is_what_its_sides_were_busy_for(is_colocated: bool, ideal_s: float) -> None:
    """Steps of 4, 6 and 10 s: the trainer computes for 1 + 3 + 4 = 8 s, the workers for 2 + 1.5 + 7.5 = 11 s.
    Start-up and the last step, in which they never rest, are not measured."""
    ratios = (0.0, 0.0), (0.75, 0.5), (0.5, 0.75), (0.6, 0.25), (0.0, 0.0)
    stretch = stretch_of(idle(run_lines(), *ratios))
    assert bound_of_states(stretch, 2.0, is_colocated=is_colocated) == pytest.approx(
        {"generation_s": 5.5, "training_s": 4.0, "ideal_s": ideal_s / 2, "bound_ratio": ideal_s / 20}
    )


def test_steps_beside_an_eval_say_nothing_about_the_bound_of_a_real_run() -> None:
    """Its own 5 s of the second step count as the other steps do: half of them for the workers."""
    lines = idle(run_lines(), *[(0.9, 0.5)] * 5)
    lines[2] |= {"timing/eval_s": 1.0, "rollouter/idle_ratio": 0.0, "trainer/idle_ratio": 1.0}
    found = bound_of_states(stretch_of(lines), 1.0, is_colocated=False)
    assert (found["generation_s"], found["bound_ratio"]) == pytest.approx((9.5, 0.5))
    unmeasured = [entry | {"timing/eval_s": 0.1} for entry in lines]
    assert bound_of_states(stretch_of(unmeasured), 1.0, is_colocated=False) == {}


@pytest.mark.parametrize("name", ["colocate", "partial-rollout"])
def test_the_states_of_a_simulated_run_allow_no_more_than_its_costs_do(name: str) -> None:
    """A worker with free slots is busy, too: what a run was busy for is more than its work would take in full
    batches, and never more than the run took."""
    workload = drawn(random.Random(3))
    contest = contest_of("colocate", ["partial-rollout"], workload=workload)
    entry = next(entry for entry in contest.entries if entry.name == name)
    run = simulated(entry, workload, 3, contest.groups)
    assert run.costs is not None
    stretch = stretch_of(run.lines)
    capacities = run.costs.capacities(stretch.begin_groups, stretch.end_groups)
    costs = bound_of_costs(stretch, 1.0, capacities)["bound_ratio"]
    states = bound_of_states(stretch, 1.0, is_colocated=name == "colocate")["bound_ratio"]
    assert costs <= states + 1e-9 <= 1 + 2e-9
