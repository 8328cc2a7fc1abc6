"""Damaged and foreign checkpoints are refused with what is wrong and the way out; CHECKPOINT|RUN is found."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.checkpoint.lookup import find_run, go_on, refuse_ended, resolve
from asyncrl_cli.checkpoint.reader import load_checkpoint, newest_intact
from asyncrl_cli.checkpoint.writer import CheckpointStore
from asyncrl_cli.contracts.ports import LoopSnapshot


async def write_trainer(directory, snapshot):
    (directory / "rank-0.bin").write_bytes(b"weights" * 1000)


@pytest.fixture
def run_dir(tmp_path):
    """A run with the whole checkpoints 20 and 40."""
    run_dir = tmp_path / "otter"
    run_dir.mkdir()
    (run_dir / "profile.toml").write_text("")
    store = CheckpointStore(run_dir, keep=3, profile="p", write_trainer=write_trainer)
    for step in (20, 40):
        asyncio.run(
            store.write(
                LoopSnapshot(step=step, version=step, at_window_boundary=True, loop_state={"step": step})
            )
        )
    return run_dir


def truncate(directory):
    with (directory / "rank-0.bin").open("r+b") as file:
        file.truncate(100)


def flip_bit(directory):
    content = bytearray((directory / "rank-0.bin").read_bytes())
    content[3456] ^= 1
    (directory / "rank-0.bin").write_bytes(content)


def alter_manifest(directory):
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"version": 40', '"version": 41'))


def change_schema(directory):
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))


DAMAGES = [
    (truncate, "rank-0.bin has 100 bytes, not 7000"),
    (flip_bit, "rank-0.bin was altered"),
    (alter_manifest, "manifest.json was altered"),
    (change_schema, "schema_version 2, not 1"),
    (lambda directory: (directory / "manifest.json").unlink(), "manifest.json is missing"),
    (lambda directory: (directory / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    (
        lambda directory: (directory / "manifest.json").write_text('{"format": "hf"}'),
        "not the manifest of an asyncrl checkpoint",
    ),
    (lambda directory: (directory / "rank-0.bin").unlink(), "rank-0.bin is missing"),
    (lambda directory: (directory / "loop_state.json").write_text("{}"), "loop_state.json has 2 bytes"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_what_is_wrong_and_the_newest_intact_one(run_dir, damage, said):
    directory = run_dir / "checkpoints" / "step-000040"
    damage(directory)
    with pytest.raises(RefusedError) as caught:
        load_checkpoint(directory)
    assert said in caught.value.message
    assert caught.value.exit_code == 4
    assert str(run_dir / "checkpoints" / "step-000020") in caught.value.hint
    assert newest_intact(run_dir / "checkpoints") == run_dir / "checkpoints" / "step-000020"


def test_a_renamed_checkpoint_does_not_pass_for_another_step(run_dir):
    moved = (run_dir / "checkpoints" / "step-000040").rename(run_dir / "checkpoints" / "step-000060")
    with pytest.raises(RefusedError, match=r"is refused: the directory's name does not fit its step 40$"):
        load_checkpoint(moved)


def test_a_run_or_a_checkpoint_is_found_by_name_and_by_directory(run_dir):
    newest, runs_dir = run_dir / "checkpoints" / "step-000040", run_dir.parent
    assert resolve("otter", runs_dir) == newest
    assert resolve(str(run_dir), runs_dir / "elsewhere") == newest
    assert resolve(str(newest), runs_dir) == newest
    assert resolve(str(run_dir / "checkpoints" / "latest"), runs_dir) == newest
    assert resolve(str(run_dir / "checkpoints" / "step-000020"), runs_dir).name == "step-000020"
    assert go_on(run_dir) == f"`asyncrl resume otter --runs-dir {runs_dir}` continues from step 40"


@pytest.mark.parametrize("name", ["otter/step-000020", "otter/step-20", "{run_dir}/step-20"])
def test_a_checkpoint_is_named_by_its_run_and_its_step(run_dir, name):
    assert resolve(name.format(run_dir=run_dir), run_dir.parent) == run_dir / "checkpoints" / "step-000020"


def test_a_step_that_is_not_there_or_has_no_run_is_an_error_that_names_what_there_is(run_dir):
    with pytest.raises(ConfigError) as caught:
        resolve("otter/step-000030", run_dir.parent)
    assert caught.value.hint == "checkpoints of otter: step-000040, step-000020"
    with pytest.raises(ConfigError) as caught:
        resolve("step-20", run_dir.parent)
    assert caught.value.hint == "did you mean otter/step-000020"


def test_a_finished_run_is_refused_unless_it_becomes_longer(run_dir):
    (run_dir / "status.json").write_text('{"phase": "done", "train_steps": 40}')
    ended = load_checkpoint(run_dir / "checkpoints" / "step-000040")
    with pytest.raises(RefusedError, match="all of its 40 steps") as caught:
        refuse_ended(ended, 40)
    assert "--set run.train_steps=80 continues it" in caught.value.hint
    refuse_ended(ended, 41)
    (run_dir / "replay.json").write_text('{"of": "runs/first", "failure": ""}')
    with pytest.raises(RefusedError, match="is a replay"):
        refuse_ended(ended, 41)
    (run_dir / "status.json").write_text('{"phase": "stopped", "train_steps": 40}')
    refuse_ended(ended, 40)  # its eval


def test_of_a_run_whose_newest_checkpoint_is_damaged_nothing_older_is_taken_in_silence(run_dir):
    flip_bit(run_dir / "checkpoints" / "step-000040")
    with pytest.raises(RefusedError, match="altered") as caught:
        load_checkpoint(resolve("otter", run_dir.parent))
    assert "step-000020" in caught.value.hint


def test_an_unknown_name_is_a_usage_error_that_names_the_known_runs(run_dir):
    with pytest.raises(ConfigError, match="'oter'") as caught:
        resolve("oter", run_dir.parent)
    assert "otter" in caught.value.hint


@pytest.mark.parametrize("name", ["/", ".", ""])
def test_a_name_that_is_none_is_a_usage_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run "):
        find_run(name, Path("."))


def test_a_foreign_directory_and_a_run_without_checkpoints_are_refused(run_dir, tmp_path):
    foreign = tmp_path / "some-model"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    with pytest.raises(RefusedError, match="neither a run nor a checkpoint"):
        resolve(str(foreign), tmp_path / "runs")
    (tmp_path / "young" / "checkpoints").mkdir(parents=True)
    with pytest.raises(RefusedError, match="no checkpoint yet"):
        resolve("young", tmp_path)
    (tmp_path / "young" / "checkpoints").rmdir()
    (tmp_path / "young" / "profile.toml").write_text("")
    with pytest.raises(RefusedError, match="neither a run nor a checkpoint"):  # it may be a task's own
        resolve(str(tmp_path / "young"), tmp_path)
    (tmp_path / "young" / "config.resolved.json").write_text("{}")
    for name in ("young", str(tmp_path / "young"), "young/step-20"):
        with pytest.raises(RefusedError, match="run 'young' has no checkpoint yet"):
            resolve(name, tmp_path)
    (tmp_path / "young" / "status.json").write_text('{"checkpoint": "step-000040"}')
    with pytest.raises(RefusedError, match="of run 'young' are gone: the last that it wrote was step-000040"):
        resolve("young", tmp_path)


def test_the_newest_run_is_found_as_last_and_none_by_the_beginning_of_its_name(run_dir):
    runs_dir = run_dir.parent
    (runs_dir / "owl").mkdir()
    (runs_dir / "owl" / "profile.toml").write_text("")
    (run_dir / "status.json").write_text("{}")
    os.utime(run_dir / "status.json", (1, 1))
    assert find_run("last", runs_dir) == runs_dir / "owl"
    (run_dir / "report.html").write_text("")  # does not make it the newest
    assert find_run("last", runs_dir) == runs_dir / "owl"
    os.utime(runs_dir / "owl", (0, 0))
    assert resolve("last", runs_dir) == run_dir / "checkpoints" / "step-000040"
    assert resolve("last/step-20", runs_dir) == run_dir / "checkpoints" / "step-000020"
    for find, name in (
        (find_run, "ott"),
        (resolve, "ott"),
        (resolve, "ott/step-20"),
    ):
        with pytest.raises(ConfigError, match="no run ") as refused:
            find(name, runs_dir)
        assert refused.value.hint == "did you mean otter"
