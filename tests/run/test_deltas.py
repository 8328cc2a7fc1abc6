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


def loads(run, version):
    """The loads of the versions from this one on, by worker: the version, the fetched bytes, and the
    difference of the probes."""
    found = {}
    for event in lines(run / "events.jsonl"):
        if event["event"] == "loaded" and event["version"] >= version:
            got = (event["version"], event["fetched_bytes"], event["logprob_abs_diff_median"])
            found.setdefault(event["worker"], []).append(got)
    return found


def test_each_process_begins_with_all_bytes_and_goes_on_with_differences_through_a_resume(tmp_path):
    run = tmp_path / "runs" / "changed"
    words = ("--profile", "partial-rollout", "--name", "changed", "--ui", "plain")
    code, _, err = finish(start(tmp_path, "train", *words, sets=SETS))
    assert code == 0, err
    code, _, err = finish(start(tmp_path, "resume", "changed", "--ui", "plain", sets=("run.train_steps=14",)))
    assert code == 0, err
    assert "disagrees with the trainer" not in err
    found = loads(run, 0)
    assert set(found) == {"rollout-0", "rollout-1"}
    whole = found["rollout-0"][0][1]
    for got in found.values():
        assert all(diff < 0.05 for *_, diff in got)
        held = None
        for version, fetched, _ in got:
            begins = held is None or version == held  # a resumed run publishes its version again
            if begins:
                assert fetched == whole
            elif version == held + 1:
                assert fetched < 0.2 * whole
            held = version
        assert sum(fetched < 0.2 * whole for _, fetched, _ in got) > 4
