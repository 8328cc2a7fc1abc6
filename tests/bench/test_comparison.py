"""What a comparison says of itself before its speedup: too short, not the same tokens, nothing to tell
idleness from."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from asyncrl_cli.bench.bars import Bars
from asyncrl_cli.bench.comparison import comparison_of
from asyncrl_cli.bench.contest import contest_of
from asyncrl_cli.bench.output import rows_of
from asyncrl_cli.bench.results import Comparison, FinishedRun

SETS = ("placement.device=cpu",)


def lines(groups: int, *, step_s: float, tokens: int, eval_s: float = 0.0) -> list[dict[str, Any]]:
    """Steps of 16 groups; `tokens` in each response."""
    return [
        {
            "step": step,
            "window": step - 1,
            "version": step,
            "time_s": step_s * step,
            "groups_trained": 16 * step,
            "tokens_trained": 16 * tokens * step,
            "timing/step_s": step_s,
            "timing/eval_s": eval_s,
            "response_tokens/mean": float(tokens),
            "staleness/histogram": [16],
            "trainer/idle_ratio": 0.25,
        }
        for step in range(1, groups // 16 + 1)
    ]


def compared(groups: int, base: dict[str, Any], other: dict[str, Any]) -> Comparison:
    """Colocate, W = 16, and partial-rollout, W = 64."""
    runs = [
        FinishedRun(profile="colocate", seed=0, lines=lines(groups, **base)),
        FinishedRun(profile="partial-rollout", seed=0, lines=lines(groups, **other)),
    ]
    contest = contest_of("colocate", ["partial-rollout"], sets=SETS, groups=groups)
    return comparison_of(contest, runs)


def test_one_measured_window_is_told_as_short_and_the_default_is_not() -> None:
    same = {"step_s": 1.0, "tokens": 10}
    (remark,) = compared(192, same, same).remarks
    assert remark.startswith("Short: 64 groups are measured, and the longest window has 64.")
    enough = int(remark.partition("--groups ")[2].split()[0])
    assert compared(enough, same, same).remarks == compared(384, same, same).remarks == ()


def test_a_speedup_over_other_tokens_has_its_ratio_per_token_beside_it() -> None:
    """Three times as many groups per second, of answers half as long: one and a half times the tokens."""
    made = compared(384, {"step_s": 3.0, "tokens": 20}, {"step_s": 1.0, "tokens": 10})
    assert any("up to 100% more tokens in one profile than in another" in remark for remark in made.remarks)
    rows = [row.label for row in rows_of(made)]
    assert rows.index("  per token") == rows.index("speedup") + 1
    cells = {row.label: row.cells for row in rows_of(made)}
    assert (cells["speedup"], cells["  per token"]) == (("1.00x", "3.00x"), ("1.00x", "1.50x"))
    assert made.to_json()["results"][1]["speedup_per_token"] == 1.5


def test_idle_figures_are_a_dash_and_the_reason_is_said_where_an_eval_ran_beside_every_step() -> None:
    made = compared(384, {"step_s": 3.0, "tokens": 10, "eval_s": 1.0}, {"step_s": 1.0, "tokens": 10})
    cells = {row.label: row.cells for row in rows_of(made)}
    assert cells["trainer idle"] == ("-", "25%")
    assert cells["slots used"] == ("-", "-")
    (remark,) = made.remarks
    assert remark.startswith("No idle figures where an eval ran beside every measured step")


def test_the_bar_of_a_real_run_ends_at_the_wall_time_of_the_table() -> None:
    """Its groups were trained 19 s before its final eval ended, and the bar stood still meanwhile."""
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Bars(screen) as bars:
        bars.run("colocate-r0", 0, 96)
        bars.run("colocate-r0", 0, 96, time_s=0.0, phase="starting")
        bars.run("colocate-r0", 96, 96, time_s=25.0, phase="running")
        bars.run("colocate-r0", 96, 96, time_s=40.0, phase="evaluating")
        bars.refresh()
        during = screen.file.getvalue()  # type: ignore[attr-defined]
        bars.run("colocate-r0", 96, 96, time_s=44.0)
    assert isinstance(screen.file, io.StringIO)
    assert "colocate-r0 (evaluating)" in during
    assert "0:00:40" in during
    assert screen.file.getvalue().rindex("0:00:44") > screen.file.getvalue().rindex("0:00:40")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_bench_without_a_terminal_says_each_part_with_its_clock_and_the_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    with Bars(Console(file=stream, width=200), now=clock) as bars:
        for name in ("a-r0", "b-r0"):
            bars.run(name, 0, 96)
        for now_s, groups, phase, left_s in (
            (0, 0, "starting: warm start  1/300", None),
            (5, 0, "starting: warm start  1/300", None),
            (20, 0, "starting: warm start  1/300", None),
            (30, 0, "running", None),
            (40, 24, "running", 77.0),
            (50, 48, "running", 60.0),
            (60, 96, "evaluating", None),
            (61, 96, "evaluating", None),
            (62, 96, "done", None),
            (63, 96, "done", None),
        ):
            clock.now_s = now_s
            bars.run("a-r0", groups, 96, time_s=max(0.0, now_s - 30), phase=phase, left_s=left_s)
    assert stream.getvalue().split("\n")[:-1] == [
        "a-r0 (starting: warm start  1/300)  0/96  0:00:00",
        "a-r0 (starting: warm start  1/300)  0/96  0:00:20",
        "a-r0  0/96  0:00:30",
        "a-r0  48/96  0:00:20  0:01:00 left",
        "a-r0 (evaluating)  96/96  0:00:30",
        "a-r0  96/96  0:00:32",
    ]


def test_runs_at_the_same_time_have_a_line_each_every_15_seconds_without_a_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with Bars(Console(file=stream, width=200), now=clock) as bars:
        for groups in range(1, 17):
            clock.now_s = float(groups)
            bars.run("a-s0", groups, 96)
            bars.run("b-s0", groups, 96)
    assert [line.split()[:2] for line in stream.getvalue().splitlines()] == [
        [name, f"{groups}/96"] for groups in (1, 16) for name in ("a-s0", "b-s0")
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_no_clock_of_a_bench_is_cut_and_all_of_it_has_one(width: int) -> None:
    stream, clock = io.StringIO(), Clock()
    with Bars(Console(file=stream, force_terminal=True, width=width), now=clock) as bars:
        for name in ("agent-guess-partial-rollout-r0", "colocate-r0"):
            bars.run(name, 0, 96)
        clock.now_s = 30
        bars.run("agent-guess-partial-rollout-r0", 24, 96, time_s=12.0, phase="running", left_s=77.0)
        bars.refresh()
        shown = stream.getvalue()
    for told in ("0:00:12  0:01:17 left", "all: 0 of 2 runs", "24/192", "0:00:30  0:03:30 left"):
        assert told in shown, told
