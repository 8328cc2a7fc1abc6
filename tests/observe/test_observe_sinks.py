"""The files of a run: whole lines, also after a kill; one line per step, also after a resume; sinks that
fail."""

import errno
import json
import os
import subprocess
import sys

import pytest

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.contracts.events import Event
from asyncrl_cli.contracts.prompt_group import AttemptKey
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.sinks import EventsFile, MetricsFile, Sink, StatusFile


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Clock:
    def __init__(self, now_s=0.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


@pytest.mark.parametrize("whole", [["running", "finished"], []])
def test_a_half_last_line_is_cut_off_when_the_file_is_opened_again(whole, tmp_path, done):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f'{{"event": "{name}"}}\n' for name in whole) + '{"event": "tra')
    events = EventsFile(path)
    events.event({"event": "resumed"})
    events.close(done)
    assert [line["event"] for line in lines_of(path)] == [*whole, "resumed"]


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(RefusedError, match=r"metrics.jsonl cannot be continued: it is a pipe, not a file"):
        MetricsFile(tmp_path / "metrics.jsonl")


@pytest.mark.slow
def test_a_killed_writer_has_handed_over_every_line(tmp_path):
    path = tmp_path / "events.jsonl"
    program = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from asyncrl_cli.observe.sinks import EventsFile\n"
        "events = EventsFile(Path(sys.argv[1]))\n"
        "for i in range(50): events.event({'event': 'running', 'i': i})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert ended.returncode == -9
    assert [line["i"] for line in lines_of(path)] == list(range(50))


def test_a_resume_takes_back_the_lines_of_steps_that_happen_again(tmp_path, done):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 8)) + '{"st')
    metrics = MetricsFile(path)
    metrics.event({"event": "resumed", "from_step": 4})
    metrics.line({"step": 5, "again": True})
    metrics.close(done)
    assert [line["step"] for line in lines_of(path)] == [1, 2, 3, 4, 5]
    assert lines_of(path)[-1]["again"] is True


def test_figures_that_are_not_finite_are_strict_json_and_stay_visible(tmp_path, done):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.line({"step": 1, "train/grad_norm": float("nan"), "staleness/histogram": [1, 2]})
    metrics.close(done)
    assert lines_of(tmp_path / "metrics.jsonl") == [
        {"step": 1, "train/grad_norm": "nan", "staleness/histogram": [1, 2]}
    ]


def test_every_observer_call_reaches_the_files(tmp_path, facts, make):
    clock = Clock()
    sinks = [
        MetricsFile(tmp_path / "m.jsonl"),
        EventsFile(tmp_path / "e.jsonl"),
        StatusFile(tmp_path / "status.json"),
    ]
    observers = Observers(facts, sinks, clock=clock)
    assert json.loads((tmp_path / "status.json").read_text())["phase"] == "starting"
    observers.event(Event(time_s=0.5, name="running", key=AttemptKey("p7", 1, 0), version=0, step=0))
    clock.now_s = 1.0
    made = make["full_record"](1)
    observers.step(made)
    observers.tick(make["full_overview"](made))
    observers.event(Event(time_s=1.2, name="warning", fields={"message": "slow"}))
    observers.close("done")
    assert lines_of(tmp_path / "m.jsonl")[0]["step"] == 1
    group = {"group": "p7@1.0", "uid": "p7", "epoch": 1, "attempt": 0}
    first = lines_of(tmp_path / "e.jsonl")[0]
    assert first == {"time_s": 0.5, "event": "running", **group, "version": 0, "step": 0}
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["schema_version"], status["name"], status["phase"]) == (2, "brave-otter", "done")
    assert status["warnings"] == [{"time_s": 1.2, "text": "slow"}]
    assert status["ledger"] == dict(made.ledger)
    assert status["versions"] == {"rollout-0": 1, "rollout-1": 0}


def test_lines_are_stamped_with_the_runs_own_time(tmp_path, facts, make):
    # The loop says that the run is 500 s old while the driver's clock shows 9000.
    clock = Clock(9000.0)
    observers = Observers(facts, [MetricsFile(tmp_path / "m.jsonl")], clock=clock)
    observers.event(Event(time_s=500.0, name="resumed", fields={"from_step": 0}))
    clock.now_s = 9010.0
    observers.step(make["record"](1, 0, [], ended_s=9010.0))
    observers.close("done")
    assert lines_of(tmp_path / "m.jsonl")[0]["time_s"] == pytest.approx(510.0)


def test_histories_survive_a_resume(facts, make):
    first = Observers(facts, [], clock=Clock())
    first.step(make["full_record"](1))
    first.event(Event(time_s=1.0, name="eval", version=0, fields={"reward_mean": 0.3, "num_prompts": 8}))
    state = json.loads(json.dumps(first.state()))
    second = Observers(facts, [], clock=Clock())
    second.restore(state)
    status = second.live.picture()
    assert len(status.reward["history"]) == 1
    assert status.eval.history == [{"version": 0, "reward_mean": 0.3, "num_prompts": 8}]


def test_a_sink_that_fails_is_left_out_with_a_warning_and_the_others_go_on(tmp_path, facts, make):
    class Full(Sink):
        calls = 0

        def line(self, line):
            Full.calls += 1
            raise OSError(28, "No space left on device")

    observers = Observers(facts, [Full(), MetricsFile(tmp_path / "m.jsonl")], clock=Clock())
    observers.step(make["full_record"](1))
    observers.step(make["full_record"](2))
    status = observers.close("done")
    assert Full.calls == 1
    assert [line["step"] for line in lines_of(tmp_path / "m.jsonl")] == [1, 2]
    assert "No space left" in status["warnings"][0]["text"]


def test_the_remaining_time_follows_the_pace_of_the_last_steps(facts, make):
    clock = Clock()
    observers = Observers(facts, [], clock=clock)
    for step in (1, 2, 3):
        clock.now_s = 2.0 * step
        observers.step(make["record"](step, step, [], ended_s=2.0 * step))
    progress = observers.live.picture().progress
    assert progress.eta_s == pytest.approx((300 - 3) * 2.0)
    assert progress.fraction == pytest.approx(0.01)


def test_a_sink_on_a_full_disk_gets_the_last_word_when_there_is_room_again(facts):
    class Full(Sink):
        closed = 0

        def status(self, status):
            raise OSError(errno.ENOSPC, "No space left on device", "status.json")

        def close(self, status):
            self.closed += 1

    sink = Full()
    Observers(facts, [sink], clock=lambda: 0.0).close("failed", "the disk is full")
    assert sink.closed == 1
