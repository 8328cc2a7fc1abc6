"""A short run in real processes whose trainer has two ranks and computes logp and ref_logp itself: it has all
eight machines, in its status, its trace and its report."""

from __future__ import annotations

import json

import pytest

from asyncrl_cli.contracts.status import parse_status
from asyncrl_cli.measure.machines import MACHINES, machine_of
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.render import render
from asyncrl_cli.report.page import page_of
from asyncrl_cli.report.run_data import run_data
from asyncrl_cli.report.write import write_trace
from tests.run.commands import Finished, train

pytestmark = pytest.mark.slow

SETS = (
    "placement.trainer_workers=2",
    "rollout.workers=2",
    "algorithm.use_kl_loss=true",
    'algorithm.old_logprobs="recompute"',
    "trainer.ppo_mini_batch_size=2",
    "async_training.require_batches=2",
)
REPORTED_S = 2.5
"""Executors report once a second; two ends of a run's time."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("machines")
    code, _, err = train(directory, "partial-rollout", "short", *SETS)
    assert code == 0, err
    return directory / "runs" / "short"


def test_every_machine_is_in_one_state_at_any_time_of_the_run(run):
    status = parse_status((run / "status.json").read_text())
    to_s, found = status.periods.utilization.to_s, {name: {} for name in MACHINES}
    for executor in status.executors:
        found[machine_of(executor.name, executor.role)][executor.name] = executor.state_s
    assert all(found.values()), found
    for state_s in (state_s for executors in found.values() for state_s in executors.values()):
        assert sum(state_s.values()) == pytest.approx(to_s, abs=REPORTED_S)
    updates = found["param_update"]
    assert updates.keys() == {
        *(f"param_update-trainer-{rank}" for rank in (0, 1)),
        *(f"param_update-rollout-{worker}" for worker in (0, 1)),
    }
    gathers = [updates[f"param_update-trainer-{rank}"]["syncing"] for rank in (0, 1)]
    assert gathers[0] == pytest.approx(gathers[1], rel=0.5)
    ran = Finished.of(run)
    for worker in (0, 1):
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


def test_every_machine_has_a_row_on_the_screen_in_the_trace_and_in_the_report(run, tmp_path):
    status = parse_status((run / "status.json").read_text())
    lines = render(status, width=104, height=60).plain.splitlines()
    assert {line.split()[0] for line in lines if line} >= MACHINES.keys()
    write_trace(Recorded(run), tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    states = [entry["args"].get("machine") for entry in entries if entry.get("cat") == "state"]
    assert set(states) == MACHINES.keys()
    page = page_of([run_data(Recorded(run))], library="", title="short")
    assert all(f"<td>{machine}</td>" in page for machine in MACHINES)
    assert "Not in this run" not in page
