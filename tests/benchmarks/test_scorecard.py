"""The table of the scorecard: what is fitted, what is predicted, and what lies outside its interval."""

from __future__ import annotations

import math
import sys

import pytest

from asyncrl_cli.simulate.workload import Reference
from benchmarks import scorecard


def row(workload: str, predicted: float, *, calibrated: bool = False) -> scorecard.Row:
    return scorecard.Row(
        workload=workload,
        reference=Reference(profile="colocate", window_time_s=100.0, calibrated=calibrated, source="4 GPUs"),
        figure=scorecard.WINDOW,
        published=100.0,
        predicted=predicted,
        spread=0.1,
    )


@pytest.mark.parametrize(("option", "is_whole"), [([], True), (["--miniature"], False)])
def test_rows_are_whole_unless_asked_and_a_miss_is_marked(
    option: list[str], is_whole: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The deviation that b's row needs widens a's interval, and a's, which needs none, not b's: e^0.5 is
    beyond e^(1.645 * 0.1)."""
    found = {"a-one": [row("a-one", 101.0, calibrated=True), row("a-one", 105.0)]}
    found["b-one"] = [row("b-one", 100.0 * math.exp(0.5))]
    asked = []

    def scored(pool: object, name: str, *, is_whole: bool) -> list[scorecard.Row]:
        asked.append(is_whole)
        return found[name]

    monkeypatch.setattr(scorecard, "scored", scored)
    monkeypatch.setattr(sys, "argv", ["scorecard", "a-one", "b-one", *option])
    scorecard.main()
    lines = capsys.readouterr().out.splitlines()
    assert asked == [is_whole, is_whole]
    assert [line.endswith("MISS") for line in lines[1:4]] == [False, False, True]
    assert "2 predicted rows: 1 within 10% (50%; goal 80%), 1 inside" in lines[-1]
