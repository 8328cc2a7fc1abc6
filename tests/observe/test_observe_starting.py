"""What is said before the first step: how far a long part is, what it shows, how long it still takes."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from asyncrl_cli.observe.screen import ProgressLine


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def said(steps_s: list[float], total: int = 300, *, width: int | None = None) -> list[str]:
    """Lines of a warm start whose steps take so long; on a terminal of that width the last frame."""
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=width is not None, width=width or 80)
    with ProgressLine("auto", console, now=clock) as say:
        say("loading the model")
        for step, step_s in enumerate(steps_s, start=1):
            clock.now_s += step_s
            say("warm start", step, total, f"loss {1 / step:.2f}")
        say.bar.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n")
    return [line for line in text.split("\n") if line.strip()]


def seconds(line: str) -> int:
    """`0:00:41 left` of a line."""
    hours, minutes, seconds = map(int, re.search(r"(\d+):(\d\d):(\d\d) left", line).groups())
    return 3600 * hours + 60 * minutes + seconds


def test_without_a_terminal_a_line_every_few_seconds_has_step_percent_loss_and_time_left():
    lines = said([0.125] * 300)
    assert lines[:3] == [
        "loading the model",
        "warm start  1/300  0%  loss 1.00",
        "warm start  41/300  14%  loss 0.02  0:00:32 left",
    ]
    assert [seconds(line) for line in lines[2:]] == [32, 27, 22, 17, 12, 7, 2]


def test_what_came_before_the_first_item_is_not_in_the_time_left():
    lines = said([60.0, 6.0, 6.0, 6.0])  # an import, and then a tensor every six seconds
    assert "left" not in lines[1]
    assert [seconds(line) for line in lines[2:]] == [6 * (300 - step) for step in (2, 3, 4)]


def test_the_time_left_follows_a_neighbour_that_takes_the_core_and_goes_again():
    quiet, busy = 0.125, 0.5
    lines = said([quiet] * 300 + [busy] * 60 + [quiet] * 200, total=600)
    left_s = [(int(re.search(r"(\d+)/600", line)[1]), seconds(line)) for line in lines[2:]]
    for pace_s, first, last in ((quiet, 50, 300), (busy, 340, 360), (quiet, 490, 560)):
        told = [(step, left) for step, left in left_s if first <= step <= last]
        assert told
        for step, left in told:
            assert left == pytest.approx(pace_s * (600 - step), rel=0.1, abs=1)


def test_one_slow_step_hardly_moves_the_time_left():
    lines = said([0.1] * 100 + [2.0] + [0.1] * 60)
    assert all(seconds(line) < 30 for line in lines[2:])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_on_a_terminal_the_line_has_the_same_figures_and_the_bar_what_is_left_of_it(width):
    last = said([0.2] * 120, width=width)[-1]
    assert "warm start" in last
    assert "120/300  40%  loss 0.01  0:00:36 left" in last
    assert len(last.rstrip()) <= width


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_long_text_is_cut_and_neither_spinner_nor_clock(width):
    stream, clock = io.StringIO(), Clock()
    with ProgressLine("live", Console(file=stream, force_terminal=True, width=width), now=clock) as say:
        text = "the best play of builtin:calculator earns 0.930 per episode on average, by exhaustive search"
        for step in (1, 120):
            clock.now_s += 20.0
            say(text, step, 300, "loss 0.01")
        say.bar.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n")
    last = [line for line in text.split("\n") if line.strip()][-1]
    assert "\u2800" < last[0] < "\u28ff"  # a Braille pattern
    assert last.rstrip().endswith("0:00:20")
    assert len(last.rstrip()) <= width
    assert "120/300  40%" in last or width < 40


def test_a_path_is_shown_as_it_is():
    stream = io.StringIO()
    with ProgressLine("live", Console(file=stream, force_terminal=True, width=80)) as say:
        say("cached model /home/[bold]/tiny")
    assert "/home/[bold]/tiny" in stream.getvalue()


def test_nothing_is_said_where_nothing_is_wanted():
    stream = io.StringIO()
    with ProgressLine("none", Console(file=stream)) as say:
        say("warm start", 1, 2, "loss 1.00")
    assert stream.getvalue() == ""
