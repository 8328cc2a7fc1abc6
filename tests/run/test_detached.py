"""A run that its terminal does not own: detached, ended by what a scheduler sends, and begun again by the same command."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.run.commands import LONG, alive, descendants, finish, kill, lines, start, wait_for_steps, wait_until_gone

pytestmark = pytest.mark.slow


def test_a_detached_run_ends_in_order_at_the_signals_of_a_machine_and_the_same_command_resumes_it(tmp_path):
    words = ("--profile", "partial-rollout", "--name", "apart", "--resume", "auto")
    code, out, err = finish(start(tmp_path, "train", *words, "--detach", "--json", sets=LONG, verbose=False))
    assert code == 0, err
    assert "asyncrl watch apart" in err
    pid, run = json.loads(out)["pid"], tmp_path / "runs" / "apart"
    try:
        assert os.getsid(pid) == pid  # no terminal's SIGHUP reaches it
        until_s = time.monotonic() + 120
        while len(lines(run / "metrics.jsonl")) < 2:
            assert alive({pid})
            assert time.monotonic() < until_s
            time.sleep(0.1)
        family = descendants(pid)
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
            os.killpg(pid, number)
        assert not wait_until_gone({pid}, 60.0)
        assert not wait_until_gone(family, 10.0)
    finally:
        if alive({pid}):
            os.kill(pid, signal.SIGKILL)
    assert json.loads((run / "status.json").read_text())["phase"] == "stopped"
    steps = len(lines(run / "metrics.jsonl"))
    assert (run / "checkpoints" / f"step-{steps:06d}" / "manifest.json").exists()

    again = start(tmp_path, "train", *words, "--ui", "plain", sets=LONG)
    wait_for_steps(again, run, steps + 1)
    kill(again, signal.SIGTERM)
    code, _, err = finish(again)
    assert code == 130
    assert f"run 'apart' goes on from step {steps}" in err
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == list(range(1, len(lines(run / "metrics.jsonl")) + 1))
