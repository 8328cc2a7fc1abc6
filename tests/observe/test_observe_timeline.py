"""timeline.jsonl: spans on the run's time, one line per step, also after a resume."""

import json
from dataclasses import replace

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.measure.states import Span, State
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.recorded import Recorded, add_span
from asyncrl_cli.observe.sinks import TimelineFile
from tests.observe.conftest import full_overview, full_record, record


def joined_timeline(lines):
    """A run's spans and counts of running sequences, by executor. A span split over two lines is joined."""
    spans, running = {}, {}
    for line in lines:
        for name, stretch in line["spans"].items():
            for span in stretch:
                add_span(spans.setdefault(name, []), *span)
        for name, samples in line.get("running", {}).items():
            running.setdefault(name, []).extend(samples)
    return spans, running


def test_spans_are_written_on_the_runs_time_and_read_back_joined(tmp_path, facts):
    path = tmp_path / "timeline.jsonl"
    observers = Observers(facts, [TimelineFile(path)], clock=lambda: 100.0)
    stays = [(State.STARVED, 100.0, 101.0), (State.BUSY, 101.0, 102.0)], [(State.BUSY, 102.0, 104.5)]
    for step, part in enumerate(stays, 1):
        spans = tuple(Span(state=state, start_s=start, end_s=end) for state, start, end in part)
        observers.step(record(step, 0, [], spans={"trainer": spans}))
    observers.close("done")
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    spans, running = joined_timeline(Recorded(tmp_path).timeline())
    assert spans == {"trainer": [("starved", 0.0, 1.0), ("busy", 1.0, 4.5)]}
    assert running == {}


def test_running_sequences_are_counted_with_every_status(tmp_path, facts):
    observers = Observers(facts, [TimelineFile(tmp_path / "timeline.jsonl")], clock=lambda: 3.25)
    observers.tick(full_overview(replace(full_record(1), ended_s=3.25)))
    observers.step(record(1, 0, []))
    observers.close("done")
    running = joined_timeline(Recorded(tmp_path).timeline())[1]
    assert running == {"rollout-0": [(3.25, 57)], "rollout-1": [(3.25, 57)]}


GOOD = b'{"step": 1, "spans": {"trainer": [["busy", 0.0, 1.0]]}, "running": {"rollout-0": [[0.5, 3]]}}\n'


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (b'{"step": 2, "spans": {"trai\n', "line 2: invalid JSON"),
        (b'{"step": 2, "spans": {"trai\n' + GOOD, "line 2: invalid JSON"),
        (b'{"step": 2}\n', "line 2: spans: "),
        (b'{"step": 2, "spans": {"trainer": [["busy", 0.0]]}}\n', "line 2: spans.trainer.0.2: "),
        (
            b'{"step": 2, "spans": {"trainer": [["busy", 3.0, 2.0]]}}\n',
            "line 2: spans.trainer.0: it ends before it begins",
        ),
        (b'{"step": 2, "spans": {}, "running": {"rollout-0": 7}}\n', "line 2: running.rollout-0: "),
        (b"\xff\xfe\n", "line 2: "),
    ],
)
def test_a_damaged_line_of_a_timeline_is_left_out_and_said(tmp_path, damaged, reason):
    path, run = tmp_path / "timeline.jsonl", Recorded(tmp_path)
    path.write_bytes(GOOD + damaged)
    assert joined_timeline(run.timeline())[0]["trainer"][0] == ("busy", 0.0, 1.0)
    (note,) = run.damage.notes
    assert f"{path} left out: 1; {reason}" in note


def test_a_timeline_that_is_no_file_is_one_error_with_its_path(tmp_path):
    (tmp_path / "timeline.jsonl").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: it is a directory") as caught:
        list(Recorded(tmp_path).timeline())
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint
