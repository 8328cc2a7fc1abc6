"""`asyncrl plan`: memory in the table and in JSON, and what is said of `--tune`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl_cli.cli.app import run


def test_a_plan_estimates_the_memory_of_every_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["plan", "--profile", "partial-rollout"]) == 0
    out = capsys.readouterr().out
    # 0.75 M parameters: 4 bytes each of weights and gradients, 8 of AdamW's moments.
    assert "754,752 parameters" in out
    assert [size in out for size in ("2.9 MiB", "5.8 MiB")] == [True, True]
    assert "64 slots * 352 tokens" in out
    assert "fits" in out


def test_the_memory_of_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "-p", "base", "--gpus", "8", "--gpu-memory", "80", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    parameters = {item["role"]: item["num_bytes"] for item in memory["items"] if item["what"] in ("parameters", "weights")}
    # 4 ranks share the float32 weights; every worker has them whole.
    assert parameters == {"trainer": 754752, "rollout": 4 * 754752}
    assert [(device["roles"], device["fits"]) for device in memory["devices"]] == [(["trainer"], True), (["rollout"], True)]


def test_gpus_without_known_memory_get_the_estimate_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "-p", "base", "--gpus", "8", "--json"]) == 0
    assert {device["fits"] for device in json.loads(capsys.readouterr().out)["memory"]["devices"]} == {None}


def test_a_job_that_does_not_fit_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "-p", "base", "--gpus", "2", "--gpu-memory", "0.2"]) == 0
    captured = capsys.readouterr()
    assert "lower trainer.max_tokens_per_microbatch" in captured.err
    assert "does not fit" in captured.out


def test_a_model_of_the_hub_is_planned_without_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "-p", "base", "--set", 'model.path="someone/not-here"']
    assert run([*arguments, "--json"]) == 0
    assert "needs its config.json" in json.loads(capsys.readouterr().out)["memory"]["unknown"]
    assert run(arguments) == 0
    assert "no estimate" in capsys.readouterr().out


def test_a_plan_needs_a_profile_or_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan"]) == 2
    assert "--tune" in capsys.readouterr().err
    assert run(["plan", "-p", "base", "--max-staleness", "1"]) == 2
    assert "belongs to --tune" in capsys.readouterr().err


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["plan", "--tune", "no-such-thing", "--runs-dir", str(tmp_path)]) == 2
    assert "no workload 'no-such-thing'" in capsys.readouterr().err


def test_a_colocated_profile_has_no_split_to_tune(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    workload = tmp_path / "small.toml"
    workload.write_text(WORKLOAD, encoding="utf-8")
    assert run(["plan", "--tune", str(workload), "--profile", "colocate"]) == 2
    assert "no split to tune" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_finds_a_better_split_and_prints_sets_that_make_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On equal halves generation takes about 3 times as long as training: more GPUs belong to the rollout."""
    import asyncrl_cli.bench.tune as tune

    monkeypatch.setattr(tune, "TRAJECTORIES", 1)
    workload = tmp_path / "small.toml"
    workload.write_text(WORKLOAD, encoding="utf-8")
    assert run(["plan", "--tune", str(workload), "--max-staleness", "1", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    best, current = found["recommended"], found["current"]
    assert found["simulated"] is True
    assert "SIMULATED" in captured.err
    assert current["split"] == "4:4"
    assert best["rollout_workers"] > 4
    assert best["window_time_s"] < 0.9 * current["window_time_s"]
    assert max(row["max_staleness"] for row in found["rows"]) <= 1
    sets = [argument for entry in best["sets"] for argument in ("--set", entry)]
    assert run(["plan", "--profile", "partial-rollout", "--gpus", "8", *sets, "--json"]) == 0
    roles = {role["role"]: role["workers"] for role in json.loads(capsys.readouterr().out)["placement"]["roles"]}
    assert roles == {"trainer": best["trainer_workers"], "rollout": best["rollout_workers"]}


def test_all_that_a_search_prints_says_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncrl_cli.bench.tune as tune

    monkeypatch.setattr(tune, "TRAJECTORIES", 1)
    workload = tmp_path / "small.toml"
    workload.write_text(WORKLOAD, encoding="utf-8")
    assert run(["plan", "--tune", str(workload), "--max-staleness", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SIMULATED: small, seconds per 64 groups (W), at most 0 versions of staleness")
    assert "recommended (SIMULATED)" in out
    assert "> S" in out  # the current setting is beyond the bound, and shown all the same
    assert "--set async_training.staleness_threshold=0 " in out
    assert "what this search cannot know" in out
    assert "made up for a test" in out


WORKLOAD = """
purpose = "eight GPUs that generate twice as slowly as they train"
notes = "made up for a test"
windows = 4

[profile.placement]
gpus = 8
[profile.trainer]
ppo_mini_batch_size = 16
[profile.rollout]
n = 4
slots = 8
max_response_tokens = 200

[lengths]
median_tokens = 50.0
sigma = 0.8

[decoding]
step_s = 0.02
step_s_per_sequence = 0.0005

[training]
s_per_token = 0.0003

[syncing]
parameter_bytes = 1e9
gather_bytes_per_s = 1e10
send_bytes_per_s = 1e10
load_bytes_per_s = 1e10
"""
