"""What a submitted run takes along."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.job.submit.cargo import PROFILE, cargo_of
from asyncrl_cli.profile.loaded import load

FILES = (
    "rewards.py",
    "helpers.py",
    "package/__init__.py",
    "package/words.txt",
    "package/inner/game.py",
    "package/__pycache__/game.pyc",
    "data/train-0.parquet",
    "data/train-1.parquet",
    "data/large.bin",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_modules_that_keys_name_and_what_is_to_be_shipped_go_along_and_the_rest_stays(here):
    sets = [
        "task.reward=rewards:score",
        "task.environment=package.inner.game:Game",
        'run.ship=["helpers.py"]',
    ]
    cargo = cargo_of(load("partial-rollout", sets), here)
    shipped = {
        "rewards.py",
        "helpers.py",
        "package/__init__.py",
        "package/words.txt",
        "package/inner/game.py",
    }
    assert set(map(str, cargo.files)) == shipped
    assert cargo.notes == ()
    directory = here / "elsewhere"
    directory.mkdir()
    cargo.write(directory)
    assert {
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    } == shipped | {PROFILE}


def test_a_module_beside_the_profile_goes_along_with_its_place(here):
    (here / "package" / "my.toml").write_text('extends = "base"\n[task]\nreward = "scores:score"\n')
    (here / "package" / "scores.py").touch()
    (here / "my.toml").write_text('extends = "base"\n[task]\nreward = "rewards:score"\n')
    for profile, file, place in (
        ("package/my.toml", "package/scores.py", "package"),
        ("my.toml", "rewards.py", None),
    ):
        there = here / "there" / file
        there.mkdir(parents=True)
        cargo = cargo_of(load(profile), here)
        assert (list(map(str, cargo.files)), cargo.notes) == ([file], ())
        cargo.write(there)
        assert load(str(there / PROFILE)).profile.task.import_path == str(
            there if place is None else there / place
        )


@pytest.mark.parametrize("directory", ["", "package"])
def test_the_declarations_of_fields_go_along(here, directory):
    place = here / directory
    (place / "my.toml").write_text('extends = "base"\n[task]\nfields = "my_fields:FIELDS"\n')
    (place / "my_fields.py").touch()
    cargo = cargo_of(load(str(place / "my.toml")), here)
    assert (list(map(str, cargo.files)), cargo.notes) == ([f"{Path(directory) / 'my_fields.py'}"], ())
    there = here / "there"
    (there / directory).mkdir(parents=True)
    cargo.write(there)
    assert load(str(there / PROFILE)).profile.task.import_path == str(there / directory)


def test_declarations_of_a_set_go_along(here):
    (here / "my_fields.py").touch()
    (here / "my_scorers.py").touch()
    sets = ["task.fields=my_fields:FIELDS", 'task.scorers={x = "my_scorers:X"}']
    cargo = cargo_of(load("base", sets), here)
    assert (list(map(str, cargo.files)), cargo.notes) == (["my_fields.py", "my_scorers.py"], ())
    assert "import_path" not in tomllib.loads(cargo.profile_toml)["task"]


def test_an_entry_of_the_tasks_own_that_is_called_import_path_stays(here):
    sets = [f"task.import_path={here}", f"task.params.import_path={here}", "task.reward=rewards:score"]
    cargo = cargo_of(load("partial-rollout", sets), here)
    task = tomllib.loads(cargo.profile_toml)["task"]
    assert "import_path" not in task
    assert task["params"] == {"import_path": str(here)}


def test_a_module_beside_a_profile_outside_the_working_directory_is_one_note(here):
    (here / "package" / "below").mkdir()
    (here / "my.toml").write_text('extends = "base"\n[task]\nreward = "rewards:score"\n')
    cargo = cargo_of(load(str(here / "my.toml")), here / "package" / "below")
    assert cargo.notes == (f"the module rewards in {here} is not shipped: run `asyncrl submit` in {here}",)
    assert cargo_of(load(str(here / "my.toml")), here).notes == ()


def test_the_job_resolves_to_the_profile_that_was_resolved_here(here, monkeypatch):
    """Elsewhere, without the chain's files and the environment; only paths of what was shipped are those of
    the copies."""
    (here / "low.toml").write_text('extends = "stale-samples"\n[run]\nseed = 7\n')
    (here / "my.toml").write_text(
        'extends = "low.toml"\n[task]\nsource = "parquet:data/train-*.parquet"\n[rollout]\nn = 4\n'
    )
    monkeypatch.setenv("ASYNCRL_TRAINER__LR", "0.125")
    loaded = load("my.toml", ['run.ship=["data/*.parquet"]', "run.train_steps=3"])
    cargo = cargo_of(loaded, here)
    monkeypatch.delenv("ASYNCRL_TRAINER__LR")
    there = here / "there"
    there.mkdir()
    cargo.write(there)
    os.chdir(there)
    again = load(PROFILE).profile
    assert again.task.source == f"parquet:{there}/data/train-*.parquet"
    task = again.task.model_copy(update={"source": loaded.profile.task.source})
    assert again.model_copy(update={"task": task}) == loaded.profile


def test_what_the_cluster_must_have_is_said(here):
    sets = ["task.reward=json:loads", f"task.source=jsonl:{here}/data/large.bin"]
    module, data = cargo_of(load("partial-rollout", sets), here).notes
    assert module.startswith("the module json is not in ")
    assert data.startswith(f"{here}/data/large.bin is not shipped")
    (absent,) = cargo_of(load("partial-rollout", ["task.source=jsonl:data/absent.jsonl"]), here).notes
    assert absent == f"{here}/data/absent.jsonl is not on this machine: the cluster must have it there"


@pytest.mark.parametrize(
    ("pattern", "why"), [("../x", "not within"), ("/etc/passwd", "not within"), ("nothing*", "no file")]
)
def test_a_pattern_that_names_nothing_here_is_refused(here, pattern, why):
    with pytest.raises(ConfigError, match=why):
        cargo_of(load("partial-rollout", [f'run.ship=["{pattern}"]']), here)
