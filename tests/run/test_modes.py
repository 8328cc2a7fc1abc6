"""Whole runs of profiles that no other file runs to the end, held against what each profile promises.
Elsewhere: partial-rollout (test_train.py), on-policy-pipeline (test_verl_data.py), one-step-off and
stream-off-policy (test_cluster.py), stale-samples (test_submitted.py) and colocate with the embedded engine
(test_ends.py)."""

from __future__ import annotations

import pytest

from tests.engines.needs import needs_vllm
from tests.run.commands import Finished, train

pytestmark = pytest.mark.slow

STEPS = 8


@needs_vllm
def test_two_vllm_workers_that_take_turns_with_the_trainer_load_every_version_each_for_itself(tmp_path):
    """One per place: the machine's and the trainer's. No response is cut."""
    sets = ("rollout.engine=vllm", "weights.mode=sync", "weights.transport=disk")
    code, _, err = train(tmp_path, "colocate", "short", f"run.train_steps={STEPS}", *sets)
    assert code == 0, err
    ran = Finished.of(tmp_path / "runs" / "short")
    ran.assert_all_admitted_was_trained(STEPS)
    loaded = ran.named("loaded")
    assert {event["worker"] for event in loaded} == {"rollout-0", "rollout-1"}
    for worker in ("rollout-0", "rollout-1"):
        assert [event["version"] for event in loaded if event["worker"] == worker] == list(range(STEPS + 1))
        assert any(worker in event["workers"] for event in ran.named("running"))
    assert max(event["logprob_abs_diff"] for event in loaded) <= 1e-4
    assert ran.steps[-1]["sync/logprob_abs_diff"] <= 1e-4
    assert ran.largest("staleness/max") == 0
