"""Reading a run's files back: of killed, resumed and running ones too."""

import json

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.observe.recorded import Recorded, read_metrics


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def recorded(tmp_path):
    return Recorded(tmp_path)


def test_a_directory_without_files_is_an_empty_run(recorded):
    assert list(recorded.metrics()) == list(recorded.timeline()) == list(recorded.events()) == []
    assert recorded.sampled_steps == recorded.attempts == list(recorded.samples(1)) == []
    assert (recorded.status, recorded.roles) == (None, {})


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"progress": 3}', '{"executors": [{"name": "trainer"}]}', '{"eval": {"history": [1]}}'],
)
def test_a_status_of_another_form_is_none(recorded, text):
    recorded.files.status.write_text(text)
    assert (recorded.status, recorded.roles) == (None, {})
    (note,) = recorded.damage.notes
    assert note.startswith(f"{recorded.files.status} is left out: ")


def placed(step):
    return {"step": step, "time_s": 2.0 * step, "groups_trained": 16 * step}


def test_a_last_line_that_is_cut_short_is_left_out_in_silence_and_any_other_is_said(recorded):
    recorded.files.metrics.write_text(lines(*map(placed, (1, 2))) + '{"step": 3, "rew')
    assert [line["step"] for line in recorded.metrics()] == [1, 2]
    assert recorded.damage.notes == []
    recorded.files.metrics.write_text(
        '{"step": 1, "rew\n' + lines(placed(2), {"step": 3, "groups_trained": 48}, placed(4)) + "7\n"
    )
    for _ in range(2):  # a line counts once, however often it is read
        assert [line["step"] for line in recorded.metrics()] == [2, 4]
        (note,) = recorded.damage.notes
        assert f"{recorded.files.metrics} left out: 3; line 1: invalid JSON" in note


def test_figures_that_need_every_line_are_not_made_of_a_damaged_file(recorded):
    recorded.files.metrics.write_text(lines(placed(1), {"step": 2, "groups_trained": 32}, placed(3)))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl left out: 1; line 2: time_s: field required"):
        read_metrics(recorded.files.metrics)


def test_only_the_steps_that_are_asked_for_are_read(recorded):
    recorded.files.timeline.write_text(
        lines(*({"step": step, "spans": {}} for step in range(1, 6))) + "no JSON\n"
    )
    assert [line["step"] for line in recorded.timeline(2, 4)] == [2, 3, 4]


def test_events_of_steps_that_a_resume_trained_again_are_left_out(recorded):
    """Step 2 is checkpointed at 2.0 s and killed at 3 s; the resume goes on at 1.9 s."""
    before = [
        {"event": "trained", "time_s": 1.0, "step": 1},
        {"event": "trained", "time_s": 1.9, "step": 2},
        {"event": "checkpointed", "time_s": 2.0, "step": 2},
        {"event": "trained", "time_s": 1.9001, "step": 3},
        {"event": "trained", "time_s": 3.0, "step": 3},
    ]
    after = [
        {"event": "resumed", "time_s": 1.9002, "from_step": 2, "from_time_s": 1.9},
        {"event": "trained", "time_s": 2.9, "step": 3},
    ]
    recorded.files.events.write_text(lines(*before, *after))
    assert [(event["event"], event["time_s"]) for event in recorded.events()] == [
        ("trained", 1.0),
        ("trained", 1.9),
        ("checkpointed", 2.0),
        ("resumed", 1.9002),
        ("trained", 2.9),
    ]
    assert [event["time_s"] for event in recorded.events("trained")] == [1.0, 1.9, 2.9]


def test_an_eval_that_a_resume_has_overtaken_holds_if_its_version_does(recorded):
    """Version 0 was scored after the checkpoint of step 2, version 2 too, which is trained again."""
    evals = [
        {"event": "eval", "time_s": 2.5 + version, "version": version, "reward_mean": 0.1 * version}
        for version in (0, 2)
    ]
    resumed = {"event": "resumed", "time_s": 1.9, "from_step": 2, "version": 1}
    recorded.files.events.write_text(lines(*evals, resumed, {**evals[1], "time_s": 9.0}))
    assert [(event["version"], event["time_s"]) for event in recorded.events("eval")] == [(0, 2.5), (2, 9.0)]


def sample(step):
    numbers = {"step": step, "window": 1, "trajectory": 0, "reward": 1.0, "segment_lengths": [2]}
    return {
        "group": "g",
        **numbers,
        "versions": [-1, 1],
        "logprobs": [0, -0.5],
        "mask": [0, 1],
        "pieces": ["a", "b"],
        "advantage": None,
        "answer": None,
        "finish_reason": "stop",
        "turn_rewards": [],
        "fields": {},
    }


def test_attempts_and_dumps_are_in_the_order_of_their_numbers(recorded):
    for number in (10, 2, 1):
        (recorded.files.logs / f"attempt-{number}").mkdir(parents=True)
    recorded.files.samples.mkdir()
    for step in (1000000, 20):
        (recorded.files.samples / f"step-{step:06d}.jsonl").write_text(lines(sample(step)))
    assert [path.name for path in recorded.attempts] == ["attempt-1", "attempt-2", "attempt-10"]
    assert recorded.sampled_steps == [20, 1000000]
    assert [one["step"] for one in recorded.samples(20)] == [20]
