"""Figures of a run, worked out by hand: windows of 10 s, what is left out, and how repeats and bounds come
together."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.bench.figures import Edges, common_edges, figures_of, stretch_of
from asyncrl_cli.bench.results import Contestant, FinishedRun, Range, summarise


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
    last = {"timing/eval_s": 50.0, "eval/reward_mean": 0.75, "eval/version": 5, "staleness/max": 3}
    lines = [line(1, 0, 90.0, 90.0), line(2, 1, 94.0, 4.0), line(3, 2, 100.0, 6.0), line(4, 3, 110.0, 10.0)]
    lines.append(line(5, 4, 165.0, 55.0, **last))
    return [entry | {key: entry[key] * scale for key in entry if key.endswith("_s")} for entry in lines]


def test_start_up_the_first_window_and_the_last_one_are_not_measured() -> None:
    stretch = stretch_of(run_lines())
    assert (stretch.before["time_s"], stretch.seconds) == (90.0, 20.0)
    assert (stretch.groups, len(stretch.lines)) == (6, 3)


def test_windows_in_which_version_0_is_still_scored_are_not_measured_either() -> None:
    lines = run_lines()
    lines[1]["eval/version"] = 0
    stretch = stretch_of(lines)
    assert (stretch.before["time_s"], stretch.seconds, len(stretch.lines)) == (94.0, 16.0, 2)


def test_of_two_windows_the_second_is_measured_without_its_eval() -> None:
    lines = [line(1, 0, 90.0, 90.0), line(2, 1, 145.0, 55.0, **{"timing/eval_s": 50.0})]
    figures = figures_of(stretch_of(lines), 2)
    assert figures["measured_s"] == 5.0
    assert figures["step_s_mean"] == 5.0


def test_a_run_of_one_window_is_refused() -> None:
    with pytest.raises(AsyncrlError, match="first one is warm-up"):
        stretch_of([line(1, 0, 5.0, 5.0)])


def test_figures_are_those_of_the_measured_windows_and_maxima_waste_and_reward_of_the_whole_run() -> None:
    figures = figures_of(stretch_of(run_lines()), 4)
    assert figures["groups_per_s"] == pytest.approx(6 / 20)
    assert figures["window_time_s"] == pytest.approx(4 * 20 / 6)
    assert figures["step_s_mean"] == pytest.approx(20 / 3)
    assert figures["step_s_p95"] == pytest.approx(9.6)  # numpy.quantile([4, 6, 10], 0.95)
    assert figures["step_other_s"] == pytest.approx(20 / 3 / 8)
    assert figures["window_wait_s"] == pytest.approx(figures["window_time_s"] / 2)
    assert figures["tokens_per_s"] == pytest.approx(240 / 20)
    assert figures["partial_ratio"] == pytest.approx(6 / 24)
    assert figures["trainer_idle_ratio"] == pytest.approx(0.5)
    assert (figures["staleness_max"], figures["tokens_discarded"], figures["final_reward"]) == (3, 15, 0.75)
    assert figures["wall_s"] == 165.0
    assert "slot_utilization" not in figures, "it was not measured"


def test_the_final_reward_has_its_interval_where_the_eval_recorded_one() -> None:
    lines = run_lines()
    assert "final_reward_low" not in figures_of(stretch_of(lines), 4)
    lines[-1] = {**lines[-1], "eval/reward_low": 0.5, "eval/reward_high": 0.9}
    figures = figures_of(stretch_of(lines), 4)
    interval = [figures[name] for name in ("final_reward_low", "final_reward", "final_reward_high")]
    assert interval == [0.5, 0.75, 0.9]


def test_speedup_is_the_median_ratio_to_the_baselines_run_of_the_same_seed() -> None:
    scales = {"base": (2.0, 4.0, 4.0), "fast": (1.0, 1.0, 2.0, 100.0)}  # the last one has no pair
    runs = [
        FinishedRun(profile=name, seed=seed, lines=run_lines(scale))
        for name in scales
        for seed, scale in enumerate(scales[name])
    ]
    base, fast = summarise(contestants("base", "fast"), runs)
    assert base.figures["speedup"] == Range(median=1.0, min=1.0, max=1.0)
    assert fast.figures["speedup"] == Range(median=2.0, min=2.0, max=4.0)
    assert base.limited_by is base.to_json()["bound_ratio"] is base.to_json()["capacities"] is None


def test_equal_versions_are_counted_against_the_baselines_run_of_the_same_seed() -> None:
    prints = {"base": {0: "a", 1: "b", 2: "c", 3: "d"}, "same": {0: "a", 1: "b"}, "other": {1: "b", 2: "x"}}
    runs = [
        FinishedRun(profile=name, seed=seed, lines=run_lines(), fingerprints=prints.get(name, {}))
        for name in (*prints, "ordinary")
        for seed in (0, 1)
    ]
    base, same, other, ordinary = summarise(contestants(*prints, "ordinary"), runs)
    assert base.median("equal_weights") == same.median("equal_weights") == 1.0
    assert other.median("equal_weights") == 0.5
    assert ordinary.median("equal_weights") is None
    alone = summarise(contestants("base", "same"), [run for run in runs if run.profile == "same"])
    assert alone[0].median("equal_weights") is None


def contestants(*names: str) -> list[Contestant]:
    return [Contestant(name=name, mode=name, step_groups=2, window_groups=2) for name in names]


def steps(count: int, step_groups: int, window_steps: int, **of_first: Any) -> list[dict[str, Any]]:
    """A run of `count` steps of 1 s each."""
    lines = [
        line(step, (step - 1) // window_steps, float(step), 1.0, groups_trained=step_groups * step)
        for step in range(1, count + 1)
    ]
    return [lines[0] | of_first, *lines[1:]]


def test_common_edges_lie_between_windows_of_the_longest() -> None:
    """48 groups: W = 4 and W = 16. The first 16 groups warm up, the last 16 run out."""
    short, long = steps(12, 4, 1), steps(12, 4, 4)
    edges = common_edges([short, long], 16)
    assert edges == Edges(begin_groups=16, end_groups=32)
    assert [len(stretch_of(lines, edges).lines) for lines in (short, long)] == [4, 4]
    assert [stretch_of(lines, edges).groups for lines in (short, long)] == [16, 16]


def test_common_edges_cut_what_is_no_whole_window() -> None:
    """56 groups, W = 16: the run-out is 40 to 56, and the stretch ends with the last whole window before
    it."""
    assert common_edges([steps(14, 4, 4)], 16) == Edges(begin_groups=16, end_groups=32)


def test_common_edges_begin_when_all_runs_have_scored_version_0() -> None:
    """One run scores it in its first step, one in its window 4 of 4 groups, which ends at group 20: in the
    second window of 16."""
    late = [entry | ({"eval/version": 0} if entry["window"] == 4 else {}) for entry in steps(24, 4, 1)]
    soon = steps(24, 4, 4, **{"eval/version": 0})
    assert common_edges([late, soon], 16) == Edges(begin_groups=32, end_groups=80)
    assert common_edges([soon], 16) == Edges(begin_groups=16, end_groups=80)


def test_version_0_scored_at_the_very_end_leaves_the_usual_warm_up() -> None:
    late = [entry | ({"eval/version": 0} if entry["window"] == 11 else {}) for entry in steps(12, 4, 1)]
    assert common_edges([late], 16) == Edges(begin_groups=16, end_groups=32)


def test_of_two_windows_the_second_is_measured_to_its_end() -> None:
    assert common_edges([steps(8, 4, 4), steps(8, 4, 1)], 16) == Edges(begin_groups=16, end_groups=32)


def test_runs_no_longer_than_the_longest_window_cannot_be_compared() -> None:
    with pytest.raises(AsyncrlError, match="first one is warm-up"):
        common_edges([steps(4, 4, 1), steps(4, 4, 4)], 16)


def test_a_profile_without_a_finished_run_has_no_result() -> None:
    results = summarise(contestants("base", "late"), [FinishedRun(profile="base", seed=0, lines=run_lines())])
    assert [result.profile for result in results] == ["base"]
