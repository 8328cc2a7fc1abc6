"""Recorded runs side by side, against figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl_cli.cli.app import run
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.resolved import to_document
from asyncrl_cli.report.run_data import run_data
from asyncrl_cli.report.side_by_side import compare
from tests.statuses import write_status


def record(
    runs_dir: Path, name: str, sets: list[str], rewards: list[float], *, step_s: float, groups: int
) -> Recorded:
    """A run whose steps take `step_s` and train `groups` groups each."""
    directory = runs_dir / name
    directory.mkdir()
    loaded = load("base", [*sets, f"run.name={name}"], environ={})
    (directory / "profile.toml").touch()
    (directory / "config.resolved.json").write_text(
        json.dumps(to_document(loaded.profile, loaded.origins)), encoding="utf-8"
    )
    steps = enumerate(rewards, 1)
    lines = [
        {"step": n, "time_s": n * step_s, "groups_trained": n * groups, "reward/mean": reward}
        for n, reward in steps
    ]
    (directory / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8"
    )
    totals = {"trainer/idle_ratio": 0.25, "staleness/mean": 0.5, "staleness/max": 1}
    return Recorded(write_status(directory, phase="done", progress={"step": len(rewards)}, totals=totals))


@pytest.fixture
def runs(tmp_path: Path) -> list[Recorded]:
    """By samples (n = 2): a has trained 40, b 80; by time: a took 100 s, b 40 s."""
    slow = record(
        tmp_path, "a", ["rollout.n=2"], [0.1 * step for step in range(1, 11)], step_s=10.0, groups=2
    )
    sets = ["rollout.n=2", "async_training.staleness_threshold=1", "task.params.max_numbers=7"]
    fast = record(tmp_path, "b", sets, [0.05 * step for step in range(1, 21)], step_s=2.0, groups=2)
    return [slow, fast]


def test_configurations_differ_where_they_do(runs):
    assert compare(runs).differences == {
        "async_training.staleness_threshold": [0, 1],
        "task.params.max_numbers": [None, 7],
    }


def test_rewards_are_compared_at_equal_samples_and_at_equal_time(runs):
    made = compare(runs, target=0.4)
    found = {figure.label: figure.values for figure in made.figures}
    # 40 samples: a's tenth step, b's tenth; a window of 4 samples is one step of either.
    assert (made.samples, made.time_s) == (40, 40.0)
    assert found["reward at 40 samples"] == pytest.approx([1.0, 0.5])
    assert found["reward at 0:00:40"] == pytest.approx([0.4, 1.0])
    assert found["time to reward 0.400"] == [40.0, 16.0]
    assert found["samples to it"] == [16, 32]
    assert found["samples"] == [40, 80]
    assert found["samples/s"] == [0.4, 2.0]
    assert found["trainer idle"] == [0.25, 0.25]
    assert found["mode"] == ["on-policy-pipeline", "one-step-off"]


def test_rewards_along_samples_and_time_are_left_out_of_replays(runs):
    (runs[1].files.path / "replay.json").write_text(
        json.dumps({"of": "runs/a", "from_step": 6, "to_step": 20})
    )
    made = compare(runs, target=0.4)
    found = {figure.label: figure.texts for figure in made.figures}
    # only a's samples and time count: 40, after 100 s
    assert found["reward at 40 samples"] == ["1.000", "-"]
    assert found["reward at 0:01:40"] == ["1.000", "-"]
    assert found["time to reward 0.400"] == ["0:00:40", "-"]
    assert found["samples to it"] == ["16", "-"]
    assert found["train steps"] == ["10", "20"]
    said = [remark.text for remark in run_data(runs[1]).findings if remark.about == "learning"]
    assert said[0].endswith("A replay of runs/a, whose trajectories and rewards these are.")


def test_the_status_of_a_replay_says_which_steps_it_has_trained(runs, tmp_path, capsys):
    (runs[1].files.path / "replay.json").write_text(
        json.dumps({"of": "runs/a", "from_step": 6, "to_step": 20})
    )
    for name, is_replay in (("a", False), ("b", True)):
        assert run(["status", name, "--runs-dir", str(tmp_path)]) == 0
        assert (
            "a replay of runs/a, of its steps after 6: counts include" in capsys.readouterr().out
        ) == is_replay


def test_the_target_is_what_all_have_reached_and_longer_steps_have_the_same_window(tmp_path):
    noisy = record(tmp_path, "noisy", [], [0.0, 1.0] * 100, step_s=1.0, groups=1)
    calm = record(tmp_path, "calm", [], [0.5] * 5, step_s=40.0, groups=40)
    made = compare([noisy, calm])
    found = {figure.label: figure.values for figure in made.figures}
    assert made.reward == pytest.approx(0.5)
    assert found["reward at 1,600 samples"] == pytest.approx([0.5, 0.5])


def test_compare_prints_the_figures_as_json_and_doubts_tasks_that_differ(runs, tmp_path, capsys):
    assert run(["compare", "a", "b", "--runs-dir", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["figures"]["reward at 40 samples"] == pytest.approx([1.0, 0.5])
    assert "tasks differ (task.params.max_numbers)" in printed.err
    assert run(["compare", "a", "--runs-dir", str(tmp_path)]) == 2


def test_compare_writes_the_report_of_the_runs_side_by_side(runs, tmp_path, capsys, monkeypatch):
    out = tmp_path / "two.html"
    monkeypatch.chdir(tmp_path)
    assert run(["compare", "a", "b", "--reward", "0.4", "--out", "two.html", "--runs-dir", "."]) == 0
    *table, path = capsys.readouterr().out.splitlines()
    assert path == str(out)
    rows = {" ".join(row.split()[:-2]): row.split()[-2:] for row in table}
    assert "0:00:16" in rows["time to reward 0.400"]
    assert {"", "state", "train steps", "time", "last eval", "trainer idle", "rollouter idle"} <= rows.keys()
    page = out.read_text(encoding="utf-8")
    for words in ("<code>async_training.staleness_threshold</code>", "time to reward 0.400", "0:00:16"):
        assert words in page


def test_a_run_that_has_trained_nothing_is_compared_without_rewards(runs, tmp_path):
    comparison = compare([runs[0], record(tmp_path, "young", [], [], step_s=1.0, groups=1)])
    assert "rewards are not compared" in comparison.doubts[-1]
    assert not any(figure.label.startswith("reward at") for figure in comparison.figures)


def test_last_evals_have_intervals_and_their_difference_says_whether_it_is_clear(runs):
    """64 prompts of which 16 and 40 are right; of the same prompts one run has all that the other has, and 24
    more."""
    ends = {"reward_low": 0.1, "reward_high": 0.9, "num_prompts": 64, "prompts": "same"}
    for recorded, right in zip(runs, (16, 40), strict=True):
        rewards = [1.0] * right + [0.0] * (64 - right)
        event = {"event": "eval", "time_s": 9.0, "version": 3, "reward_mean": right / 64, "rewards": rewards}
        recorded.files.events.write_text(json.dumps(event | ends) + "\n", encoding="utf-8")
    found = {figure.label: figure for figure in compare(runs).figures}
    assert found["last eval"].texts == ["0.250 [0.100..0.900]", "0.625 [0.100..0.900]"]
    # Agresti and Min: 24.5 rises, 0.5 falls, 66 pairs: 24 / 66 -+ 1.96 / 66 * sqrt(25 - 24 ** 2 / 66)
    assert found["against a"].texts == ["-", "+0.375 (95%: 0.244 to 0.483)"]
    other = runs[1].files.events
    other.write_text(other.read_text(encoding="utf-8").replace("same", "other"), encoding="utf-8")
    # Newcombe, for other prompts: 0.375 -+ sqrt(0.525 ** 2 + 0.65 ** 2) and sqrt(0.275 ** 2 + 0.15 ** 2) to
    # the other ends
    again = {figure.label: figure for figure in compare(runs).figures}["against a"].texts
    assert again == ["-", "+0.375 (95%: -0.461 to 0.688): too few prompts to tell"]
