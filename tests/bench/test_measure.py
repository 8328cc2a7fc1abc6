"""Figures of a run, worked out by hand: windows of 10 s, what is left out, and how repeats and bounds come together."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl_cli.bench.bound import Bound, Capacities, Work, bound_of
from asyncrl_cli.bench.measure import figures_of, quantile, stretch_of
from asyncrl_cli.bench.results import Contestant, RunLines, summarise
from asyncrl_cli.errors import AsyncrlError


def line(step: int, window: int, time_s: float, step_s: float, **changed: Any) -> dict[str, Any]:
    """Two groups of four trajectories with ten tokens each."""
    made: dict[str, Any] = {
        "step": step,
        "version": window + 1,
        "window": window,
        "time_s": time_s,
        "groups_trained": 2 * step,
        "tokens_trained": 80 * step,
        "response_tokens/mean": 10.0,
        "timing/step_s": step_s,
        "timing/wait_data_s": step_s / 2,
        "timing/train_s": step_s / 4,
        "timing/gather_s": step_s / 8,
        "timing/checkpoint_s": step_s / 16,
        "timing/other_s": step_s / 16,
        "trainer/idle_ratio": 0.5,
        "staleness/mean": 1.0,
        "staleness/max": 1,
        "staleness/histogram": [0, 8],
        "fully_async/partial/total_partial_num": 2,
        "fully_async/partial/max_partial_span": 1,
        "waste/tokens_discarded": 3 * step,
    }
    return made | changed


def run_lines(scale: float = 1.0) -> list[dict[str, Any]]:
    """Start-up of 90 s, windows of one step of 4, 6 and 10 s, then a last one with an eval of 50 s."""
    lines = [
        line(1, 0, 90.0, 90.0),
        line(2, 1, 94.0, 4.0),
        line(3, 2, 100.0, 6.0),
        line(4, 3, 110.0, 10.0),
        line(5, 4, 165.0, 55.0, **{"timing/eval_s": 50.0, "eval/reward_mean": 0.75, "eval/version": 5, "staleness/max": 3}),
    ]
    return [entry | {key: entry[key] * scale for key in entry if key.endswith("_s")} for entry in lines]


def test_start_up_the_first_window_and_the_last_one_are_not_measured() -> None:
    stretch = stretch_of(run_lines())
    assert (stretch.begin_s, stretch.end_s, stretch.groups, stretch.windows) == (90.0, 110.0, 6, 3)


def test_of_two_windows_the_second_is_measured_without_its_eval() -> None:
    lines = [line(1, 0, 90.0, 90.0), line(2, 1, 145.0, 55.0, **{"timing/eval_s": 50.0})]
    figures = figures_of(lines, window_groups=2)
    assert figures["measured_s"] == 5.0
    assert figures["step_s_mean"] == 5.0


def test_a_run_of_one_window_is_refused() -> None:
    with pytest.raises(AsyncrlError, match="first one is warm-up"):
        stretch_of([line(1, 0, 5.0, 5.0)])


def test_figures_are_those_of_the_measured_windows() -> None:
    figures = figures_of(run_lines(), window_groups=4)
    assert figures["groups_per_s"] == pytest.approx(6 / 20)
    assert figures["window_time_s"] == pytest.approx(4 * 20 / 6)
    assert figures["step_s_mean"] == pytest.approx(20 / 3)
    assert figures["step_s_p95"] == pytest.approx(9.6)  # numpy.quantile([4, 6, 10], 0.95)
    assert figures["step_other_s"] == pytest.approx(20 / 3 / 8)
    assert figures["window_wait_s"] == pytest.approx(figures["window_time_s"] / 2)
    assert figures["tokens_per_s"] == pytest.approx(240 / 20)
    assert figures["partial_ratio"] == pytest.approx(6 / 24)


def test_maxima_waste_and_reward_are_those_of_the_whole_run() -> None:
    figures = figures_of(run_lines(), window_groups=4)
    assert (figures["staleness_max"], figures["tokens_discarded"], figures["final_reward"]) == (3, 15, 0.75)
    assert figures["wall_s"] == 165.0


def test_what_was_not_measured_is_absent() -> None:
    figures = figures_of(run_lines(), window_groups=4)
    assert figures["trainer_idle_ratio"] == pytest.approx(0.5)
    assert "slot_utilization" not in figures


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0)])
def test_quantiles_lie_between_neighbours(share: float, expected: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == expected


def test_apart_the_slower_side_bounds_and_colocated_both_do() -> None:
    work = Work(sampled_tokens=300, trained_tokens=100)
    apart = bound_of(work, Capacities(rollout_tokens_per_s=100, trainer_tokens_per_s=50, colocated=False))
    assert (apart.ideal_s, apart.limited_by) == (3.0, "generation")
    together = bound_of(work, Capacities(rollout_tokens_per_s=200, trainer_tokens_per_s=50, colocated=True))
    assert (together.ideal_s, together.limited_by) == (3.5, "training")


def test_speedup_is_the_ratio_of_medians_and_its_spread_that_of_pairs() -> None:
    contestants = [Contestant(profile=name, mode=name, step_groups=2, window_groups=2) for name in ("base", "fast")]
    runs = [RunLines(profile="base", seed=seed, lines=run_lines(scale)) for seed, scale in enumerate((2.0, 4.0, 4.0))]
    runs += [RunLines(profile="fast", seed=seed, lines=run_lines(scale)) for seed, scale in enumerate((1.0, 1.0, 2.0))]
    capacity = Capacities(rollout_tokens_per_s=24, trainer_tokens_per_s=48, colocated=False)
    base, fast = summarise(contestants, runs, {"fast": capacity}, window_groups=2)
    assert base.figures["speedup"].median == 1.0
    assert (fast.figures["speedup"].median, fast.figures["speedup"].min, fast.figures["speedup"].max) == (4.0, 2.0, 4.0)
    assert fast.figures["bound_ratio"].median == pytest.approx(0.5)  # 240 tokens at 24 per second, in 20 s
    assert fast.bound == Bound(generation_s=pytest.approx(10 / 3), training_s=pytest.approx(5 / 3), colocated=False)
    assert base.to_json()["bound_ratio"] is None


def test_a_profile_without_a_finished_run_has_no_result() -> None:
    contestants = [Contestant(profile=name, mode=name, step_groups=2, window_groups=2) for name in ("base", "late")]
    results = summarise(contestants, [RunLines(profile="base", seed=0, lines=run_lines())], {}, window_groups=2)
    assert [result.profile for result in results] == ["base"]
