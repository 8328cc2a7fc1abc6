"""Exports open with plain transformers, hold the very weights, and appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from asyncrl_cli.base.errors import AsyncrlError, ConfigError, PreflightError, RefusedError
from asyncrl_cli.builtin.tiny import tiny_tokenizer
from asyncrl_cli.cli.app import run
from asyncrl_cli.export import tensors as export_tensors
from asyncrl_cli.export.exported import export
from asyncrl_cli.export.source import step_of
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.weights.senders import keep_version
from asyncrl_cli.weights.versions import version_directory
from tests.export.conftest import SEQUENCE, K, MadeRun, checkpoint, model_with_tokenizer, open_run, profile_of
from tests.trainers import trainer_parts

GB = 10**9


def exported(run: MadeRun, argument: str = "otter", **options):
    return export(argument, runs_dir=run.runs_dir, **{"max_file_bytes": GB, **options})


def opened(path: Path):
    return AutoModelForCausalLM.from_pretrained(path)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in opened(path).named_parameters()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_newest_checkpoint_scores_as_the_trainer_does_bit_for_bit(make_run, tied):
    made = make_run(tied=tied)
    result = exported(made)
    assert result.path == made.directory / "exports" / "step-000003"
    assert (result.source.step, result.source.version, result.source.after_version) == (3, None, 1)
    model = opened(result.path)
    assert_equal({name: parameter.detach() for name, parameter in model.named_parameters()}, made.weights[3])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([SEQUENCE[:-1]])).logits[0], -1)
    ours = [row[token].item() for row, token in zip(logprobs, SEQUENCE[1:], strict=True)]
    assert ours == made.logprobs[3]
    with safe_open(result.path / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not tied)  # noqa: SIM118 - no mapping
    assert result.parameters == sum(parameter.numel() for parameter in model.parameters())
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (result.path, made.model_dir))
    assert ours.encode("abc") == theirs.encode("abc")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_is_the_same_from_wherever_it_comes(make_run, dtype):
    made = make_run(dtype=dtype)
    kept = version_directory(made.directory / "versions", 1)
    expected = {name: weight.to(getattr(torch, dtype)) for name, weight in made.weights[2].items()}
    assert_equal(weights_of(kept), expected)
    checkpoints = made.directory / "checkpoints"
    for source in (kept, checkpoints / "step-000003", checkpoints / "step-000002"):
        result = exported(made, version=1, out=made.directory / f"from-{source.name}")
        assert result.source.path == source
        assert (result.source.step, result.source.version, result.dtype) == (2, 1, dtype)
        assert_equal(weights_of(result.path), expected)
        shutil.rmtree(source)


@pytest.mark.slow
def test_a_version_that_is_nowhere_is_refused_with_those_that_are_there(make_run):
    made = make_run()
    with pytest.raises(RefusedError, match="run 'otter': there is no version 7 in it") as told:
        exported(made, version=7)
    assert told.value.hint == "there are: kept version 1, version 1 in step-000003, version 1 in step-000002"
    with pytest.raises(RefusedError, match=r"step-000002 holds version 1, not 0"):
        exported(made, str(made.directory / "checkpoints" / "step-000002"), version=0)
    shutil.rmtree(made.directory / "versions")
    for step in (2, 3):
        damage(made.directory / "checkpoints" / f"step-{step:06d}")
    with pytest.raises(
        RefusedError, match=r"version 1 is not whole: checkpoint .*step-000003 is refused: .* was altered"
    ) as told:
        exported(made, version=1)
    assert told.value.hint == "no version is left: weights.keep_versions was 0"
    with pytest.raises(ConfigError, match="no run or checkpoint 'badger'"):
        exported(made, "badger")


@pytest.mark.slow
def test_the_dtype_can_be_chosen_and_the_configuration_says_it(make_run):
    made = make_run(dtype="bfloat16")
    result = exported(made, dtype="float32")
    assert AutoConfig.from_pretrained(result.path).dtype == torch.float32
    assert_equal(weights_of(result.path), made.weights[3])


@pytest.mark.slow
def test_large_models_are_written_in_several_files(make_run):
    made = make_run(tied=True)
    result = exported(made, max_file_bytes=500_000)
    files = sorted(path.name for path in result.path.glob("*.safetensors"))
    assert len(files) > 3
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert list(result.files) == files == names
    index = json.loads((result.path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == result.num_bytes == 4 * result.parameters
    assert_equal(weights_of(result.path), made.weights[3])


def test_a_damaged_checkpoint_is_passed_over_and_said(make_run, capsys):
    made = make_run()
    damage(made.directory / "checkpoints" / "step-000003")
    assert run(["export", "otter", "--runs-dir", str(made.runs_dir)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{made.directory}/exports/step-000002\n"
    assert "warning: checkpoint" in said.err
    assert "its checksum does not match; using an older checkpoint instead" in said.err
    assert "exported version 1 (step 2) of run 'otter'" in said.err
    assert_equal(weights_of(made.directory / "exports" / "step-000002"), made.weights[2])


def test_damaged_events_that_may_have_held_the_step_are_said(make_run, capsys):
    made = make_run()
    events = made.directory / "events.jsonl"
    events.write_text('{"event": "published", "version"\n{"event": "published", "version": 1, "step": 2}\n')
    assert run(["export", "otter", "--version", "1", "--runs-dir", str(made.runs_dir)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"warning: damaged lines of {events} left out: 1; line 1: " in said


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(make_run):
    made = make_run()
    damaged = made.directory / "checkpoints" / "step-000002"
    damage(damaged)
    with pytest.raises(RefusedError, match=r"step-000002 is refused: .* its checksum does not match") as told:
        exported(made, str(damaged))
    assert told.value.hint.endswith(f"asyncrl export {damaged.parent / 'step-000003'}")
    damage(damaged.parent / "step-000003")
    with pytest.raises(RefusedError, match="run 'otter' has no whole checkpoint") as told:
        exported(made)
    assert told.value.hint == "there are: kept version 1"
    assert not (made.directory / "exports").exists()


def damage(checkpoint: Path) -> None:
    path = next(checkpoint.glob("rank-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_kept_version_that_is_cut_off_is_refused(make_run):
    made = make_run()
    path = version_directory(made.directory / "versions", 1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(RefusedError, match=r"weights in .*version-000001.* cannot be read"):
        exported(made, version=1)


def test_nothing_is_overwritten(make_run, capsys, tmp_path):
    made = make_run()
    (tmp_path / "empty").mkdir()
    exported(made, out=tmp_path / "empty")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "empty").iterdir())
    assert run(["export", "otter", "--runs-dir", str(made.runs_dir), "--out", str(tmp_path / "empty")]) == 4
    assert "is not empty" in capsys.readouterr().err
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "empty").iterdir()) == before


def test_a_target_that_cannot_be_is_refused_and_a_given_one_before_a_byte_is_read(
    make_run, capsys, tmp_path, monkeypatch
):
    made = make_run()
    exported(made)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RefusedError, match=r"exports/step-000003 exists and is not empty"):
        exported(made)
    monkeypatch.setattr(
        "asyncrl_cli.export.source.load_checkpoint", lambda *given, **options: pytest.fail("read it")
    )
    assert run(["export", "otter", "--runs-dir", str(made.runs_dir), "--out", str(tmp_path / "file")]) == 4
    assert f"error: {tmp_path / 'file'} is a file\n" in capsys.readouterr().err


@pytest.mark.slow
def test_what_can_be_refused_is_refused_before_torch_is_imported(make_run):
    command = ["export", "otter", "--runs-dir", str(make_run().runs_dir)]
    refused = [["--version", "7"], ["--model", "/nope"], ["--adapter"], ["--out", "/dev"]]
    code = (
        "import sys; from asyncrl_cli.cli.app import run\n"
        f"print([run([*{command}, *words]) for words in {refused}], 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert re.fullmatch(r"\[[24], [24], [24], [24]\] False\n", ran.stdout), ran.stderr


def test_a_copy_of_a_run_goes_by_its_own_name_and_no_progress_is_called_0(make_run, capsys):
    made = make_run()
    shutil.copytree(made.directory, made.runs_dir / "badger")
    assert run(["export", "badger", "--runs-dir", str(made.runs_dir)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{made.runs_dir}/badger/exports/step-000003\n"
    assert "of run 'badger'" in said.err
    assert "writing step-000003 (2 MB)\n" in said.err
    assert " 0/" not in said.err


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o027, 0o750)])
def test_an_export_has_the_permissions_that_the_umask_leaves(make_run, tmp_path, umask, mode):
    made, before = make_run(), os.umask(umask)
    try:
        path = exported(made, out=tmp_path / "model").path
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode
    assert {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()} == dict.fromkeys(
        os.listdir(path), mode & 0o666
    )


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["the system's", "safetensors' own"],
)
def test_a_full_disk_leaves_nothing_behind(make_run, monkeypatch, tmp_path, error):
    made = make_run()
    files = []

    def full(tensors, path):
        files.append(path)
        if len(files) == 3:
            raise error
        path.write_bytes(b"")

    monkeypatch.setattr(export_tensors, "write_weights", full)
    with pytest.raises(AsyncrlError, match=r"cannot be written: .*No space left on device"):
        exported(made, out=tmp_path / "there" / "model", max_file_bytes=500_000)
    assert len(files) == 3
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.slow
def test_a_run_is_enough_without_its_model_directory(make_run):
    made = make_run(of_its_own=True)
    shutil.rmtree(made.model_dir)
    assert_equal(weights_of(exported(made).path), made.weights[3])


@pytest.mark.slow
def test_a_model_that_is_gone_is_said_and_another_directory_can_be_named(make_run, tmp_path):
    made = make_run(of_its_own=True)
    for place in ("model", "versions"):
        shutil.rmtree(made.directory / place)
    assert_equal(weights_of(exported(made, out=tmp_path / "by-path").path), made.weights[3])
    files = made.model_dir.rename(tmp_path / "moved")
    with pytest.raises(
        PreflightError, match=r"configuration and tokenizer of model\.path = .*original.* were not found"
    ) as told:
        exported(made)
    assert "--model DIR" in told.value.hint
    assert_equal(weights_of(exported(made, model=files).path), made.weights[3])
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        exported(made, model=tmp_path / "runs", out=tmp_path / "nowhere")


def test_weights_that_do_not_fit_the_configuration_are_refused(make_run, tmp_path):
    made = make_run()
    tied = model_with_tokenizer(tmp_path / "tied", tied=True)
    with pytest.raises(RefusedError, match=r"do not fit .*tied/config\.json: unknown: lm_head\.weight"):
        exported(made, model=tied)


def test_a_checkpoint_that_was_copied_out_of_its_run_goes_to_the_working_directory(
    make_run, tmp_path, monkeypatch
):
    made = make_run()
    away = tmp_path / "away" / "step-000002"
    shutil.copytree(made.directory / "checkpoints" / "step-000002", away)
    monkeypatch.chdir(tmp_path)
    result = exported(made, str(away))
    assert result.path == tmp_path / "otter-step-000002"
    assert_equal(weights_of(result.path), made.weights[2])


def test_json_says_what_was_written(make_run, capsys, tmp_path):
    made = make_run(tied=True)
    out = tmp_path / "out"
    words = ["export", "otter", "--runs-dir", str(made.runs_dir), "--version", "1"]
    assert run([*words, "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    parameters = sum(weight.numel() for weight in made.weights[2].values())
    assert told == {
        "path": str(out),
        "run": "otter",
        "source": str(made.directory / "versions" / "version-000001"),
        "version": 1,
        "after_version": None,
        "step": 2,
        "dtype": "float32",
        "parameters": parameters,
        "num_bytes": 4 * parameters,
        "files": ["model.safetensors"],
        "passed_over": [],
    }


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_exported_without_ranks(tmp_path, run_ranks):
    model_dir = model_with_tokenizer(tmp_path / "original")
    directory = open_run(tmp_path / "runs", "otter", profile_of(model_dir))
    (weights,) = run_ranks(model_dir, world_size=2, last_step=2, save=tmp_path / "state")
    state = tmp_path / "state" / "0"
    assert len(list(state.glob("rank-*.safetensors"))) == 2
    checkpoint(directory, 2, lambda working: shutil.copytree(state, working, dirs_exist_ok=True))
    result = export("otter", runs_dir=tmp_path / "runs", max_file_bytes=500_000)
    assert_equal(weights_of(result.path), weights)


def test_experts_are_written_as_in_the_models_own_files(tmp_path, make_trainer):
    """transformers joins a layer's experts in memory; files, published versions and vLLM have them one by
    one. From the trainer's state, from what is published in mid-window, and from a kept version."""
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    experts = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    config = Qwen3MoeConfig(**sizes, **heads, **experts)
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(config)
    original.save_pretrained(tmp_path / "original")
    tiny_tokenizer("abc").save_pretrained(tmp_path / "original")
    directory = open_run(tmp_path / "runs", "otter", profile_of(tmp_path / "original"))
    trainer = make_trainer(trainer_parts(tmp_path / "original"))
    trainer.gather(1)
    expected = {name: parameter.detach() for name, parameter in original.named_parameters()}
    with safe_open(tmp_path / "original" / "model.safetensors", framework="pt") as file:
        own_names = set(file.keys())
    for step, version, is_kept in ((2, None, False), (3, 1, False), (3, 1, True)):
        trainer.snapshot(step)
        checkpoint(directory, step, lambda working, step=step: trainer.write(step, working, step % K != 0))
        if is_kept:
            keep_version(directory / "versions", *trainer.published(1), tmp_path / "original", 1)
        where = dict(out=tmp_path / f"{step}-{is_kept}", version=version)
        result = export("otter", runs_dir=tmp_path / "runs", max_file_bytes=20_000, **where)
        index = json.loads((result.path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == own_names
        assert_equal(weights_of(result.path), expected)


def test_the_step_of_a_version_is_the_recorded_one_which_an_extension_has_moved(tmp_path):
    """K = 4: six steps, then an extension, whose first window begins at step 6."""
    sets = {"run": {"train_steps": 20}, "async_training": {"trigger_parameter_sync_step": 4}}
    profile = Profile.model_validate(sets)
    assert step_of(tmp_path, profile, 3) == (12, ())
    steps = {1: 4, 2: 6, 3: 10}
    published = [{"event": "published", "version": version, "step": steps[version]} for version in steps]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in published))
    assert [step_of(tmp_path, profile, version)[0] for version in (1, 2, 3)] == [4, 6, 10]
