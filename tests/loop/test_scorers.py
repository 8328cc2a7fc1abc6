"""A scorer beside training: what waits for it, and what its loss costs. (That bound, ledger and resume hold: test_seeds.py.)"""

from __future__ import annotations

import pytest

from asyncrl_cli.errors import ExecutorLost
from asyncrl_cli.loop.states import State
from tests.loop.proof.faults import Fault, FaultKind, Faults
from tests.loop.worlds import run_world, settings

DEATH = Fault(kind=FaultKind.WORKER_DIES, executor="ref", at_s=3.0)


def test_a_slow_scorer_is_what_the_trainer_waits_for():
    """Four groups take 4 s, a train step 0.7 s: three quarters of the time nothing but the scorer is missing."""
    ran = run_world(settings("stale-samples"), group_score_s=1.0)
    steps = ran.recorder.steps[4:]
    assert all(step.timing_s["wait_scores"] > 2 for step in steps)
    assert all(
        sum(seconds for part, seconds in step.timing_s.items() if part != "step") == pytest.approx(step.timing_s["step"])
        for step in steps
    )
    trainers = [tick.reports["trainer-0"] for tick in ran.recorder.ticks if "trainer-0" in tick.reports]
    waits = [trainer.waiting_for for trainer in trainers if trainer.state is State.STARVED]
    assert sum("wait for ref" in wait for wait in waits) > len(waits) / 2
    queues = [tick.reports["ref"].gauges.get("waiting_groups", 0) for tick in ran.recorder.ticks if "ref" in tick.reports]
    assert max(queues) >= 4
    assert ran.recorder.steps[-1].reports["ref"].state_s[State.BUSY] == pytest.approx(48.0)


def test_a_fast_scorer_costs_the_trainer_next_to_nothing_and_gives_it_every_column():
    with_scorer, without = (run_world(settings("stale-samples"), group_score_s=cost_s) for cost_s in (0.01, None))
    assert with_scorer.elapsed_s < without.elapsed_s + 12 * 0.1
    for batch in with_scorer.trainer.batches:
        assert batch.columns == {group.key: {"ref": ("ref", group.key)} for group in batch.groups}
    assert all(not batch.columns[key] for batch in without.trainer.batches for key in batch.columns)
    assert "wait_scores" not in without.recorder.steps[-1].timing_s


def test_a_scorer_that_dies_is_restarted_and_scores_again_what_it_had():
    ran = run_world(settings("stale-samples", max_restarts=1), group_score_s=0.2, faults=Faults([DEATH]))
    assert ran.error is None
    assert [event.fields["worker"] for event in ran.recorder.named("lost")] == ["ref"]
    assert len(ran.trained) == len(set(ran.trained)) == 48
    assert ran.recorder.steps[-1].restarts == 1


def test_without_a_restart_left_its_death_ends_the_run_with_a_checkpoint():
    ran = run_world(settings("stale-samples"), group_score_s=0.2, faults=Faults([DEATH]))
    assert isinstance(ran.error, ExecutorLost)
    assert ran.error.executor == "ref"
    assert ran.checkpoints.cuts[-1][0].step == len(ran.trainer.batches)
