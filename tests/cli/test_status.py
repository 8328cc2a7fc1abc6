"""`asyncrl status` on several runs: one that runs, and others that are done, stopped, failed, killed,
damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from asyncrl_cli.base.paths import ADDRESS_VARIABLE
from asyncrl_cli.checkpoint.lookup import REPLAY, go_on
from asyncrl_cli.checkpoint.run_directory import RunDirectory, clear_lost
from asyncrl_cli.cli.app import run
from asyncrl_cli.cli.console import run_to_its_end
from asyncrl_cli.job.driver_loop import RunResult
from asyncrl_cli.job.driver_run import Run
from asyncrl_cli.observe.run_status import next_command
from asyncrl_cli.profile.schema import Profile
from tests.statuses import write_status

LOG = """2026-11-23 04:00:00,100 INFO asyncrl: importing
2026-11-23 04:00:07,100 ERROR asyncrl: rollout-0 gave no answer for 600 s
Traceback (most recent call last):
2026-11-23 04:00:09,100 INFO asyncrl: {"event": "checkpointed"}
"""


@pytest.fixture
def runs_dir(tmp_path: Path) -> Iterator[Path]:
    """Six runs, each older than the one before."""
    made = {name: RunDirectory.create(tmp_path, name, profile_toml="", resolved={}) for name in NAMES}
    for name in ("running", "done", "stopped"):
        write_status(made[name].path, phase=name)
    write_status(made["failed"].path, phase="failed", error="rollout-0 failed: out of memory\n  File x")
    write_status(made["killed"].path, phase="running", updated_at=0.0, pid=2**22 + 1)
    (made["killed"].start_attempt() / "driver.log").write_text(LOG, encoding="utf-8")
    (made["damaged"].status).write_text('{"schema_version": 2, ', encoding="utf-8")
    for name in ("stopped", "killed"):
        (made[name].checkpoints / "step-000004").mkdir()
    for age, directory in enumerate(made.values()):
        os.utime(directory.status if directory.status.exists() else directory.path, (1e9 - age, 1e9 - age))
        if directory.name != "running":
            directory.close()
    yield tmp_path
    made["running"].close()


NAMES = ("running", "done", "stopped", "failed", "killed", "damaged")


def test_every_run_has_a_row_with_its_state_and_what_to_do_next(runs_dir, capsys):
    assert run(["status", "--runs-dir", str(runs_dir), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["state"]) for row in rows] == [(name, name) for name in NAMES]
    assert [row["next"].removesuffix(f" --runs-dir {runs_dir}") for row in rows] == [
        "asyncrl status running",
        "asyncrl report done",
        "asyncrl resume stopped",
        "asyncrl logs failed",  # it has no checkpoint
        "asyncrl resume killed",
        "asyncrl logs damaged",
    ]
    assert [row["error"] for row in rows][3:5] == [
        "rollout-0 failed: out of memory",
        "rollout-0 gave no answer for 600 s",
    ]
    assert "status.json cannot be read" in rows[5]["error"]


def test_the_table_of_runs_fits_80_columns_and_names_nothing_in_part(runs_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["status", "--runs-dir", str(runs_dir)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert [line.split()[0] for line in out.splitlines()[1:] if line.split()[0] in NAMES] == list(NAMES)
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    said = " ".join(out.split())
    assert "killed: rollout-0 gave no answer for 600 s asyncrl resume killed --runs-dir" in said
    assert "failed: rollout-0 failed: out of memory asyncrl logs failed" in said
    assert "next: what to do with the run, as in `asyncrl" in said
    assert "NEXT RUN" not in said


def test_on_a_narrow_terminal_no_column_of_the_runs_is_lost(runs_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert run(["status", "--runs-dir", str(runs_dir)]) == 0
    heading, first, *_ = capsys.readouterr().out.splitlines()
    assert (heading.split()[0], heading.split()[-1]) == ("run", "next")
    assert (first.split()[0], first.split()[-1]) == ("running", "status")


def test_a_killed_run_in_depth_says_its_last_error_and_the_resume_line(runs_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["status", "killed", "--runs-dir", str(runs_dir)]) == 0
    out = capsys.readouterr().out
    assert f"ago; next: `asyncrl resume killed --runs-dir {runs_dir}`" in out
    assert "last error: rollout-0 gave no answer for 600 s" in out
    assert run(["status", "stopped", "--runs-dir", str(runs_dir)]) == 0
    assert f"next: asyncrl resume stopped --runs-dir {runs_dir}" in capsys.readouterr().out


def test_a_replay_that_failed_has_nothing_to_resume(runs_dir):
    (runs_dir / "failed" / "checkpoints" / "step-000008").mkdir()
    for failure, verb in (("", "resume"), ("version 3 differs", "report")):
        (runs_dir / "failed" / REPLAY).write_text(json.dumps({"failure": failure}), encoding="utf-8")
        assert next_command(runs_dir / "failed", "failed").startswith(f"asyncrl {verb} failed")


def test_a_replay_that_was_killed_is_replayed_again_and_never_trained(runs_dir):
    killed, run_path = runs_dir / "killed", runs_dir / "done"
    (killed / "checkpoints" / "step-000004").rmdir()
    changes = {"trainer.lr": 1e-6, "algorithm.loss_mode": "gspo", "trainer.shared_prefixes": False}
    replay = {"of": str(run_path), "from_step": 2, "changes": changes, "failure": ""}
    (killed / REPLAY).write_text(json.dumps(replay))
    sets = "--set trainer.lr=1e-06 --set 'algorithm.loss_mode=\"gspo\"' --set trainer.shared_prefixes=false"
    again = f"asyncrl replay {run_path}/step-2 {sets} --name killed --runs-dir {runs_dir}"
    assert next_command(killed, "killed") == again
    assert go_on(killed) == f"`{again}` replaces it"
    for of in ("", str(runs_dir / "stopped")):
        assert clear_lost(killed, replay_of=of) is None
    assert clear_lost(killed, replay_of=str(run_path)) is not None
    assert not killed.exists()


def test_the_only_run_may_have_only_just_started(tmp_path, capsys):
    young = RunDirectory.create(tmp_path, "young", profile_toml="", resolved={})
    assert run(["status", "--runs-dir", str(tmp_path)]) == 0
    log = f"`asyncrl logs young --runs-dir {tmp_path}`"
    assert capsys.readouterr().out == f"run 'young' is starting; its log: {log}\n"
    young.close()


def test_a_single_run_is_shown_in_depth(runs_dir, tmp_path, capsys):
    alone = tmp_path / "alone"
    alone.mkdir()
    (runs_dir / "done").rename(alone / "done")
    assert run(["status", "--runs-dir", str(alone)]) == 0
    assert "━━ asyncrl" in capsys.readouterr().out


@pytest.mark.parametrize(("ui", "said"), [("plain", True), ("none", False)])
def test_a_run_that_is_done_ends_with_the_next_command(ui, said, runs_dir, capsys, monkeypatch):
    monkeypatch.setattr("asyncrl_cli.job.driver_process.collect_garbage_seldom", lambda: None)

    class Done(Run):
        async def run(self) -> RunResult:
            return RunResult(run_dir=runs_dir / "done", exit_code=0, summary={})

    done = Done(Profile(), ui=ui)
    done.requests.take_signals = dict  # type: ignore[method-assign]
    with pytest.raises(typer.Exit):
        run_to_its_end(done, as_json=False)
    assert capsys.readouterr().err == (f"next: asyncrl report done --runs-dir {runs_dir}\n" if said else "")


def test_in_a_job_the_next_command_names_the_job_server_where_it_can(runs_dir, monkeypatch):
    monkeypatch.setenv(ADDRESS_VARIABLE, "http://head:8265")
    assert next_command(runs_dir / "stopped", "stopped") == (
        "asyncrl resume stopped --address http://head:8265"
    )
    assert next_command(runs_dir / "done", "done") == f"asyncrl report {runs_dir / 'done'}"
