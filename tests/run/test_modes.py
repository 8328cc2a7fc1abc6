"""Whole runs of profiles that no other file runs to the end, held against what each profile promises.
Elsewhere: partial-rollout (test_train.py), on-policy-pipeline (test_verl_data.py), stale-samples and colocate
with the embedded engine (test_ends.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines.needs import needs_vllm
from tests.run.commands import lines, train

pytestmark = pytest.mark.slow

STEPS = 8
"""Two windows of stream-off-policy."""


class Finished(NamedTuple):
    """Of a run that has ended: its directory, the lines of metrics.jsonl, those of events.jsonl, and
    status.json."""

    run: Path
    steps: list[dict[str, float]]
    events: list[dict[str, object]]
    status: dict[str, object]

    def largest(self, key: str) -> float:
        return max(step[key] for step in self.steps)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """`finished(profile, *sets)`: one short run of the profile for all tests that ask for it. They only read
    it."""
    made: dict[tuple[str, ...], Finished] = {}

    def run_of(profile: str, *sets: str) -> Finished:
        if (profile, *sets) not in made:
            directory = tmp_path_factory.mktemp(profile)
            code, _, err = train(directory, profile, "short", f"run.train_steps={STEPS}", *sets)
            assert code == 0, err
            run = directory / "runs" / "short"
            status = json.loads((run / "status.json").read_text())
            made[profile, *sets] = Finished(
                run, lines(run / "metrics.jsonl"), lines(run / "events.jsonl"), status
            )
        return made[profile, *sets]

    return run_of


TWO_VLLMS = ("rollout.engine=vllm", "weights.mode=sync", "weights.transport=disk")
RUNS = [("one-step-off",), ("stream-off-policy",), pytest.param(("colocate", *TWO_VLLMS), marks=needs_vllm)]


@pytest.mark.parametrize("words", RUNS, ids=lambda words: words[0])
def test_a_run_ends_with_every_admitted_group_trained_and_no_response_cut(finished, words):
    ran = finished(*words)
    assert ran.status["phase"] == "done"
    assert [step["step"] for step in ran.steps] == list(range(1, STEPS + 1))
    assert [step["ledger/trained"] for step in ran.steps] == [4 * step["step"] for step in ran.steps]
    last = ran.steps[-1]
    assert last["ledger/admitted_total"] - last["ledger/requeued"] == 4 * STEPS
    assert last["ledger/dropped"] == 0
    assert ran.largest("fully_async/partial/max_partial_span") == 0


def test_one_step_off_trains_what_was_sampled_one_version_ago(finished):
    ran = finished("one-step-off")
    assert ran.largest("staleness/max") == 1
    assert ran.steps[0]["staleness/max"] == 0
    assert [step["version"] for step in ran.steps] == [step["step"] for step in ran.steps]


def test_stream_off_policy_trains_each_window_of_four_steps_on_its_own_versions_groups(finished):
    ran = finished("stream-off-policy")
    assert ran.largest("staleness/max") == 0
    assert [step["staleness/steps_max"] for step in ran.steps] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [event["version"] for event in ran.events if event["event"] == "loaded"] == [0, 1, 2]


@needs_vllm
def test_two_vllm_workers_that_take_turns_with_the_trainer_load_every_version_each_for_itself(finished):
    """One per place: the machine's and the trainer's."""
    ran = finished("colocate", *TWO_VLLMS)
    loaded = [event for event in ran.events if event["event"] == "loaded"]
    assert {event["worker"] for event in loaded} == {"rollout-0", "rollout-1"}
    for worker in ("rollout-0", "rollout-1"):
        assert [event["version"] for event in loaded if event["worker"] == worker] == list(range(STEPS + 1))
        assert any(event["event"] == "running" and worker in event["workers"] for event in ran.events)
    assert max(event["logprob_abs_diff"] for event in loaded) <= 1e-4
    assert ran.steps[-1]["sync/logprob_abs_diff"] <= 1e-4
    assert ran.largest("staleness/max") == 0
