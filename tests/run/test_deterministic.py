"""The same profile and seed give the same weights, bit for bit: with another load of the machine, with a
worker that is killed, resumed from a checkpoint, and for `on-policy-pipeline` and `stream-off-policy` with
K = 1 also by `colocate`. (benchmarks/deterministic.py does this for all profiles; the loop is proved on the
virtual clock in tests/loop/test_logical_order.py.)"""

from __future__ import annotations

import pytest

from tests.run.commands import finish, lines, start
from tests.run.fingerprints import DETERMINISTIC, busy_core, fingerprints, train

pytestmark = pytest.mark.slow

STEPS = 6
SETS = (*DETERMINISTIC, f"run.train_steps={STEPS}", "rollout.max_restarts=1")


def test_partial_rollouts_repeat_beside_a_busy_process_after_a_worker_was_killed_and_when_resumed(tmp_path):
    """Many responses cross an update."""
    sets = ("async_training.trigger_parameter_sync_step=1", "async_training.staleness_threshold=1")
    sets = (*SETS, *sets, "checkpoint.every_steps=3")
    first, _ = train(tmp_path, "partial-rollout", "first", *sets)
    with busy_core():
        second, _ = train(tmp_path, "partial-rollout", "second", *sets, kill_after=3)
    assert list(first) == [*range(STEPS + 1)]
    assert len({*first.values()}) == STEPS + 1
    assert second == first
    run = tmp_path / "runs" / "first"
    steps = lines(run / "metrics.jsonl")
    assert max(step.get("fully_async/partial/max_partial_span") or 0 for step in steps) > 0

    code, _, err = finish(start(tmp_path, "resume", "first/step-000003", "--ui", "plain"))
    assert code == 0, err
    assert fingerprints(run) == first  # those of both legs
    resumed = [event for event in lines(run / "events.jsonl") if event["event"] == "resumed"]
    assert [event["from_step"] for event in resumed] == [3]


def test_the_on_policy_pipeline_is_the_synchronous_loop(tmp_path):
    """With as many trainer ranks as `colocate` makes of one trainer and one worker: their sums are rounded in
    the order of ranks."""
    sets = (*SETS, "rollout.workers=1")
    expected, _ = train(tmp_path, "colocate", "colocate", *sets)
    assert list(expected) == [*range(STEPS + 1)]
    sets = (*sets, "placement.trainer_workers=2")
    assert train(tmp_path, "on-policy-pipeline", "pipeline", *sets)[0] == expected
    stream = "async_training.trigger_parameter_sync_step=1"
    assert train(tmp_path, "stream-off-policy", "stream", *sets, stream)[0] == expected
