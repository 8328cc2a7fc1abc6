"""`asyncrl bench` as a user calls it, on the virtual clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError, ExecutorFailed
from asyncrl_cli.bench import comparison as bench_comparison
from asyncrl_cli.bench.results import Comparison, Contestant, FinishedRun, summarise
from asyncrl_cli.cli.app import run
from asyncrl_cli.report import write
from tests.simulate.small_workload import COSTS

PROFILE = """
notes = "made up"
windows = 5
[profile.placement]
gpus = 4
[profile.trainer]
ppo_mini_batch_size = 4
[profile.rollout]
n = 4
"""


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(PROFILE + COSTS, encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_simulated_bench_writes_its_files_and_only_json_on_stdout(workload, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--groups", "48", "--repeat", "2", "--out", str(out), "--json"]
    assert run(["bench", "--simulate", str(workload), *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "results.json").read_text())
    assert (printed["simulated"], printed["groups"], printed["seeds"]) == (True, 48, [0, 1])
    base, partial = printed["results"]
    assert (base["profile"], base["speedup"]) == ("colocate", 1.0)
    # The median of the ratios seed by seed is not quite the ratio of the medians.
    assert partial["speedup"] == pytest.approx(partial["groups_per_s"] / base["groups_per_s"], rel=0.01)
    assert 0 < base["bound_ratio"] <= 1.01
    assert partial["staleness_max"] <= 1
    assert {path.name for path in out.iterdir()} == {"results.json", "report.md", "report.html", "runs"}


@pytest.mark.slow
def test_a_simulated_table_says_so_and_prints_the_notes(workload, tmp_path, capsys):
    arguments = ["--groups", "40", "-p", "on-policy-pipeline", "--out", str(tmp_path / "out")]
    assert run(["bench", "--simulate", str(workload), *arguments]) == 0
    out = capsys.readouterr().out
    assert "SIMULATED" in out
    assert "made up" in out
    assert "% of the bound" in out
    below = out.partition("training, tokens/s")[2]
    assert all(explained in below for explained in ("s per 4 groups: ", "wait_data: ", "limited by: "))


def test_a_refused_bench_leaves_no_directory(workload, tmp_path, capsys):
    arguments = ["--groups", "6", "--out", str(tmp_path / "out")]
    assert run(["bench", "--simulate", str(workload), *arguments]) == 2
    assert "no multiple of R = 4" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [["-p", "nope"], ["--groups", "6"], ["--set", "run.seed=1"]])
def test_nothing_is_said_before_a_usage_error(wrong, workload, capsys):
    assert run(["bench", "--simulate", str(workload), *wrong]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.partition(":")[0] for line in said.err.splitlines()] == ["error", "hint"]


def test_the_help_has_examples_and_says_which_profile_is_compared_by_default(capsys):
    assert run(["bench", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "asyncrl bench --simulate" in shown
    assert "Default: partial-rollout." in shown


def test_the_screen_says_which_runs_are_missing_and_that_there_is_no_page(tmp_path, monkeypatch, capsys):
    figures = {"timing/step_s": 2.0, "response_tokens/mean": 10.0, "staleness/histogram": [16]}
    totals = {"version": 1, "groups_trained": 16, "tokens_trained": 160, "time_s": 2.0}
    lines = [
        {"window": number - 1, **figures, **{key: number * each for key, each in totals.items()}}
        for number in range(1, 5)
    ]
    contestants = [
        Contestant(name=name, mode=name, step_groups=16, window_groups=16)
        for name in ("colocate", "partial-rollout")
    ]
    comparison = Comparison(
        results=summarise(contestants, [FinishedRun(profile="colocate", seed=0, lines=lines)]),
        workload="",
        baseline="colocate",
        groups=64,
        window_groups=16,
        seeds=(0,),
        resources="2 CPU cores",
        remarks=("doubtful: [why]",),
        missing=("partial-rollout-r0",),
        error=(failure := ExecutorFailed("the run partial-rollout-r0 failed", hint="look")),
    )

    def unreadable(*arguments: object) -> None:
        raise ConfigError("timeline.jsonl cannot be read")

    monkeypatch.setattr(bench_comparison, "compare", lambda contest, directory, watcher: comparison)
    monkeypatch.setattr(write, "write_report", unreadable)
    words = ["--set", "placement.device=cpu", "--out", str(tmp_path / "out")]
    assert run(["bench", *words]) == failure.exit_code
    said = capsys.readouterr()
    assert "not finished: partial-rollout-r0" in said.out
    assert "doubtful: [why]" in said.out
    assert "there is no report.html: timeline.jsonl cannot be read" in said.err
    assert "the run partial-rollout-r0 failed" in said.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "report.md"}
