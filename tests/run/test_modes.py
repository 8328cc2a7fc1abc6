"""A whole run of a colocated job with two vLLM engines. Other files run the other profiles: on-policy with the transport by
disk (test_verl_data.py); stale samples, and colocate with the embedded engine, until an interrupt."""

from __future__ import annotations

import json

import pytest

from tests.engines.needs import needs_vllm
from tests.run.commands import lines, train

pytestmark = pytest.mark.slow


@needs_vllm
def test_two_vllm_workers_load_every_version_each_for_itself(tmp_path):
    """One per place: the machine's and the trainer's."""
    sets = ("run.train_steps=4", "rollout.engine=vllm", "weights.mode=sync", "weights.transport=disk")
    code, _, err = train(tmp_path, "colocate", "two", *sets)
    assert code == 0, err
    run = tmp_path / "runs" / "two"
    events, steps = lines(run / "events.jsonl"), lines(run / "metrics.jsonl")
    loaded = [event for event in events if event["event"] == "loaded"]
    assert {event["worker"] for event in loaded} == {"rollout-0", "rollout-1"}
    for worker in ("rollout-0", "rollout-1"):
        assert [event["version"] for event in loaded if event["worker"] == worker] == [0, 1, 2, 3, 4]
        assert any(event["event"] == "running" and worker in event["workers"] for event in events)
    assert max(event["logprob_abs_diff"] for event in loaded) <= 1e-4
    assert steps[-1]["sync/logprob_abs_diff"] <= 1e-4
    assert steps[-1]["version"] == 4
    assert max(step["fully_async/partial/max_partial_span"] for step in steps) == 0
    assert max(step["staleness/max"] for step in steps) == 0
    assert json.loads((run / "status.json").read_text())["phase"] == "done"
    assert steps[-1]["ledger/trained"] == steps[-1]["ledger/admitted_total"] - steps[-1]["ledger/requeued"] == 16
    assert steps[-1]["ledger/dropped"] == 0
