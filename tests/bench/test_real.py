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
from asyncrl_cli.bench import compare, real
from asyncrl_cli.bench.compare import compare_real, contest_of
from asyncrl_cli.bench.real import RealRun, make_run, runs_of
from asyncrl_cli.simulate.capacities import Capacities

SETS = ("placement.device=cpu",)


class Quiet:
    def run(self, name: str, groups: int, total: int, **told: Any) -> None: ...

    def note(self, text: str, done: int, total: int) -> None: ...

    def say(self, text: str) -> None: ...


def runs(directory: Path, seeds: tuple[int, ...] = (0,)) -> list[RealRun]:
    contest = contest_of("colocate", ["partial-rollout"], sets=SETS)
    return runs_of(contest.entries, seeds, contest.groups, directory)


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Every run is this program; its arguments are the run's directory."""
    monkeypatch.setattr(real, "POLL_S", 0.05)
    monkeypatch.setattr(RealRun, "command", lambda run: [sys.executable, "-c", code, str(run.directory)])


def test_repeats_are_interleaved_and_seeds_shared(tmp_path: Path) -> None:
    made = [(run.name, run.seed) for run in runs(tmp_path, (5, 6))]
    assert made == [
        ("colocate-r0", 5),
        ("partial-rollout-r0", 5),
        ("colocate-r1", 6),
        ("partial-rollout-r1", 6),
    ]


def test_the_command_is_what_a_user_would_type(tmp_path: Path) -> None:
    command = " ".join(runs(tmp_path)[1].command())
    assert "-m asyncrl_cli train --profile partial-rollout --set placement.device=cpu" in command
    assert (
        "--set run.total_rollout_steps=384 --set eval.every_versions=0 --set checkpoint.every_steps=0"
    ) in command
    assert f"--runs-dir {tmp_path} --name partial-rollout-r0 --ui none" in command
    assert command.endswith("--address local")
    there = replace(runs(tmp_path)[1], address="10.0.0.1:6379")
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
    monkeypatch.setattr(real, "STOP_EXTRA_S", 0.05)
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
        monkeypatch.setattr(real, "_wait", lambda child, limit_s, interrupts: child.poll())
        real.end(stubborn, 0.05, [])
        killing.cancel()
    assert stubborn.returncode == -signal.SIGKILL


LINES = """
import json, sys
from pathlib import Path
run = Path(sys.argv[1])
if "partial" in run.name:
    sys.exit(print("the trainer died", file=sys.stderr) or 1)
run.mkdir()
with (run / "metrics.jsonl").open("w") as file:
    for step in range(1, 5):
        line = {"step": step, "window": step - 1, "version": step, "time_s": 2.0 * step, "groups_trained": 96 * step,
                "tokens_trained": 960 * step, "timing/step_s": 2.0, "response_tokens/mean": 10.0, "staleness/histogram": [96]}
        print(json.dumps(line), file=file)
"""


def test_each_repeat_is_held_against_what_the_machine_could_do_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is twice as fast in the second repeat: the runs, which are not, reach half as much of
    their bound."""
    child(monkeypatch, LINES.replace('"partial" in run.name', "False"))
    asked: list[tuple[list[tuple[str, int]], int]] = []

    def with_capacities(entries: Any, runs: Any, watcher: Any, repeats: int) -> Any:
        asked.append(([(run.profile, run.seed) for run in runs], repeats))
        speed = 1000.0 * (1 + runs[0].seed)
        made = Capacities(rollout_tokens_per_s=10 * speed, trainer_tokens_per_s=speed, colocated=False)
        return [replace(run, capacities=made) for run in runs], ("doubtful",)

    monkeypatch.setattr(compare, "with_capacities", with_capacities)
    compared = compare_real(
        contest_of("colocate", ["partial-rollout"], sets=SETS, seeds=(0, 1)), tmp_path, Quiet()
    )
    assert compared.error is None
    assert asked == [([("colocate", seed), ("partial-rollout", seed)], 2) for seed in (0, 1)]
    assert compared.remarks == ("doubtful",)
    for result in compared.results:
        ratio = result.figures["bound_ratio"]
        # 960 tokens of a 2 s step, at 1,000 per second
        assert (ratio.min, ratio.max) == pytest.approx((0.48 / 2, 0.48))


def test_what_is_finished_is_kept_when_a_later_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, LINES)
    compared = compare_real(contest_of("colocate", ["partial-rollout"], sets=SETS), tmp_path, Quiet())
    assert isinstance(compared.error, AsyncrlError)
    assert "the trainer died" in str(compared.error)
    assert [result.profile for result in compared.results] == ["colocate"]
    assert compared.results[0].figures["groups_per_s"].median == 48.0
    assert compared.missing == ("partial-rollout-r0",)


def test_without_a_run_of_the_baseline_there_is_only_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, LINES.replace('"partial" in run.name', "True"))
    with pytest.raises(AsyncrlError, match="the trainer died"):
        compare_real(contest_of("colocate", ["partial-rollout"], sets=SETS), tmp_path, Quiet())
