"""A whole run whose versions travel by a bucket of an S3 server: the workers share no memory with the
trainer. (Differences by a directory: tests/job/test_delta_syncs.py; a run that sends them: test_ends.py.)"""

from __future__ import annotations

import json

from tests.run.commands import SMALL, Finished, finish, start
from tests.weights.s3_server import KEY, SECRET, needs_s3, s3_server

pytestmark = needs_s3

STEPS = 6
SETS = f"""
    weights.transport=directory weights.url=s3://bucket/runs run.train_steps={STEPS}
    lora.rank=4 lora.sync=adapter
    async_training.staleness_threshold=1 async_training.trigger_parameter_sync_step=1
"""


def test_a_run_learns_adapters_by_a_bucket_and_leaves_nothing_there_and_no_secret_anywhere(tmp_path):
    with s3_server() as s3:
        words = ("--profile", "partial-rollout", "--name", "far", "--ui", "plain")
        process = start(tmp_path, "train", *words, sets=(*SMALL, *SETS.split()), **s3.environment)
        code, out, err = finish(process)
        assert code == 0, err
        assert s3.keys() == []
        put = {path for method, path in s3.requests if method == "PUT" and path.endswith("manifest.json")}
        assert put == {
            f"/bucket/runs/far/version-{version:06d}/manifest.json" for version in range(STEPS + 1)
        }
        for path in put:
            first = s3.requests.index(("PUT", path))
            folder = path.rpartition("/")[0]
            writes = [i for i, (method, name) in enumerate(s3.requests) if method == "PUT" and folder in name]
            assert max(writes) == first
    ran = Finished.of(tmp_path / "runs" / "far")
    assert ran.status["phase"] == "done"
    loaded = ran.named("loaded")
    assert max(event["version"] for event in loaded) == STEPS
    assert max(event["logprob_abs_diff_median"] for event in loaded) <= 1e-4
    texts = [out, err, *(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())]
    assert not [text for text in texts if SECRET in text or KEY in text]
    resolved = json.loads((tmp_path / "runs" / "far" / "config.resolved.json").read_text())
    assert resolved["profile"]["weights"]["url"] == "s3://bucket/runs"
