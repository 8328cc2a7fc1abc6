"""Whole runs by the command line: real Ray, real engines, a real model that trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl_cli.contracts.status import parse_status
from asyncrl_cli.measure.machines import MACHINES, machine_of
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.render import render
from asyncrl_cli.report.page import page_of
from asyncrl_cli.report.run_data import run_data
from asyncrl_cli.report.write import write_trace
from tests.engines.needs import needs_vllm
from tests.engines.vllm.vllm_processes import engine_processes
from tests.run.commands import (
    SMALL,
    Finished,
    descendants,
    finish,
    lines,
    start,
    wait_for_steps,
    wait_until_gone,
)

pytestmark = pytest.mark.slow

STEPS, AHEAD = 10, 8
RANKS = {"transformers": 2, "vllm": 1}
"""Trainer ranks, and as many rollout workers."""
REPORTED_S = 2.5
"""Executors report once a second; two ends of a run's time."""


class Ended(NamedTuple):
    """A run that has ended. `engines`: how many of its processes held one of vLLM; `left`: those that were
    still there later; `has_torch`: whether the driver had loaded it by the second step."""

    run: Path
    out: str
    err: str
    engines: int
    left: set[int]
    has_torch: bool


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=needs_vllm)])
def partial(tmp_path_factory, request):
    """One partial-rollout run per engine that keeps everything: samples of every step and the weights of
    every version."""
    directory = tmp_path_factory.mktemp("partial")
    sets = (
        f"rollout.engine={request.param}",
        "rollout.interrupt=recompute-kv",
        f"run.train_steps={STEPS}",
        # One group at a time, long responses, many of them ahead: however fast the engine is, the first
        # versions find it busy.
        "rollout.slots=4",
        "rollout.max_response_tokens=128",
        f"async_training.staleness_threshold={AHEAD}",
        "weights.keep_versions=all",
        "logging.samples_every_steps=1",
        "logging.samples_per_step=1000",
        "logging.wandb=offline",
        "async_training.trigger_parameter_sync_step=1",
        # a trainer that computes logp and ref_logp itself: the run has all eight machines
        f"placement.trainer_workers={RANKS[request.param]}",
        f"rollout.workers={RANKS[request.param]}",
        "algorithm.use_kl_loss=true",
        'algorithm.old_logprobs="recompute"',
        "trainer.ppo_mini_batch_size=2",
        "async_training.require_batches=2",
    )
    words = ("--profile", "partial-rollout", "--name", "kept", "--ui", "plain")
    process = start(directory, "train", *words, sets=(*SMALL, *sets))
    run = directory / "runs" / "kept"
    wait_for_steps(process, run, 2)
    family = descendants(process.pid)
    has_torch = "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    engines = sum(bool(engine_processes(pid)) for pid in family)
    code, out, err = finish(process)
    assert code == 0, err
    return Ended(
        run=run, out=out, err=err, engines=engines, left=wait_until_gone(family), has_torch=has_torch
    )


def test_a_run_ends_with_clean_accounts_and_data_only_on_stdout(partial):
    run, out, err, *_ = partial
    last = lines(run / "metrics.jsonl")[-1]
    assert out == ""
    assert f"step {STEPS}/{STEPS}" in err
    assert last["step"] == STEPS
    assert last["ledger/trained"] == 4 * STEPS
    assert last["ledger/admitted_total"] == 4 * STEPS + last["ledger/dropped"] + last["ledger/requeued"]
    assert last["eval/version"] == last["version"] == STEPS


def test_the_bytes_of_every_trained_token_are_put_and_fetched_and_no_key_is_left(partial):
    steps = lines(partial.run / "metrics.jsonl")
    tokens = sum(
        len(one["tokens"]) for path in (partial.run / "samples").glob("*.jsonl") for one in lines(path)
    )
    num_bytes = tokens * (4 + 4 + 4 + 1)  # token, logprob, version, mask
    assert tokens > 0
    # Some are put and not trained. Each is fetched to be trained and for the samples; the last ones' dump
    # ends after the last line.
    put, fetched = (sum(step.get(f"data/bytes_{what}", 0) for step in steps) for what in ("put", "fetched"))
    assert num_bytes <= put < 3 * num_bytes
    assert 1.5 * num_bytes < fetched < 6 * num_bytes
    assert all(step["data/fetch_s"] > 0 and 0 <= step["data/copies"] <= 1 for step in steps)
    status = json.loads((partial.run / "status.json").read_text())
    assert status["data"].items() >= {"keys": 0, "bytes": 0, "orphans": 0}.items()
    assert status["data"]["bytes_fetched_per_step"] * STEPS == status["totals"]["data/bytes_fetched"]


def test_rollouts_cross_weight_syncs_within_the_bound(partial):
    run = partial.run
    steps = lines(run / "metrics.jsonl")
    assert max(step["fully_async/partial/max_partial_span"] for step in steps) >= 1
    assert 1 <= max(step["staleness/max"] for step in steps) <= AHEAD


def test_every_logprob_is_that_of_the_version_that_sampled_its_token(partial):
    """Recomputed by plain transformers forwards of the kept weights, span by span."""
    run = partial.run
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
    assert counted >= 16 * STEPS
    assert worst <= 1e-4


def test_samples_have_the_trainers_logprobs_as_the_step_began(partial):
    """With windows of one step, those of the version that was published before it."""
    path = partial.run / "samples" / "step-000010.jsonl"
    model = AutoModelForCausalLM.from_pretrained(partial.run / "versions" / "version-000009")
    for sample in lines(path):
        sampled_T = torch.tensor(sample["mask"][1:], dtype=torch.bool)
        difference_T = _logprobs(model, sample["tokens"]) - torch.tensor(sample["trainer_logprobs"][1:])
        assert difference_T[sampled_T].abs().max() <= 1e-4


def test_idle_ratios_are_those_of_the_timeline_and_leave_out_the_start(partial):
    spans = [span for line in lines(partial.run / "timeline.jsonl") for span in line["spans"]["trainer"]]
    idle_s, whole_s = (
        sum(end_s - start_s for state, start_s, end_s in spans if state not in at_work)
        for at_work in (("busy", "scoring"), ())
    )
    totals = json.loads((partial.run / "status.json").read_text())["totals"]
    # The timeline ends with the oldest of all executors' newest reports, up to a second before the last
    # step's end.
    rest_s = max(0.0, lines(partial.run / "metrics.jsonl")[-1]["time_s"] - spans[-1][2])
    assert rest_s < 1 + whole_s / 2, "a timeline with half of the run missing"
    least, most = idle_s / (whole_s + rest_s), (idle_s + rest_s) / (whole_s + rest_s)
    assert least - 0.02 <= totals["trainer/idle_ratio"] <= most + 0.02


def test_samples_have_the_answer_that_the_task_expects(partial):
    for sample in lines(partial.run / "samples" / "step-000010.jsonl"):
        direction, numbers = re.search(r"([<>])([0-9ab]+)=", sample["text"]).groups()
        assert sample["answer"].split(",")[-1] == "".join(sorted(numbers, reverse=direction == ">"))


def _logprobs(model, tokens):
    with torch.no_grad():
        logits_TV = model(torch.tensor([tokens])).logits[0, :-1]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def _difference(model, sample, version):
    logprobs_T = _logprobs(model, sample["tokens"])
    sampled_T = torch.tensor(sample["versions"][1:]) == version
    assert (
        sampled_T.tolist()
        == [v == version and bool(m) for v, m in zip(sample["versions"], sample["mask"], strict=True)][1:]
    )
    return (logprobs_T - torch.tensor(sample["logprobs"][1:]))[sampled_T].abs().max().item()


def test_syncs_are_verified_by_the_workers_own_engine(partial):
    run = partial.run
    loaded = [event for event in lines(run / "events.jsonl") if event["event"] == "loaded"]
    assert {event["version"] for event in loaded} >= {0, STEPS}
    assert all(event["logprob_abs_diff"] <= 1e-5 for event in loaded)


def test_the_parts_of_every_step_sum_to_it(partial):
    run = partial.run
    for step in lines(run / "metrics.jsonl"):
        parts = [value for key, value in step.items() if key.startswith("timing/") and key != "timing/step_s"]
        assert sum(parts) == pytest.approx(step["timing/step_s"], rel=0.01)


def test_no_process_of_the_run_outlives_it(partial, request):
    assert (partial.engines > 0) == (request.node.callspec.params["partial"] == "vllm")
    assert partial.left == set()


def test_the_driver_never_waits_for_an_import_of_torch(partial):
    """It takes seconds, in which nothing else would happen. (The first run of all warm-starts its model in
    the driver.)"""
    assert partial.has_torch == ("warm start" in partial.err)


def test_weights_and_biases_got_the_run(partial):
    assert list(partial.run.rglob("run-*.wandb"))


def test_every_machine_is_in_one_state_at_any_time_of_the_run(partial):
    ran, status = Finished.of(partial.run), parse_status((partial.run / "status.json").read_text())
    to_s, found = status.periods.utilization.to_s, {name: {} for name in MACHINES}
    for executor in status.executors:
        found[machine_of(executor.name, executor.role)][executor.name] = executor.state_s
    assert all(found.values()), found
    for state_s in (state_s for executors in found.values() for state_s in executors.values()):
        assert sum(state_s.values()) == pytest.approx(to_s, abs=REPORTED_S)
    updates, numbers = found["param_update"], range(len(found["generate"]))
    assert updates.keys() == {
        f"param_update-{role}-{number}" for role in ("trainer", "rollout") for number in numbers
    }
    gathers = [updates[f"param_update-trainer-{rank}"]["syncing"] for rank in numbers]
    assert min(gathers) == pytest.approx(max(gathers), rel=0.5)
    for worker in numbers:
        mine = updates[f"param_update-rollout-{worker}"]
        loads = [event for event in ran.named("loaded") if event["worker"] == f"rollout-{worker}"]
        assert mine["sending"] >= 0.5 * sum(event["send_s"] for event in loads[:-1])
        assert mine["loading"] >= 0.5 * sum(event["load_s"] for event in loads[:-1])
    # the trainer's own seconds, by another clock
    spent = {
        name: sum(step[f"timing/{name}_s"] for step in ran.steps) for name in ("ref", "old_logprob", "train")
    }
    assert found["ref_logp"]["ref_logp"]["busy"] == pytest.approx(spent["ref"], rel=0.3)
    assert found["logp"]["logp"]["busy"] == pytest.approx(spent["old_logprob"], rel=0.3)
    scoring_s = found["train"]["trainer"]["scoring"]
    assert scoring_s == pytest.approx(spent["ref"] + spent["old_logprob"], rel=0.3)
    assert found["train"]["trainer"]["busy"] >= spent["train"] * 0.9


def test_every_machine_has_a_row_on_the_screen_in_the_trace_and_in_the_report(partial, tmp_path):
    status = parse_status((partial.run / "status.json").read_text())
    rows = render(status, width=104, height=60).plain.splitlines()
    assert {row.split()[0] for row in rows if row} >= MACHINES.keys()
    write_trace(Recorded(partial.run), tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    states = [entry["args"].get("machine") for entry in entries if entry.get("cat") == "state"]
    assert set(states) == MACHINES.keys()
    page = page_of([run_data(Recorded(partial.run))], library="", title="kept")
    assert all(f"<td>{machine}</td>" in page for machine in MACHINES)
    assert "Not in this run" not in page
