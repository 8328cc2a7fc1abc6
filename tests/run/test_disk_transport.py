"""A whole on-policy run whose weights travel over the disk, and the export of its last checkpoint."""

from __future__ import annotations

import json
import time

import pytest
from safetensors.torch import load_file
from torch import equal

from tests.run.commands import LIMIT_S, SMALL, finish, lines, start

pytestmark = pytest.mark.slow


def test_every_version_arrives_over_the_disk_and_the_last_one_is_exported(tmp_path):
    sets = ("weights.transport=disk", "weights.keep_versions=all", "run.train_steps=4", "rollout.workers=2")
    words = ("--profile", "on-policy-pipeline", "--name", "otter", "--ui", "plain")
    process = start(tmp_path, "train", *words, sets=(*SMALL, *sets))
    run = tmp_path / "runs" / "otter"
    seen: set[str] = set()
    most, deadline_s = 0, time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        there = {path.name for path in (run / "weights").glob("version-*")}
        seen |= there
        most = max(most, len(there))
        time.sleep(0.01)
    code, _, err = finish(process)
    assert code == 0, err
    loaded = [event for event in lines(run / "events.jsonl") if event["event"] == "loaded"]
    for worker in ("rollout-0", "rollout-1"):
        assert [event["version"] for event in loaded if event["worker"] == worker] == [0, 1, 2, 3, 4]
    assert all(event["logprob_abs_diff"] <= 1e-5 for event in loaded)
    assert seen <= {f"version-00000{version}" for version in range(5)}
    assert 1 <= most <= 2
    assert not (run / "weights").exists()
    assert_on_policy(run)

    code, out, err = finish(start(tmp_path, "export", "otter"))
    assert code == 0, err
    assert out == "runs/otter/exports/step-000004\n"
    assert "version 4 (step 4) of run 'otter'" in err
    exported = load_file(run / "exports" / "step-000004" / "model.safetensors")
    kept = load_file(run / "versions" / "version-000004" / "model.safetensors")
    assert exported.keys() == kept.keys()
    assert all(equal(exported[name], kept[name]) for name in kept)


def assert_on_policy(run):
    steps = lines(run / "metrics.jsonl")
    assert steps[-1]["ledger/trained"] == 16
    assert max(step["fully_async/partial/max_partial_span"] for step in steps) == 0
    assert max(step["staleness/max"] for step in steps) == 0
    assert json.loads((run / "status.json").read_text())["phase"] == "done"
