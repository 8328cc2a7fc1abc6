"""The same profile and seed give the same weights, bit for bit: with another load of the machine, with a
worker that is killed, and for `on-policy-pipeline` and `stream-off-policy` with K = 1 also by `colocate`.
(benchmarks/deterministic.py does this for all profiles; the loop is proved on the virtual clock in
tests/loop/test_logical_order.py.)"""

from __future__ import annotations

import pytest

from tests.run.commands import finish, lines, start
from tests.run.fingerprints import DETERMINISTIC, RANKS, busy_core, fingerprints, train

pytestmark = pytest.mark.slow

STEPS = 8
SETS = (*DETERMINISTIC, f"run.train_steps={STEPS}", "rollout.max_restarts=1")


def test_partial_rollouts_repeat_beside_a_busy_process_and_after_a_worker_was_killed(tmp_path):
    """Many responses cross an update."""
    sets = (*SETS, "async_training.trigger_parameter_sync_step=1", "async_training.staleness_threshold=1")
    first, _ = train(tmp_path, "partial-rollout", "first", *sets)
    with busy_core():
        second, _ = train(tmp_path, "partial-rollout", "second", *sets, kill_after=3)
    assert list(first) == [*range(STEPS + 1)]
    assert len({*first.values()}) == STEPS + 1
    assert second == first
    steps = lines(tmp_path / "runs" / "first" / "metrics.jsonl")
    assert max(step.get("fully_async/partial/max_partial_span") or 0 for step in steps) > 0


def test_the_on_policy_pipeline_is_the_synchronous_loop(tmp_path):
    """With as many trainer ranks: their sums are rounded in the order of ranks."""
    expected, _ = train(tmp_path, "colocate", "colocate", *SETS)
    assert list(expected) == [*range(STEPS + 1)]
    assert train(tmp_path, "on-policy-pipeline", "pipeline", *SETS, *RANKS)[0] == expected
    stream = "async_training.trigger_parameter_sync_step=1"
    assert train(tmp_path, "stream-off-policy", "stream", *SETS, *RANKS, stream)[0] == expected


def test_a_resumed_run_goes_on_as_the_uninterrupted_one(tmp_path):
    sets = (*SETS, "async_training.trigger_parameter_sync_step=1", "checkpoint.every_steps=3")
    expected, _ = train(tmp_path, "one-step-off", "whole", *sets)
    code, _, err = finish(start(tmp_path, "resume", "whole/step-000003", "--ui", "plain"))
    assert code == 0, err
    assert fingerprints(tmp_path / "runs" / "whole") == expected  # those of both legs
    resumed = [
        event for event in lines(tmp_path / "runs" / "whole" / "events.jsonl") if event["event"] == "resumed"
    ]
    assert [event["from_step"] for event in resumed] == [3]
