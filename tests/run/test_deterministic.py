"""The same profile and seed give the same weights, bit for bit: with another number of workers at another
pace, one of which is killed, resumed from a checkpoint, and for `on-policy-pipeline` also by `colocate`.
(benchmarks/deterministic.py does this for all profiles, and beside a busy process; the loop is proved on the
virtual clock in tests/loop/test_logical_order.py.)"""

from __future__ import annotations

import pytest

from asyncrl_cli.profile.keys import entries_of
from asyncrl_cli.profile.loaded import load
from tests.run.commands import finish, lines, start
from tests.run.fingerprints import DETERMINISTIC, fingerprints, train

STEPS = 6
SETS = (*DETERMINISTIC, f"run.train_steps={STEPS}")


@pytest.mark.slow
def test_partial_rollouts_repeat_with_another_worker_after_one_was_killed_and_when_resumed(tmp_path):
    """Many responses cross an update."""
    sets = ("async_training.trigger_parameter_sync_step=1", "async_training.staleness_threshold=1")
    sets = (*SETS, *sets, "checkpoint.every_steps=3")
    first, _ = train(tmp_path, "partial-rollout", "first", *sets, "rollout.workers=1")
    others = (*sets, "rollout.max_restarts=1")
    second, _ = train(tmp_path, "partial-rollout", "second", *others, kill_after=3)
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


@pytest.mark.slow
def test_the_on_policy_pipeline_is_the_synchronous_loop(tmp_path):
    """With as many trainer ranks as `colocate` makes of one trainer and one worker: their sums are rounded in
    the order of ranks."""
    sets = (*SETS, "rollout.workers=1")
    expected, _ = train(tmp_path, "colocate", "colocate", *sets)
    assert list(expected) == [*range(STEPS + 1)]
    sets = (*sets, "placement.trainer_workers=2")
    assert train(tmp_path, "on-policy-pipeline", "pipeline", *sets)[0] == expected


def test_a_window_of_one_step_makes_the_stream_the_on_policy_pipeline():
    stream = load("stream-off-policy", ("async_training.trigger_parameter_sync_step=1",), environ={})
    assert entries_of(stream.profile) == entries_of(load("on-policy-pipeline", (), environ={}).profile)
