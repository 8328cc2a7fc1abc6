"""The trainer's devices generate while the trainer waits, in a real run that is killed and resumed
(`placement.lend`)."""

import os
import signal

import pytest

from asyncrl_cli.cli.app import run as asyncrl
from tests.run.commands import SMALL, descendants, finish, lines, start, wait_until, wait_until_gone

pytestmark = pytest.mark.slow

SETS = (
    *SMALL,
    "placement.lend=true",
    "rollout.slots=4",
    "rollout.prefetch_groups=0",
    "run.train_steps=12",
    "async_training.trigger_parameter_sync_step=2",
    "async_training.staleness_threshold=1",
    "logging.samples_every_steps=1",
)
"""A step takes four groups, and the worker of its own generates one at a time: the trainer starves."""


def named(run, name):
    return [event for event in lines(run / "events.jsonl") if event["event"] == name]


def test_a_run_with_lent_devices_is_killed_resumed_and_audited(tmp_path, monkeypatch, capsys):
    run = tmp_path / "runs" / "lent"
    words = ("--profile", "partial-rollout", "--name", "lent", "--ui", "plain")
    process = start(tmp_path, "train", *words, sets=SETS)
    wait_until(process, lambda: len(named(run, "recalled")) >= 4, "four recalls")
    family = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not wait_until_gone(family)

    code, _, err = finish(start(tmp_path, "resume", "lent", "--ui", "plain"))
    assert code == 0, err
    assert "disagrees with the trainer" not in err
    assert {name for event in named(run, "lent") for name in event["workers"]} == {"rollout-1"}
    assert len(named(run, "recalled")) > 5
    assert any(event.get("kept_tokens") for event in named(run, "replaced"))
    assert not named(run, "away")
    metrics = lines(run / "metrics.jsonl")
    assert metrics[-1]["groups_trained"] == 48
    assert sum(line["placement/lent_tokens"] for line in metrics) > 0
    monkeypatch.chdir(tmp_path)
    code, said = asyncrl(["audit", "lent"]), capsys.readouterr()
    assert code == 0, said
    assert "lent devices" in said.out
