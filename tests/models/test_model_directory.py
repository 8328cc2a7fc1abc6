"""Where models come from: the cache of built ones, directories, the hub; and what is said when they are not
there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.builtin.tiny_models import built_untaught
from asyncrl_cli.models import model_directory
from asyncrl_cli.models.model_directory import resolve_model
from asyncrl_cli.models.model_files import check_model_directory
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.task import load_task
from tests.builtin.conftest import tiny_profile
from tests.train.conftest import rank_context as rank_context


def with_path(path: Path | str) -> Profile:
    return Profile.model_validate({"model": {"path": str(path)}})


@pytest.fixture
def copy(built, tmp_path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "model"))


def test_no_progress_bar_of_transformers_comes_between_our_own_lines(tmp_path, capsys):
    logging.enable_progress_bar()
    built_untaught(Profile(), tmp_path)
    assert capsys.readouterr().err == ""


def refusal(path: Path | str, task) -> PreflightError:
    with pytest.raises(PreflightError) as refused:
        resolve_model(with_path(path), task)
    assert refused.value.hint
    assert refused.value.message.startswith("model.path: ")
    return refused.value


@pytest.mark.slow
def test_building_reports_every_step_and_makes_the_same_bytes_of_the_same_inputs(task, built, tmp_path):
    seen = []
    again = resolve_model(tiny_profile(tmp_path), task, progress=lambda *report: seen.append(report))
    assert again.name == built.name
    assert (again / "model.safetensors").read_bytes() == (built / "model.safetensors").read_bytes()
    assert [report[:3] for report in seen] == [("warm start", 1, 2), ("warm start", 2, 2)]
    assert all(re.fullmatch(r"loss \d+\.\d\d", report[3]) for report in seen)


def test_a_cached_model_is_not_built_again(task, built):
    stamps = {path.name: path.stat().st_mtime_ns for path in built.iterdir()}
    seen = []
    again = resolve_model(tiny_profile(built.parent), task, progress=lambda *report: seen.append(report))
    assert again == built
    assert seen == [(f"cached model {built}", 0, 0, "")]
    assert {path.name: path.stat().st_mtime_ns for path in built.iterdir()} == stamps
    assert [path.name for path in built.parent.iterdir()] == [built.name]


@pytest.mark.slow
def test_everything_that_changes_the_model_changes_its_directory(task, tmp_path):
    profiles = [
        tiny_profile(tmp_path, steps=1),
        tiny_profile(tmp_path, steps=2),
        tiny_profile(tmp_path, steps=1, run={"seed": 1}),
        tiny_profile(tmp_path, steps=1, model={"warm_start_label_noise": 0.9}),
    ]
    assert len({resolve_model(profile, task) for profile in profiles}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("fewer_or_more", [0, 64])
def test_another_number_of_eval_prompts_finds_the_same_model(built, fewer_or_more):
    profile = tiny_profile(built.parent, eval={"prompts": fewer_or_more})
    assert resolve_model(profile, load_task(profile)) == built


def build(profile: Profile, barrier) -> None:
    task = load_task(profile)
    barrier.wait(240)
    resolve_model(profile, task)


@pytest.mark.slow
def test_two_processes_that_build_the_same_model_at_once_do_not_hurt_each_other(task, tmp_path, rank_context):
    profile, barrier = tiny_profile(tmp_path, steps=8), rank_context.Barrier(2)
    processes = [rank_context.Process(target=build, args=(profile, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0]
    directory = resolve_model(profile, task, progress=lambda *report: None)
    assert list(tmp_path.iterdir()) == [directory]
    check_model_directory(directory)


def test_nothing_is_left_of_a_build_that_failed(task, tmp_path):
    def stop(*report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model(tiny_profile(tmp_path), task, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_whole_directory_is_taken_as_it_is(task, copy):
    directory = resolve_model(with_path(copy), task)
    assert directory == copy
    assert AutoModelForCausalLM.from_pretrained(directory).config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(directory).eos_token_id == 1


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("config.json", "holds no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_a_directory_without_one_of_its_parts_is_refused(task, copy, missing, named):
    (copy / missing).unlink()
    error = refusal(copy, task)
    assert named in error.message
    assert str(copy) in error.message


def test_a_missing_shard_is_named(task, copy):
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "model-00002-of-00002.safetensors is missing" in refusal(copy, task).message


def test_truncated_weights_are_refused(task, copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "is damaged" in refusal(copy, task).message


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_configuration_that_is_none_is_refused(task, copy, content):
    (copy / "config.json").write_text(content)
    assert "config.json" in refusal(copy, task).message


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(task, tmp_path, monkeypatch):
    monkeypatch.setattr(model_directory, "from_hub", lambda *_, **__: pytest.fail("asked the hub"))
    for path in (tmp_path / "none", "./none", "~/none-such-directory", "a/b/c"):
        assert "does not exist" in refusal(path, task).message
    (tmp_path / "file").write_text("x")
    assert "is a file" in refusal(tmp_path / "file", task).message
    (tmp_path / "smollm").mkdir()
    assert refusal(tmp_path / "smolm", task).hint == f"did you mean {tmp_path / 'smollm'}?"


def test_a_hub_name_without_a_network_is_refused(task, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "hub cannot be reached" in refusal("nobody-here/no-such-model", task).message


def test_another_builtin_is_a_wrong_key(task):
    with pytest.raises(ConfigError, match='there is no "builtin:huge"'):
        resolve_model(with_path("builtin:huge"), task)


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_refused(task, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(PreflightError, match=r"model\.cache_dir"):
        resolve_model(tiny_profile(tmp_path / "file"), task)
