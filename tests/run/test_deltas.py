"""Weights that travel as differences, in a real run that is resumed (`weights.encoding`)."""

import pytest

from tests.run.commands import SMALL, finish, lines, start

pytestmark = pytest.mark.slow

SETS = (
    *SMALL,
    "weights.encoding=delta",
    "model.dtype=bfloat16",
    "trainer.lr=2e-5",
    "rollout.workers=2",
    "weights.max_logprob_diff=0.05",
    "async_training.trigger_parameter_sync_step=1",
    "checkpoint.every_steps=4",
)


def loads(run):
    """The loads in order: the worker, the version, the fetched bytes, and the difference of the probes."""
    keys = ("worker", "version", "fetched_bytes", "logprob_abs_diff_median")
    return [
        [event[key] for key in keys] for event in lines(run / "events.jsonl") if event["event"] == "loaded"
    ]


def test_each_node_begins_with_all_bytes_and_goes_on_with_differences_through_a_resume(tmp_path):
    run = tmp_path / "runs" / "changed"
    words = ("--profile", "partial-rollout", "--name", "changed", "--ui", "plain")
    code, _, err = finish(start(tmp_path, "train", *words, sets=SETS))
    assert code == 0, err
    code, _, err = finish(start(tmp_path, "resume", "changed", "--ui", "plain", sets=("run.train_steps=14",)))
    assert code == 0, err
    assert "disagrees with the trainer" not in err
    found = loads(run)
    assert {worker for worker, *_ in found} == {"rollout-0", "rollout-1"}
    assert all(diff < 0.05 for *_, diff in found)
    sizes = [fetched for _, _, fetched, _ in found]
    whole = sizes[0] or sizes[1]
    assert all(size in (0, whole) or size < 0.2 * whole for size in sizes)
    assert sizes.count(whole) >= 2, "at the start and after the resume"
    assert sum(0 < size < 0.2 * whole for size in sizes) > 4
    assert sizes.count(0) > 4, "of two workers of a node one fetches"
