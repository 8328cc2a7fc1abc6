"""The page of runs: its data is that of their files, its words follow from their figures, and it needs
nothing but itself."""

import json
import re

import numpy as np
import pytest

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.report.page import page_of, side_by_side_html
from asyncrl_cli.report.run_data import JOINED_POINTS, MOST_STEPS, Timeline, columns_of, run_data
from asyncrl_cli.report.side_by_side import compare
from tests.report.recorded_run import line, make_run
from tests.statuses import write_status


def page(*directories):
    found = [Recorded(directory) for directory in directories]
    before = side_by_side_html(compare(found)) if len(found) > 1 else ""
    return page_of([run_data(recorded) for recorded in found], library="", title="otter", before=before)


def embedded(html):
    return json.loads(
        re.search(r'<script type="application/json" id="report-data">(.*?)</script>', html, re.DOTALL)[1]
    )


def words(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html.split('<script type="application/json"')[0]))


def test_the_pages_columns_are_the_lines_of_metrics(tmp_path):
    lines = [line(step) for step in range(1, 7)]
    lines[2]["eval/reward_mean"] = 0.123456789
    del lines[4]["reward/mean"]
    found = embedded(page(make_run(tmp_path / "otter", lines=lines)))["runs"][0]
    assert found["steps_per_point"] == 1
    for place, own in enumerate(lines):
        at = {key: column[place] for key, column in found["columns"].items() if column[place] is not None}
        assert {key: at.get(key) for key in own} == {
            key: pytest.approx(value, rel=1e-6) for key, value in own.items()
        }
        assert {key for key in at if not key.startswith("states/")} == {*own, "samples"}
    assert found["columns"]["samples"] == [16 * 8 * step for step in range(1, 7)]


def test_the_trainers_ranks_are_counted_though_it_is_one_executor(tmp_path):
    directory = make_run(tmp_path / "otter", sets=["rollout.workers=2"])
    for rank in range(2):
        (directory / "logs" / "attempt-1").mkdir(parents=True, exist_ok=True)
        (directory / "logs" / "attempt-1" / f"trainer-{rank}.log").touch()
    assert "2 trainer ranks and 0 rollout workers, apart" in words(page(directory))


def test_evals_and_marks_leave_out_what_a_resume_did_again(tmp_path):
    found = embedded(page(make_run(tmp_path / "otter")))["runs"][0]
    assert [(one["version"], one["reward_mean"], one["samples"]) for one in found["evals"]] == [
        (0, 0.25, 256),
        (3, 0.5, 768),
    ]
    assert {(mark["kind"], mark["time_s"]) for mark in found["marks"]} == {
        ("eval", 20),
        ("eval", 60),
        ("checkpoint", 30.1),
        ("resume", 30),
        ("restart", 45),
    }


def test_a_long_run_has_the_mean_the_minimum_and_the_maximum_of_the_steps_of_a_point():
    rewards = np.random.default_rng(0).random(2 * MOST_STEPS + 3)
    lines = [
        {"step": step, "reward/mean": reward, "staleness/histogram": [1, 3]}
        for step, reward in enumerate(rewards)
    ]
    columns = columns_of(lines, len(lines))
    k = columns.steps_per_point
    parts = [rewards[start : start + k] for start in range(0, len(rewards), k)]
    assert len(parts) <= JOINED_POINTS
    for found, extreme in ((columns.values, np.mean), (columns.lows, np.min), (columns.highs, np.max)):
        np.testing.assert_allclose(found["reward/mean"], [extreme(part) for part in parts], rtol=1e-6)
    assert columns.values["staleness/histogram"] == [[1, 3]] * len(parts)


@pytest.mark.parametrize("length_s", [1000.0, 0.0])  # 0: the run's status is lost
def test_a_crowded_timeline_is_merged_to_what_a_page_holds_and_keeps_where_time_went(length_s):
    """Every 0.1 s: 0.07 s busy, 0.03 s starved; and half of the run paused."""
    spans = [
        span
        for i in range(5000)
        for span in (["busy", i / 10, i / 10 + 0.07], ["starved", i / 10 + 0.07, i / 10 + 0.1])
    ]
    lines = [{"step": step, "spans": {"r": spans[2000 * step : 2000 * step + 2000]}} for step in range(5)]
    lines.append({"step": 5, "spans": {"r": [["paused", 500.0, 1000.0]]}})
    timeline = Timeline(roles={"r": "rollout"}, length_s=length_s, most_spans=300).read(lines)
    assert timeline.merged_s == 10
    assert len(timeline.spans["r"]) == 2 * 50 + 1
    spent = {state: sum(own[1::2]) for state, own in timeline.to_json()["executors"]["r (rollout)"].items()}
    assert spent == {"busy": pytest.approx(350), "starved": pytest.approx(150), "paused": pytest.approx(500)}
    assert timeline.shares[0] == {
        "states/rollout/busy": pytest.approx(0.7),
        "states/rollout/starved": pytest.approx(0.3),
    }


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (
            {},
            "Mostly the trainer: the trainer idled 60% of the time, the rollout workers 5%. Generation "
            "limits the run",
        ),
        ({}, "the trainer waited for groups 60% of the time. 90% of the slots were used"),
        ({}, "If there are free cores or GPUs, give rollout a second process (rollout.workers = 2)"),
        ({"rollouter/slot_utilization": 0.3}, "Only 30% of the slots were used"),
        ({"trainer/idle_ratio": 0.05}, "Hardly anyone: the trainer idled 5%"),
        ({"trainer/idle_ratio": 0.05, "rollouter/idle_ratio": 0.5}, "Training limits the run"),
        ({"trainer/idle_ratio": 0.4, "rollouter/idle_ratio": 0.35}, "They wait for each other"),
        ({}, "Tokens were 0.50 versions old on average, 1 at most: the bound of 1 held."),
        ({"staleness/max": 2}, "the bound of 1 was broken"),
        (
            {"correction/kl": 0.01},
            "0.0100 nats per token away from the policy that had sampled the data: within the limit of",
        ),
        (
            {"correction/kl": 0.5},
            "0.5000 nats per token away from the policy that had sampled the data: above the limit of",
        ),
        (
            {"correction/kl": 0.5},
            "The policy is far from the one that sampled its data; lower async_training.staleness_threshold",
        ),
        (
            {"sync/logprob_abs_diff_median": 0.2},
            "a worker may be computing with other weights than it was sent",
        ),
        (
            {"sync/logprob_abs_diff": 3e-7, "sync/logprob_abs_diff_median": 0.0},
            "differed by 3e-07 on average, and by 0 in the median of the probes of a load, at most; the "
            "limit of the median is 0.001.",
        ),
        (
            {"timing/eval_s": 5.0},
            "Hardly anyone: the trainer idled 10% of the time, and 50% more during evals; the rollout",
        ),
        ({"timing/eval_s": 2.0}, "Evals held workers while the trainer waited 20% of the time."),
        ({"waste/tokens_discarded": 2000}, "25% of the sampled tokens were discarded"),
        (
            {"reward/without_reference_ratio": 0.5},
            "In 50% of the rewarded responses the reference answer does not stand",
        ),
        ({"env/failed/tool-timeout": 3, "env/failed/mixed": 2}, "Without a reward: tool-timeout 3."),
        ({"env/failed/mixed": 2}, "Given up because new weights were loaded meanwhile: 2 responses."),
        (
            {"train/skipped_steps": 2.0, "critic/skipped_steps": 1.0},
            "Skipped because the gradient was not finite: 18 optimizer steps in 6 train steps.",
        ),
        (
            {"bias/run/length": -0.245, "bias/run/length_error": 0.02, "bias/tokens/aborted": 58.0},
            "Trained responses were 0.24 standard deviations shorter than all that ended (standard error "
            "0.02; left out: aborted); aborted ones, which would have become longer, count with the tokens "
            "that they had.",
        ),
        (
            {"bias/run/difficulty": 0.04, "bias/run/difficulty_error": 0.02, "bias/tokens/filtered": 8.0},
            "Trained prompts were 0.04 standard deviations easier than all that came (standard error "
            "0.02; left out: filtered): within noise.",
        ),
        (
            {"bias/run/length": 0.0, "bias/run/length_error": 0.0},
            "Every group that ended was trained, with all its responses.",
        ),
        ({}, "6 train steps in 0:01:00, resumed 1 time. Held-out reward went from 0.250 to 0.500."),
    ],
)
def test_the_verdict_says_what_the_figures_mean(tmp_path, figures, said):
    lines = [line(step, **figures) for step in range(1, 7)]
    assert said in words(page(make_run(tmp_path / "otter", lines=lines)))


@pytest.mark.parametrize(
    ("on_stale", "said"),
    [("drop", "the bound of 2 held"), ("requeue", "the bound of 2 held"), ("accept", "sets no strict bound")],
)
def test_only_accepted_groups_may_be_older_than_the_bound(tmp_path, on_stale, said):
    sets = ("async_training.staleness_threshold=2", f"async_training.on_stale={on_stale}")
    shown = words(page(make_run(tmp_path / "otter", lines=[line(1)], sets=sets)))
    assert said in shown
    assert ("no token older than 2 versions" in shown) == (on_stale != "accept")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (0.02, "0.50 windows ahead on average (staleness_threshold 1): KL 0.0100, target 0.02."),
        (0.002, "KL 0.0100, target 0.002. What is left with nothing ahead is no staleness"),
    ],
)
def test_the_verdict_says_whether_the_governor_reached_its_target(tmp_path, target, said):
    sets = ("async_training.staleness_threshold=1", f"async_training.target_kl={target}")
    lines = [line(step, **{"correction/kl": 0.01, "governor/eta": 0.5}) for step in range(1, 7)]
    assert said in words(page(make_run(tmp_path / "otter", lines=lines, sets=sets)))


@pytest.mark.parametrize(
    ("tokens", "said"), [(500, "sampled 3,000 tokens in all."), (0, "only takes memory.")]
)
def test_the_verdict_says_what_lent_devices_brought(tmp_path, tokens, said):
    lines = [
        line(
            step,
            **{"placement/lent_s": 1.5, "placement/lent_tokens": step % 2 * 2 * tokens},
            **{"response_tokens/mean": 10.0 * step},  # which has no weight here
        )
        for step in range(1, 7)
    ]
    assert said in words(page(make_run(tmp_path / "otter", lines=lines)))


def scores(*rewards, version):
    known = {
        "event": "eval",
        "version": version,
        "reward_mean": float(np.mean(rewards)),
        "num_prompts": len(rewards),
    }
    return {
        **known,
        "time_s": 10.0,
        "step": 6,
        "reward_low": 0.0,
        "reward_high": 0.5,
        "prompts": "ab",
        "rewards": rewards,
    }


def judged(directory, *events):
    """The findings of a run with these events."""
    path = make_run(directory) / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return {finding.about: finding for finding in run_data(Recorded(directory)).findings}


def test_a_rise_within_the_scatter_of_few_prompts_is_no_good_news(tmp_path):
    found = judged(
        tmp_path / "otter", scores(0, 0, 0, 0.1, version=0), scores(0.1, 0.1, 0.1, 0.1, version=3)
    )["learning"]
    assert found.weight == "note"
    assert "from 0.025 [0.000..0.500] to 0.100 [0.000..0.500], a change of +0.075 (95%: " in found.text
    assert "over the same 4 prompts: too few prompts to tell it from no change." in found.text
    assert re.fullmatch(r"A change of this size would show with about eval\.prompts = \d+\.", found.change)


@pytest.mark.parametrize(("first", "last", "weight"), [(0.0, 1.0, "good"), (1.0, 0.0, "bad")])
def test_a_change_that_the_prompts_can_tell_is_judged(tmp_path, first, last, weight):
    same = [0.0, 1.0] * 20
    events = scores(*same, *[first] * 20, version=0), scores(*same, *[last] * 20, version=3)
    found = judged(tmp_path / "otter", *events)["learning"]
    assert (found.weight, found.change) == (weight, "")
    assert "over the same 60 prompts." in found.text


def test_evals_of_an_older_version_without_intervals_are_no_good_news(tmp_path):
    found = run_data(Recorded(make_run(tmp_path / "otter"))).findings[0]
    assert (found.about, found.weight) == ("learning", "note")


def test_of_a_simulated_run_nothing_is_said_to_be_learned(tmp_path):
    directory = make_run(tmp_path / "otter")
    write_status(directory, phase="done", profile="SIMULATED partial-rollout")
    found = run_data(Recorded(directory)).findings[0]
    assert found.text.endswith("SIMULATED: nothing is learned, and rewards are drawn.")


def test_the_runs_own_warnings_are_in_the_verdict_each_once(tmp_path):
    flat = "all trajectories of the last 5 train steps have the reward 0.1, which teaches nothing"
    warnings = [
        {"event": "warning", "time_s": 12.0, "message": message} for message in (flat, flat, *"abcde")
    ]
    directory = tmp_path / "otter"
    found = judged(directory, *warnings)
    told = [finding for finding in run_data(Recorded(directory)).findings if finding.about == "warning"]
    assert [finding.text for finding in told] == [
        *(f"At 0:00:12: {text}" for text in (flat, *"abcd")),
        "And 1 further warning.",
    ]
    assert (told[0].weight, found["warning"].change) == ("bad", "asyncrl logs otter")


def test_resources_are_to_be_divided_otherwise_where_a_side_has_several_processes(tmp_path):
    run = make_run(tmp_path / "otter", lines=[line(step) for step in range(1, 7)])
    logs = run / "logs" / "attempt-1"
    logs.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        (logs / f"trainer-{rank}.log").touch()
    assert (
        "Give rollout a larger share of the resources (placement.ratio or rollout.workers), or ask for"
    ) in words(page(run))


def test_differences_of_configuration_come_first(tmp_path):
    html = page(make_run(tmp_path / "otter"), make_run(tmp_path / "beaver", sets=["trainer.lr=0.5"]))
    told = words(html)
    assert re.search(r"trainer\.lr [0-9.]+ 0\.5 ", told)
    assert told.index("Differences of configuration") < told.index("Side by side") < told.index("Verdict")
    assert [run["name"] for run in embedded(html)["runs"]] == ["otter", "beaver"]


def test_text_of_a_run_stays_text_and_nothing_is_loaded_from_elsewhere(tmp_path):
    evil = "</script><script>alert(1)</script><img src=https://example.org/x>"
    directory = make_run(tmp_path / "otter", purpose=evil)
    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time_s": 50.0, "event": "warning", "message": evil}) + "\n")
    html = page(directory)
    assert evil not in html
    assert embedded(html)["runs"][0]["marks"][-1]["text"] == evil
    assert html.count("<script") == 3  # data, library, program
    assert "default-src 'none'" in html
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", html)


def test_each_field_that_a_loss_keeps_has_a_chart_and_without_one_there_is_none(tmp_path):
    lines = [line(step, **{"fields/entropy": 1.5, "fields/margin": -0.5 * step}) for step in range(1, 4)]
    with_fields = make_run(tmp_path / "with", lines=lines)
    charts = {chart["title"]: chart for chart in embedded(page(with_fields))["charts"]}
    assert charts["Field entropy"]["series"] == [["fields/entropy", "entropy"]]
    assert charts["Field margin"]["series"] == [["fields/margin", "margin"]]
    assert "data.md" in embedded(page(with_fields))["meanings"]["fields/margin"]
    without = embedded(page(make_run(tmp_path / "without")))["charts"]
    assert not [chart for chart in without if chart["title"].startswith("Field")]


def test_a_run_without_a_train_step_is_refused(tmp_path):
    with pytest.raises(RefusedError, match=r"metrics\.jsonl has no train step"):
        page(make_run(tmp_path / "otter", lines=[]))
