"""A scorer beside training: what waits for it, and what its loss costs. (That bound, ledger and resume hold:
test_seeds.py.)"""

from __future__ import annotations

import pytest

from asyncrl_cli.base.errors import ExecutorLost
from asyncrl_cli.measure.states import State
from tests.loop.proof.faults import Fault, FaultKind, Faults
from tests.loop.worlds import run_world, settings


def test_a_slow_scorer_is_what_the_trainer_waits_for():
    """Four groups take 4 s, a train step 0.7 s: three quarters of the time nothing but the scorer is
    missing."""
    ran = run_world(settings("stale-samples"), group_score_s=1.0)
    steps = ran.recorder.steps[4:]
    assert all(step.timing_s["wait_scores"] > 2 for step in steps)
    trainers = [tick.reports["trainer-0"] for tick in ran.recorder.ticks if "trainer-0" in tick.reports]
    waits = [trainer.waiting_for for trainer in trainers if trainer.state is State.STARVED]
    assert sum("wait for ref" in wait for wait in waits) > len(waits) / 2
    refs = [tick.reports["ref"] for tick in ran.recorder.ticks if "ref" in tick.reports]
    assert max(ref.gauges.get("waiting_groups", 0) for ref in refs) >= 4
    assert ran.recorder.steps[-1].reports["ref"].state_s[State.BUSY] == pytest.approx(48.0)


def test_a_fast_scorer_costs_the_trainer_next_to_nothing_and_gives_it_every_column():
    with_scorer, without = (
        run_world(settings("stale-samples"), group_score_s=cost_s) for cost_s in (0.01, None)
    )
    assert with_scorer.elapsed_s < without.elapsed_s + 12 * 0.1
    for batch in with_scorer.trainer.batches:
        assert batch.columns == ("ref",)
    assert not any(batch.columns for batch in without.trainer.batches)
    assert "wait_scores" not in without.recorder.steps[-1].timing_s


@pytest.mark.parametrize("scorer", ["ref", "reward"])
def test_groups_whose_columns_may_be_lost_with_a_scorer_are_scored_again_and_rewards_are_not(scorer):
    death = Fault(kind=FaultKind.WORKER_DIES, executor=scorer, at_s=3.0)
    chosen, slow = settings("stale-samples", max_restarts=1), {"train_s": lambda batch: 3.0}
    faults = Faults([death])
    ran = run_world(chosen, group_score_s=0.05, scorer=scorer, faults=faults, trainer_times=slow)
    assert ran.error is None
    assert ran.recorder.fields("lost", "worker") == [scorer]
    assert len(ran.trained) == len(set(ran.trained)) == 48
    assert ran.recorder.steps[-1].restarts == 1
    lost_s = ran.recorder.named("lost")[0].time_s
    scored = [event.key for event in ran.recorder.named("scored")]
    taken = {event.key for event in ran.recorder.named("training") if event.time_s <= lost_s}
    waiting = {event.key for event in ran.recorder.named("scored") if event.time_s <= lost_s} - taken
    assert waiting
    assert {key for key in scored if scored.count(key) > 1} == (waiting if scorer == "ref" else set())


@pytest.mark.parametrize("kind", [FaultKind.WORKER_DIES, FaultKind.WORKER_HANGS])
def test_a_reward_model_that_dies_or_hangs_is_named_within_its_bound(kind):
    faults = Faults([Fault(kind=kind, executor="reward", at_s=3.0)])
    limit_s = {"call_timeout_s": 20.0}
    ran = run_world(
        settings("stale-samples"), group_score_s=0.2, scorer="reward", faults=faults, times=limit_s
    )
    assert isinstance(ran.error, ExecutorLost)
    assert ran.error.executor == "reward"
    assert ran.checkpoints.snapshots[-1][0].step == len(ran.trainer.batches)
    assert ran.elapsed_s < 3.0 + (kind is FaultKind.WORKER_HANGS) * 20.0 + 5.0


def test_prox_gives_every_group_its_column_and_waits_for_each_windows_weights_to_be_published():
    ran = run_world(
        settings("stale-samples"), group_score_s=0.1, scorer="prox", trainer_times={"publish_s": 2.0}
    )
    assert ran.error is None
    for batch in ran.trainer.batches:
        assert batch.columns == ("prox",)
    waits = {tick.reports["prox"].waiting_for for tick in ran.recorder.ticks if "prox" in tick.reports}
    assert any("to be published" in wait for wait in waits)


def test_a_reward_model_adds_its_scores_where_groups_are_taken():
    chosen = settings("stale-samples")
    ran = run_world(chosen, group_score_s=0.1, scorer="reward")
    assert {meta.model_score for _, meta in ran.trajectories} == {0.0, 0.5}
    assert not any(batch.columns for batch in ran.trainer.batches)
    states = [snapshot.loop_state["groups"]["finished"] for snapshot, _ in ran.checkpoints.snapshots]
    finished = [entry["result"]["trajectories"] for state in states for entry in state]
    assert finished
    assert all(meta["model_score"] is None for group in finished for meta in group)


def test_with_a_reward_model_equal_rewards_are_those_with_its_scores():
    """Without it, two thirds of the groups of two have equal rewards; its scores tell every second group's
    trajectories apart."""
    chosen = settings("stale-samples", filter_groups=True, max_num_gen_batches=100)
    with_model, without = (
        run_world(chosen, group_score_s=cost_s, scorer="reward") for cost_s in (0.05, None)
    )
    dropped = [
        len(ran.recorder.named("dropped")) / len(ran.recorder.named("running"))
        for ran in (with_model, without)
    ]
    assert 0 < dropped[0] < 0.75 * dropped[1]
    assert len(with_model.trained) == 48


def test_a_critic_learns_beside_the_policy_and_gives_every_group_its_values():
    """A step of four groups: 0.7 s of training; 0.3 s of learning and 0.2 s of values fit beside it."""
    chosen = settings("stale-samples")
    with_critic, without = (
        run_world(chosen, group_score_s=cost_s, scorer="critic", learn_s=0.3) for cost_s in (0.05, None)
    )
    assert with_critic.error is None
    assert with_critic.elapsed_s < without.elapsed_s + 12 * 0.1
    for batch in with_critic.trainer.batches:
        assert batch.columns == ("critic",)
    assert with_critic.recorder.steps[-1].reports["critic"].state_s[State.BUSY] >= 12 * 0.5 - 1e-6


def test_a_slow_critic_is_what_the_trainer_waits_for():
    ran = run_world(settings("stale-samples"), group_score_s=0.05, scorer="critic", learn_s=3.0)
    assert all(step.timing_s["wait_scores"] > 2 for step in ran.recorder.steps[4:])
    trainers = [tick.reports["trainer-0"] for tick in ran.recorder.ticks if "trainer-0" in tick.reports]
    waits = [trainer.waiting_for for trainer in trainers if trainer.state is State.STARVED]
    assert sum("the critic to learn from step" in wait for wait in waits) > len(waits) / 2
    queued = [step.reports["critic"].gauges["waiting_groups"] for step in ran.recorder.steps[4:-1]]
    assert min(queued) >= 0
    critics = [tick.reports["critic"] for tick in ran.recorder.ticks if "critic" in tick.reports]
    # those of the next step, while it learns
    assert max(critic.gauges["waiting_groups"] for critic in critics) == 4


def test_a_critic_that_dies_ends_the_run_at_once_because_what_it_has_learned_is_gone():
    death = Fault(kind=FaultKind.WORKER_DIES, executor="critic", at_s=3.0)
    ran = run_world(
        settings("stale-samples", max_restarts=1), group_score_s=0.1, scorer="critic", faults=Faults([death])
    )
    assert isinstance(ran.error, ExecutorLost)
    assert ran.error.executor == "critic"
    assert ran.elapsed_s < 3.0 + 1.1


def test_a_reward_model_judges_evals():
    chosen = settings("stale-samples", eval_every_versions=1, max_restarts=1)
    with_model, without = (
        run_world(chosen, group_score_s=cost_s, scorer="reward", evals=6) for cost_s in (0.05, None)
    )
    higher, plain = ([summary.reward_mean for summary in evals_of(ran)] for ran in (with_model, without))
    assert len(higher) == len(plain) > 3
    assert higher == pytest.approx([mean + 0.5 for mean in plain])


def test_what_a_worker_had_played_and_was_judged_when_it_died_is_played_again():
    """All six trajectories have ended by then, and each is judged for 2 s: the other worker plays those of
    the dead one."""
    chosen = settings("stale-samples", eval_every_versions=1, max_restarts=1)
    death = Fault(kind=FaultKind.WORKER_DIES, executor="rollout-1", at_s=1.0)
    first, whole = (next(iter(evals_of(judged(chosen, faults)))) for faults in ([death], []))
    for summary in (first, whole):
        assert (summary.version, summary.num_prompts, summary.num_failed) == (0, 6, 0)
    assert first.eval_s > whole.eval_s + 0.5


def judged(chosen, faults):
    """A run whose reward model takes 2 s for each trajectory of an eval."""
    times, few = {"response_tokens": lambda rng: 8}, {"group_score_s": 0.01, "judge_s": 2.0, "evals": 6}
    return run_world(chosen, scorer="reward", times=times, faults=Faults(faults), **few)


def evals_of(ran):
    return [summary for step in ran.recorder.steps for summary in step.evals]


def test_an_eval_without_its_judge_has_failed_and_the_worker_that_played_it_goes_on():
    """The judge dies while it judges the first eval."""
    death = Fault(kind=FaultKind.WORKER_DIES, executor="reward", at_s=1.0)
    ran = judged(settings("stale-samples", eval_every_versions=1, max_restarts=1), [death])
    assert ran.error is None
    assert set(ran.recorder.fields("lost", "worker")) == {"reward"}
    failed, warnings = evals_of(ran), ran.recorder.fields("warning", "message")
    assert failed[0].num_failed > 0 or any("scored no prompt" in warning for warning in warnings)
    assert failed[-1].num_failed == 0
