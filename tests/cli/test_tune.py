"""`asyncrl tune`: what a search is refused for, what it finds, and what it says of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.bench import recommendation as tune
from asyncrl_cli.bench.recommendation import TuneResult
from asyncrl_cli.bench.search import Row
from asyncrl_cli.bench.space import Setting
from asyncrl_cli.cli.app import run
from asyncrl_cli.cli.tune import LEGEND, remarks
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.simulate.workload import Reference
from asyncrl_cli.simulate.workload_files import Residual, load_workload

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


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A workload's file in the working directory, and few trajectories to simulate."""
    monkeypatch.setattr(tune, "TRAJECTORIES", 1)
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(WORKLOAD, encoding="utf-8")
    return "small.toml"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Setting], float]], None]:
    """Makes every setting take the seconds that a function says, and simulates nothing."""

    def use(seconds: Callable[[Setting], float]) -> None:
        def row(setting: Setting, windows: int) -> Row:
            none = dict.fromkeys(
                ("staleness_mean", "staleness_max", "trainer_idle_ratio", "rollouter_idle_ratio"), 0.0
            )
            return Row(setting=setting, windows=windows, window_time_s=seconds(setting), **none)

        evaluate = lambda settings, windows: [row(one, windows) for one in settings]  # noqa: E731
        monkeypatch.setattr(tune, "evaluator", lambda *arguments: evaluate)

    return use


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("laptop-tiny --gpus 8", 2, "laptop-tiny runs on CPUs, where 8 GPUs mean nothing"),
        ("laptop-tiny --gpus 0", 2, "laptop-tiny runs on CPUs, where 0 GPUs mean nothing"),
        ("verl-7b-math-128 --gpus 0", 2, "there is no split"),
        (
            "verl-7b-math-128 --gpus 1",
            2,
            "hint: 2 GPUs can be split; without --gpus it is the workload's own 128",
        ),
        ("no-such-thing", 2, "no workload 'no-such-thing'"),
        ("small.toml --profile colocate", 2, "no split to tune"),
        ("laptop-tiny --out small.toml", 4, "hint: --out small-2.toml\n"),
        ("laptop-tiny --out my", 2, "hint: --out my.toml\n"),
        ("laptop-tiny --out no/my.toml", 4, "hint: --out my.toml\n"),
    ],
)
def test_what_cannot_be_searched_or_written_is_refused_before_the_search(
    arguments, code, said, small, capsys, monkeypatch
):
    monkeypatch.setattr(tune, "search", lambda *arguments: pytest.fail("searched"))
    assert run(["tune", *arguments.split()]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert [path.name for path in Path().iterdir()] == [small]
    assert Path(small).read_text(encoding="utf-8") == WORKLOAD


@pytest.mark.slow
def test_a_search_finds_a_better_split_and_prints_sets_that_make_it(small, capsys):
    """On equal halves generation takes about 3 times as long as training: more GPUs belong to the rollout. (A
    quarter of the fixture's groups, which take as much of the search's time.)"""
    text = WORKLOAD.replace("ppo_mini_batch_size = 16", "ppo_mini_batch_size = 4")
    Path(small).write_text(text, encoding="utf-8")
    assert run(["tune", small, "--max-staleness", "1", "--json", "--out", "my.toml"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["profile_file"] == "my.toml"
    best, current = found["recommended"], found["current"]
    assert found["simulated"] is True
    assert "SIMULATED" in captured.err
    assert current["split"] == "4:4"
    assert best["rollout_workers"] > 4
    assert best["window_time_s"] < 0.9 * current["window_time_s"]
    assert max(row["max_staleness"] for row in found["rows"]) <= 1
    sets = [argument for entry in best["sets"] for argument in ("--set", entry)]
    assert run(["plan", "--profile", "partial-rollout", "--gpus", "8", *sets, "--json"]) == 0
    roles = json.loads(capsys.readouterr().out)["placement"]["roles"]
    workers = {role["role"]: role["workers"] for role in roles}
    assert workers == {"trainer": best["trainer_workers"], "rollout": best["rollout_workers"]}
    bench = ["bench", "--simulate", small, "--compare", "partial-rollout", "-p", "my.toml", "--json"]
    assert run(bench) == 0
    compared = json.loads(capsys.readouterr().out)["results"]
    assert [result["profile"] for result in compared] == ["partial-rollout", "my"]
    assert compared[1]["speedup"] > 1.1


def test_all_that_a_search_prints_says_simulated(small, pretend, capsys):
    pretend(lambda setting: 1.0 if setting.split == "2:6" else 2.0)
    sets = ["--set", "rollout.temperature=0.9"]
    assert run(["tune", small, "--max-staleness", "0", *sets, "--out", "my.toml"]) == 0
    out, err = capsys.readouterr()
    headings = next(line for line in out.splitlines() if " split " in line)
    assert headings.split() == [
        "split",
        "K",
        "batches",
        "eta",
        "slots",
        "bound",
        "placement",
        "stale",
        "seconds",
        "idle",
    ]
    assert "…" not in out  # 80 columns are enough for all of it
    assert err.splitlines()[-2].startswith("SIMULATED: ")
    assert "settings tried in" in err.splitlines()[-2]  # and not in mid-count
    assert out.startswith("SIMULATED: small, seconds per 64 groups (W), at most 0 versions of staleness")
    assert "recommended (SIMULATED)" in out
    assert "> S" in out  # the current setting is beyond the bound, and shown all the same
    assert "it is beyond the bound" in out
    assert "what this search cannot know" in out
    assert "made up for a test" in out
    copied = [line for line in out.splitlines() if line.startswith("  --set ")]
    assert all(line.endswith(" \\") for line in copied[:-1])
    assert max(map(len, [*copied, *LEGEND.splitlines()])) <= 80
    recommended = shlex.split(" ".join(line.removesuffix("\\") for line in copied))[1::2]
    assert "async_training.staleness_threshold=0" in recommended
    given, written = load("partial-rollout", recommended, environ={}), load("my.toml", environ={})
    names = {"name", "purpose"}
    assert written.profile.model_dump(exclude=names) == given.profile.model_dump(exclude=names)
    command = Path("my.toml").read_text(encoding="utf-8").splitlines()[1]
    assert command == "#   asyncrl tune small.toml --max-staleness 0 --set rollout.temperature=0.9"
    assert "asyncrl bench --compare partial-rollout --profile my.toml" in out


def test_a_tuned_profile_of_a_run_does_not_have_the_name_of_the_run(small, pretend):
    pretend(lambda setting: 1.0)
    Path("of-a-run.toml").write_text('extends = "partial-rollout"\nrun.name = "first"\n', encoding="utf-8")
    asked = ["tune", small, "--profile", "of-a-run.toml", "--max-staleness", "0", "--out", "my tuned.toml"]
    assert run(asked) == 0
    assert load("my tuned.toml", environ={}).profile.run.name == "my-tuned"


def test_a_setting_that_is_no_profile_is_left_out_with_the_reason():
    workload = load_workload("laptop-tiny")
    sets, profile, plan = tune.starting_point(workload, "partial-rollout", (), None)
    too_strict = replace(Setting.of(profile, plan), max_staleness=0)
    outcome = tune._simulated(workload, "partial-rollout", sets, 16, 4, too_strict)
    assert outcome.startswith("async_training.max_staleness = 0 is less than ceil(staleness_threshold)")


def test_a_search_that_found_the_current_setting_says_so(capsys, pretend):
    """One setting is the fastest: the one that laptop-tiny begins with."""
    pretend(lambda one: 1.0 if (one.eta, one.window_steps, one.slots) == (0.5, 4, 64) else 2.0)
    assert run(["tune", "laptop-tiny"]) == 0
    out = capsys.readouterr().out
    assert "the current setting is the recommended one" in out
    assert "--out my.toml" in out


def test_a_search_compares_with_the_current_setting_and_with_its_split(capsys, pretend):
    """1:3 takes half of the time of 2:2, eta = 1 takes 0.8 of it, and so do groups of any age."""
    pretend(
        lambda one: (
            100.0
            * (0.5 if one.split == "1:3" else 1.0)
            * (0.8 if one.eta == 1 else 1.0)
            * (0.8 if one.on_stale == "accept" else 1.0)
        )
    )
    two_and_two = ["--set", "placement.trainer_workers=2", "--set", "rollout.workers=2"]
    assert run(["tune", "laptop-tiny", *two_and_two]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "recommended (SIMULATED): 1:3 trainer:rollout, predicted 40.00 s per" in out
    assert "the current setting: 2:2, 100.00 s (2.50x)" in out
    assert "on the current split: 2:2, 80.00 s (2.00x)" in out
    assert "without the strict bound: 32.00 s, tokens up to 0 versions old" in out
    assert "* best 1:3 " in out, "the marks come first"


def test_a_search_from_a_known_row_is_held_against_it(capsys, pretend):
    """verl-7b-math-128 has a published row of its partial rollout: 150.63 s. 128 GPUs split elsewhere are
    another setting."""
    pretend(lambda setting: 100.0)
    assert run(["tune", "verl-7b-math-128"]) == 0
    assert "published for the current setting: 150.63 s (1.51x)" in capsys.readouterr().out
    assert run(["tune", "verl-7b-math-128", "--set", "placement.ratio=3:1"]) == 0
    assert "published for" not in capsys.readouterr().out


def remarks_on(speedup: float | None, known: Any = None, **parts: tuple[float, float]) -> str:
    """Of a search whose calibrated run took these seconds, measured and simulated, per part."""
    fit = [
        Residual(profile="own", part=part, measured_s=measured_s, predicted_s=predicted_s, calibrated=True)
        for part, (measured_s, predicted_s) in parts.items()
    ]
    best = SimpleNamespace(window_time_s=1.0)
    found: Any = SimpleNamespace(
        best=best, current=best, without_bound=None, on_current_split=None, speedup=speedup
    )
    found.current = SimpleNamespace(window_time_s=1.0, setting=None)
    found.space = SimpleNamespace(allows=lambda setting: True)
    workload: Any = None
    tuned = TuneResult(workload=workload, profile="own", sets=(), found=found, known=known, fit=fit)
    return "\n".join(remarks(tuned))


@pytest.mark.parametrize(
    ("speedup", "parts", "said"),
    [
        (
            1.05,
            {"window": (2.0, 1.8)},
            "the gain, 5%, is within the error of the simulation, 10% of a window",
        ),
        (1.25, {"window": (2.0, 1.8)}, "the gain, 25%, exceeds the error of the simulation, 10% of a window"),
        (
            1.25,
            {"window": (2.0, 2.0), "wait_data": (0.5, 1.095)},
            "25%, is within the error of the simulation, 30%",
        ),
        (1.25, {}, "nothing measured tells whether the gain, 25%, is real"),
        (
            None,
            {"window": (2.0, 2.0), "wait_data": (0.5, 1.095)},
            "from wait_data: 0.5 s measured, 1.095 s simulated",
        ),
    ],
)
def test_a_gain_is_held_against_the_simulations_error(speedup, parts, said):
    assert said in remarks_on(speedup, **parts)


def test_a_published_row_of_the_current_setting_tells_the_error_too():
    known = Reference(profile="own", window_time_s=1.25, parts_s={}, source="published")
    assert "is within the error of the simulation, 20%" in remarks_on(1.1, known)


def test_a_small_part_that_is_simulated_wrong_does_not_matter():
    assert "do not trust" not in remarks_on(None, window=(2.0, 2.0), wait_data=(0.01, 0.05))
