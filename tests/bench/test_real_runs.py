"""Real runs as child processes: their failures are told, and none is left behind. The child is a script of
the test's."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.base.errors import AsyncrlError, ConfigError
from asyncrl_cli.bench import comparison as comparisons
from asyncrl_cli.bench.comparison import RealRun, compare, make_run, runs_of
from asyncrl_cli.bench.contest import contest_of
from tests.bench.quiet import Quiet

SETS = ("placement.device=cpu",)


def runs(directory: Path, seeds: tuple[int, ...] = (0,)) -> list[RealRun]:
    return runs_of(contest_of("colocate", ["partial-rollout"], sets=SETS, seeds=seeds), directory)


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Every run is this program; its arguments are the run's directory."""
    monkeypatch.setattr(comparisons, "POLL_S", 0.05)
    monkeypatch.setattr(RealRun, "command", lambda run: [sys.executable, "-c", code, str(run.directory)])


def test_repeats_are_interleaved_and_seeds_shared(tmp_path: Path) -> None:
    made = [(run.name, run.seed) for run in runs(tmp_path, (5, 6))]
    assert made[:2] == [("colocate-r0", 5), ("partial-rollout-r0", 5)]
    assert made[2:] == [("colocate-r1", 6), ("partial-rollout-r1", 6)]


def test_the_command_is_what_a_user_would_type(tmp_path: Path) -> None:
    command = " ".join(runs(tmp_path)[1].command())
    assert "-m asyncrl_cli train --profile partial-rollout --set placement.device=cpu" in command
    keys = ("run.total_rollout_steps=384", "eval.every_versions=0", "checkpoint.every_steps=0")
    assert " ".join(f"--set {key}" for key in keys) in command
    assert f"--runs-dir {tmp_path} --name partial-rollout-r0 --ui none" in command
    assert command.endswith("--address local")
    run = runs(tmp_path)[1]
    there = replace(run, contest=replace(run.contest, address="10.0.0.1:6379"))
    assert there.command()[-2:] == ["--address", "10.0.0.1:6379"]


def test_a_failing_run_tells_its_own_error_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(
        monkeypatch,
        "import json, sys; sys.exit(print(json.dumps({'error': 'no such task', 'hint': 'look'})) or 2)",
    )
    with pytest.raises(ConfigError, match=r"colocate-r0 failed \(exit 2\): no such task") as failed:
        make_run(runs(tmp_path)[0], Quiet())
    assert failed.value.hint.startswith("look; its log: ")
    assert "colocate-r0.log" in failed.value.hint


def test_an_interrupted_run_is_asked_to_stop_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import signal, sys\nfrom pathlib import Path\nsignal.pthread_sigmask(signal.SIG_BLOCK, "
        "{signal.SIGINT})\n"
        "Path(sys.argv[1] + '.ready').touch()\n"
        "assert signal.sigtimedwait({signal.SIGINT}, 60)\nPath(sys.argv[1] + '.stopped').touch()\n"
    )
    child(monkeypatch, code)
    run = runs(tmp_path)[0]

    class Interrupting(Quiet):
        def run(self, *arguments: Any, **told: Any) -> None:
            if Path(f"{run.directory}.ready").exists():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_run(run, Interrupting())
    assert Path(f"{run.directory}.stopped").exists()


def test_a_run_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparisons, "STOP_EXTRA_S", 0.05)
    code = (
        "import signal\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\nprint('ready', "
        "flush=True)\nsignal.pause()"
    )
    stubborn = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert stubborn.stdout is not None
    with stubborn.stdout as said:
        assert said.readline() == b"ready\n"
        killing = threading.Timer(10, stubborn.kill)
        killing.start()
        monkeypatch.setattr(comparisons, "_wait", lambda child, limit_s, interrupts: child.poll())
        comparisons.end(stubborn, 0.05, [])
        killing.cancel()
    assert stubborn.returncode == -signal.SIGKILL


LINES = """
import json, sys
from pathlib import Path
run = Path(sys.argv[1])
if "partial" in run.name and PARTIAL_FAILS:
    sys.exit(print("the trainer died", file=sys.stderr) or 1)
run.mkdir()
with (run / "metrics.jsonl").open("w") as file:
    for step in range(1, 5):
        line = {"step": step, "window": step - 1, "version": step, "time_s": 2.0 * step, "timing/step_s": 2.0,
                "groups_trained": 96 * step, "tokens_trained": 960 * step, "response_tokens/mean": 10.0,
                "staleness/histogram": [96], "trainer/idle_ratio": 0.75, "rollouter/idle_ratio": 0.4}
        print(json.dumps(line), file=file)
"""


def test_real_runs_have_the_bound_of_what_they_were_busy_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each 2 s step the trainer computes 0.5 s and the workers 1.2 s: 1.7 s in turns, 1.2 s apart."""
    child(monkeypatch, LINES.replace("PARTIAL_FAILS", "False"))
    contest = contest_of("colocate", ["partial-rollout"], sets=SETS, seeds=(0, 1))
    compared = compare(contest, tmp_path, Quiet())
    assert (compared.error, compared.remarks) == (None, ())
    assert [result.figures["bound_ratio"].median for result in compared.results] == pytest.approx([0.85, 0.6])
    assert {result.limited_by for result in compared.results} == {"generation"}
    # 96 groups in 2 s, and W of the baseline is 16
    assert [result.median("ideal_s") for result in compared.results] == pytest.approx([1.7 / 6, 1.2 / 6])
    assert [result.to_json()["capacities"] for result in compared.results] == [None, None]


def test_what_is_finished_is_kept_when_a_later_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, LINES.replace("PARTIAL_FAILS", "True"))
    compared = compare(contest_of("colocate", ["partial-rollout"], sets=SETS), tmp_path, Quiet())
    assert isinstance(compared.error, AsyncrlError)
    assert "the trainer died" in str(compared.error)
    assert [result.profile for result in compared.results] == ["colocate"]
    assert compared.results[0].figures["groups_per_s"].median == 48.0
    assert compared.missing == ("partial-rollout-r0",)


def test_without_a_run_of_the_baseline_there_is_only_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, LINES.replace('"partial" in run.name and PARTIAL_FAILS', "True"))
    with pytest.raises(AsyncrlError, match="the trainer died"):
        compare(contest_of("colocate", ["partial-rollout"], sets=SETS), tmp_path, Quiet())
