"""The loop itself, on simulated workers and a virtual clock. (What must hold in every run, in any mode,
stopped, resumed or with faults, is in proof/invariants.py: each group is trained once and within the bound,
accounts add up.)"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, Interrupted, RefusedError, StallError
from asyncrl_cli.measure.meters import RolloutMeter
from asyncrl_cli.simulate.simulated_trainer import SimulatedTrainer
from asyncrl_cli.simulate.simulated_worker import SimulatedStore
from tests.loop.proof.faults import Fault, FaultKind, Faults
from tests.loop.proof.memory import resume_from
from tests.loop.worlds import MODES, run_world, settings
from tests.marks import one_in


def test_partial_rollouts_cross_loads():
    ran = run_world(settings("partial-rollout", train_steps=30))
    assert max(ran.spans()) >= 1


@pytest.mark.slow
def test_asynchronous_modes_are_faster_than_taking_turns():
    slow_step = {"train_s": lambda batch: 3.0}
    elapsed_s = {
        mode: run_world(settings(mode, train_steps=24), trainer_times=slow_step).elapsed_s for mode in MODES
    }
    assert elapsed_s["partial-rollout"] < elapsed_s["on-policy-pipeline"]
    assert elapsed_s["one-step-off"] < elapsed_s["colocate"]
    assert elapsed_s["partial-rollout"] < 1.15 * 24 * 3.0 + 10


@pytest.mark.parametrize("mode", MODES)
def test_the_loop_itself_costs_nothing(mode):
    ran = run_world(settings(mode), evals=20)
    total_s = sum(record.timing_s["step"] for record in ran.recorder.steps)
    other_s = sum(record.timing_s["other"] for record in ran.recorder.steps[:-1])
    assert other_s <= 0.03 * total_s


@pytest.mark.parametrize("mode", MODES)
def test_evals_run_on_the_first_and_the_last_version_and_in_between(mode):
    ran = run_world(settings(mode, train_steps=24, eval_every_versions=2), evals=20, seed=3)
    versions = [event.version for event in ran.recorder.named("eval")]
    last = ran.pipeline.state.version
    assert versions[0] == 0
    assert versions[-1] == last
    assert len(versions) >= 3
    in_lines = [summary.version for record in ran.recorder.steps for summary in record.evals]
    assert in_lines == versions


def test_every_eval_set_has_its_own_summary_over_all_samples():
    times = {"failure_ratio": 0.1}
    ran = run_world(settings("partial-rollout", samples_per_prompt=4), evals={"": 20, "aime": 7}, times=times)
    state, events = ran.pipeline.state, ran.recorder.named("eval")
    shown = [(one.version, one.fields.get("eval_set", ""), one.fields["num_prompts"]) for one in events]
    assert shown == [
        (version, *of_set) for version in (0, state.version) for of_set in (("", 20), ("aime", 7))
    ]
    summaries = [summary for record in ran.recorder.steps for summary in record.evals] + state.evaluator.ended
    assert [summary.eval_set for summary in summaries] == ["", "aime", "", "aime"]
    for summary in summaries:
        assert [size for size, _ in summary.best] == [2, 4]
        assert summary.reward_mean <= summary.best[0][1] <= summary.best[1][1]
        assert 0 < summary.num_failed < 20
    assert ran.recorder.named("eval")[0].fields["failures"] == {"reward": summaries[0].num_failed}


def test_a_set_without_any_score_is_warned_of():
    ran = run_world(settings("partial-rollout"), evals=3, times={"failure_ratio": 1.0})
    (message, *_) = ran.recorder.fields("warning", "message")
    assert message == "the eval of version 0 scored no prompt; the last failure: the reward raised"


def test_an_eval_that_takes_too_long_is_reported_absent_and_warned_of():
    ran = run_world(settings("partial-rollout", eval_timeout_s=0.5), evals=200)
    assert ran.error is None
    assert not ran.recorder.named("eval")
    assert "eval.timeout_s" in ran.recorder.named("warning")[0].fields["message"]


@pytest.mark.parametrize("mode", MODES)
def test_a_finished_run_can_be_extended_even_if_its_last_window_was_short(mode):
    """K is 1, 2 or 4. The extension begins a window, wherever the run ended."""
    first = run_world(settings(mode, train_steps=7, eval_every_versions=2), evals=40)
    ended, state = first.checkpoints.snapshots[-1]
    longer = settings(mode, train_steps=18, eval_every_versions=2)
    second = run_world(longer, evals=40, seed=3, resume_from=resume_from(ended, state))
    assert second.error is None
    prompts = [key.uid for key in first.trained + second.trained]
    assert len(prompts) == len(set(prompts)) == 18 * 4
    steps_per_window = longer.schedule.window_steps
    in_window = [batch.step_in_window for batch in second.trainer.batches]
    assert in_window == [index % steps_per_window for index in range(11)]
    version = -(-7 // steps_per_window) + -(-11 // steps_per_window)
    assert second.recorder.steps[-1].version == version
    evaluated = [event.version for event in first.recorder.named("eval") + second.recorder.named("eval")]
    assert list(dict.fromkeys(evaluated)) == sorted(set(evaluated))
    # the last checkpoint did not wait for the last eval, which may come again
    assert len(evaluated) - len(set(evaluated)) <= 1
    assert evaluated[-1] == version
    steps = first.recorder.steps + second.recorder.steps
    assert [summary.version for record in steps for summary in record.evals] == evaluated
    assert all(worker.loads[0] == -(-7 // steps_per_window) for worker in second.workers)
    assert max(second.staleness(), default=0) <= longer.schedule.max_staleness


@pytest.mark.parametrize("mode", ["stream-off-policy", "partial-rollout", "colocate"])
@pytest.mark.parametrize("step", [9, 13])
def test_a_checkpoint_of_an_extension_continues_it(mode, step):
    """Step 9 is within the second run's window if K is 4, and so is 13, where a run that was never extended
    would begin one."""
    first = run_world(settings(mode, train_steps=7))
    longer = settings(mode, train_steps=18, checkpoint_every_steps=1)
    second = run_world(longer, seed=3, resume_from=resume_from(*first.checkpoints.snapshots[-1]))
    snapshot = next(snapshot for snapshot in second.checkpoints.snapshots if snapshot[0].step == step)
    third = run_world(longer, seed=4, resume_from=resume_from(*snapshot))
    assert third.error is None
    assert third.recorder.steps[-1].version == second.recorder.steps[-1].version
    before = [group.key for batch in second.trainer.batches if batch.step <= step for group in batch.groups]
    assert len({key.uid for key in first.trained + before + third.trained}) == 18 * 4


def test_a_window_that_cannot_be_is_refused():
    snapshot, state = run_world(settings("stream-off-policy", train_steps=12)).checkpoints.snapshots[-1]
    for version, taken in ((1, 0), (13, 0), (3, 3), (2, 16), (2, 15)):
        window = {"window": {"version": version, "taken_groups": taken}}
        longer = settings("stream-off-policy", train_steps=20)
        with pytest.raises(RefusedError, match="is not in a window"):
            run_world(longer, resume_from=resume_from(snapshot, state | window))


def test_a_resumed_run_keeps_finished_groups_with_their_payloads():
    chosen = settings("partial-rollout", train_steps=20, eta=Fraction(2))
    frozen, state = max(
        run_world(chosen).checkpoints.snapshots, key=lambda snapshot: len(snapshot[0].payloads)
    )
    assert frozen.payloads, "some group was finished and untrained at some snapshot"
    resumed = run_world(chosen, resume_from=resume_from(frozen, state))
    payloads = {group.payload for batch in resumed.trainer.batches for group in batch.groups}
    assert set(frozen.payloads[: len(state["groups"]["finished"])]) <= payloads


def test_keys_without_an_owner_are_counted_over_a_resume():
    chosen, store = settings("stale-samples"), SimulatedStore()
    for key in ("p7@0.9/0", "p8@0.9/0"):  # of attempts that there never were
        store.put(key)
    first = run_world(chosen, data=store)
    (found,) = first.recorder.named("orphans")
    for ended in first.recorder.steps:
        assert ended.orphans == (2 if ended.ended_s > found.time_s else 0)
    overviews = [(tick.time_s > found.time_s, tick.data) for tick in first.recorder.ticks]
    assert {(is_after, one.keys, one.orphans) for is_after, one in overviews} == {(False, 2, 0), (True, 0, 2)}
    snapshot, state = first.checkpoints.snapshots[-2]
    resumed = run_world(chosen, data=SimulatedStore(), resume_from=resume_from(snapshot, state))
    assert {ended.orphans for ended in resumed.recorder.steps} == {2}


def test_the_versions_of_a_resumed_run_go_on():
    first = run_world(settings("stream-off-policy", train_steps=12))
    frozen, state = next(snapshot for snapshot in first.checkpoints.snapshots if snapshot[0].step == 6)
    assert not frozen.at_window_boundary
    second = run_world(settings("stream-off-policy", train_steps=12), resume_from=resume_from(frozen, state))
    # resuming off a window's boundary publishes the saved weights, not new ones
    assert second.trainer.gathered == [2, 3]
    assert all(worker.loads == [1, 2, 3] for worker in second.workers)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stop_at_s", one_in(3, [3.0, 0.05, 7.7]))
def test_a_stop_ends_with_a_checkpoint_and_says_interrupted(mode, stop_at_s):
    loop_settings = settings(mode, train_steps=100, checkpoint_every_steps=0)
    ran = run_world(loop_settings, stop_at_s=stop_at_s)
    assert isinstance(ran.error, Interrupted)
    assert ran.elapsed_s - stop_at_s < 3
    assert ran.checkpoints.snapshots[-1][0].step == len(ran.trainer.batches)
    snapshot, state = ran.checkpoints.snapshots[-1]
    resumed = run_world(settings(mode, train_steps=14), resume_from=resume_from(snapshot, state))
    assert len({key.uid for key in ran.trained + resumed.trained}) == 14 * 4


def test_a_stop_in_a_step_longer_than_its_grace_finishes_the_step_if_steps_take_that_long():
    slow = {"train_s": lambda batch: 30.0}
    loop_settings = settings("one-step-off", stop_grace_s=5.0, checkpoint_every_steps=0)
    ran = run_world(loop_settings, trainer_times=slow, stop_at_s=45.0)
    assert isinstance(ran.error, Interrupted)
    assert [snapshot.step for snapshot, _ in ran.checkpoints.snapshots][-1] == 2
    # nobody knows yet how long the first step takes
    ran = run_world(loop_settings, trainer_times=slow, stop_at_s=15.0)
    assert "the stop took longer than 5 s (run.stop_grace_s)" in str(ran.error)


def test_a_dead_trainer_fails_the_run_at_once():
    fault = Fault(kind=FaultKind.STEP_FAILS, executor="trainer-0", nth=5)
    ran = run_world(settings("partial-rollout"), faults=Faults([fault]))
    assert isinstance(ran.error, ExecutorFailed)
    assert "step 5" in str(ran.error)
    assert ran.recorder.fields("failed", "error") == [str(ran.error)]
    assert ran.recorder.ticks[-1].phase == "failed"
    assert ran.recorder.ticks[-1].reports["trainer-0"].state == "failed"
    assert len(ran.trainer.batches) == 4


def test_failed_trajectories_leave_their_group_and_a_group_of_fewer_than_two_is_replaced():
    loop_settings = settings("stale-samples", n=4, train_steps=20, max_failed_ratio=0.9)
    ran = run_world(loop_settings, times={"failure_ratio": 0.4})
    assert ran.error is None
    sizes = Counter(len(group.trajectories) for batch in ran.trainer.batches for group in batch.groups)
    assert set(sizes) == {2, 3, 4}
    totals = ran.recorder.steps[-1].ledger
    assert totals["trained"] == 80
    assert totals["dropped"] > 0
    assert totals["admitted_total"] == 80 + totals["dropped"]


def test_too_many_failed_trajectories_fail_the_run_with_numbers():
    ran = run_world(settings("stale-samples", n=4, train_steps=50), times={"failure_ratio": 0.9})
    assert isinstance(ran.error, AsyncrlError)
    assert "task.max_failed_ratio = 0.1" in str(ran.error)
    assert "the reward raised" in str(ran.error)


def test_groups_of_equal_rewards_are_replaced():
    """The simulated worker gives rewards of 0 and 1: of groups of two a half is left out."""
    ran = run_world(settings("stale-samples", filter_groups=True, train_steps=30))
    assert ran.error is None
    groups = [group for batch in ran.trainer.batches for group in batch.groups]
    assert len(groups) == 30 * 4
    assert all({meta.reward for meta in group.trajectories} == {0.0, 1.0} for group in groups)
    assert max(ran.staleness()) <= ran.pipeline.state.settings.schedule.max_staleness
    reasons, steps = ran.recorder.fields("dropped", "reason"), ran.recorder.steps
    assert set(reasons) == {"equal rewards"}
    assert 60 < len(reasons) < 240
    assert sum(len(step.filtered) for step in steps) == steps[-1].ledger["dropped"] <= len(reasons)


def test_nothing_but_equal_rewards_ends_the_run_with_a_checkpoint():
    chosen = settings("stale-samples", filter_groups=True, max_num_gen_batches=3)
    ran = run_world(chosen, times={"equal_ratio": 1.0})
    assert isinstance(ran.error, AsyncrlError)
    (in_a_row,) = re.findall(r"each of the last (\d+) groups had equal rewards", str(ran.error))
    # more than three times four, and whoever came back together with the last of them
    assert 13 <= int(in_a_row) <= 16
    assert "algorithm.max_num_gen_batches = 3 times R = 4" in str(ran.error)
    assert ran.checkpoints.snapshots[-1][0].step == 0


LIMITS = {
    "task.max_failed_ratio": ({"max_failed_ratio": 0.05}, {"failure_ratio": 0.3}),
    "algorithm.max_num_gen_batches": (dict(filter_groups=True, max_num_gen_batches=1), dict(equal_ratio=0.9)),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("mode", ["partial-rollout", "colocate"])
def test_a_run_that_one_of_its_limits_has_ended_is_resumed_to_the_end(mode, limit):
    """Once what made it end is mended; what has failed so far does not count again."""
    changes, times = LIMITS[limit]
    ended = run_world(settings(mode, n=4, train_steps=60, **changes), times=times)
    assert limit in str(ended.error)
    snapshot, state = ended.checkpoints.snapshots[-1]
    assert snapshot.step == len(ended.trainer.batches) < 60
    resumed = run_world(
        settings(mode, n=4, train_steps=60, **changes), resume_from=resume_from(snapshot, state)
    )
    assert resumed.error is None
    assert Counter((*ended.trained, *resumed.trained)).most_common(1)[0][1] == 1
    assert resumed.recorder.steps[-1].ledger["trained"] == 60 * 4


@pytest.mark.parametrize("policy", ["accept", "drop", "requeue"])
@pytest.mark.parametrize("seed", one_in(4, range(4)))
def test_the_other_policies_for_stale_groups_keep_their_word(policy, seed):
    changes = {"on_stale": policy, "eta": Fraction(2), "max_staleness": 2, "step_groups": 2}
    loop_settings = settings("partial-rollout", window_steps=1, train_steps=40, **changes)
    times = {"response_tokens": lambda rng: 2000 if rng.random() < 0.05 else 5, "load_s": lambda rng: 0.2}
    ran = run_world(loop_settings, seed=seed, times=times)
    assert ran.error is None
    totals = ran.recorder.steps[-1].ledger
    assert totals["trained"] == 80
    warnings = ran.recorder.fields("warning", "message")
    if policy == "accept":
        assert max(ran.staleness()) > 2
        assert any("older than max_staleness = 2" in warning for warning in warnings)
        return
    assert not warnings
    assert max(ran.staleness()) <= 2
    assert totals["dropped" if policy == "drop" else "requeued"] > 0
    assert ran.recorder.steps[-1].tokens_discarded > 0


def test_a_prompt_that_is_stale_too_often_fails_the_run_after_a_checkpoint():
    changes = {"on_stale": "requeue", "on_exhausted": "fail", "max_requeues": 0, "eta": Fraction(1)}
    sizes = {"window_steps": 1, "step_groups": 2, "train_steps": 60, "checkpoint_every_steps": 0}
    long = {"response_tokens": lambda rng: 2000 if rng.random() < 0.1 else 5}
    ran = run_world(settings("partial-rollout", **changes, **sizes), times=long)
    assert isinstance(ran.error, AsyncrlError)
    assert "requeued 0 times" in str(ran.error)
    assert ran.checkpoints.snapshots[-1][0].step == len(ran.trainer.batches) > 0
    assert len(ran.recorder.named("failed")) == 1


@pytest.mark.parametrize(("limit", "steps"), [(0, 3), (2, 8)])
def test_optimizer_steps_skipped_too_often_in_a_row_end_the_run_with_a_checkpoint(monkeypatch, limit, steps):
    """From step 6 on no gradient is finite; step 3 is an exception of one."""
    train = SimulatedTrainer.train

    async def train_without_gradient(self, batch):
        in_a_row = max(batch.step - 5, int(batch.step == 3), 0)
        report, executor = await train(self, batch)
        return replace(report, skipped_steps=min(in_a_row, 1), skipped_in_a_row=in_a_row), executor

    monkeypatch.setattr(SimulatedTrainer, "train", train_without_gradient)
    changes = {"train_steps": 30, "checkpoint_every_steps": 0, "max_skipped_steps": limit}
    ran = run_world(settings("partial-rollout", **changes))
    assert isinstance(ran.error, AsyncrlError)
    assert f"the last {limit + 1} optimizer steps had no finite gradient" in str(ran.error)
    snapshot, _ = ran.checkpoints.snapshots[-1]
    assert snapshot.step == steps == len(ran.trainer.batches)
    assert ran.recorder.steps[-1].ledger["trained"] == 4 * steps
    warnings = ran.recorder.fields("warning", "message")
    assert len(warnings) == {3: 1, 8: 4}[steps]
    skipped = "trainer: 1 optimizer step of step 3 skipped: the gradient is not finite (1 in a row)"
    assert warnings[0] == skipped


def test_a_load_that_never_ends_is_named_by_the_trainer_that_waits_for_it():
    loads = iter([0.1] * 4)
    times = {"load_s": lambda rng: next(loads, 1e4), "prefetch_s": lambda rng: rng.random() * 4}
    limits = {"stall_timeout_s": 1e5, "sync_timeout_s": 50.0}
    chosen = settings("partial-rollout", eta=Fraction(3), window_steps=1, train_steps=200, **limits)
    ran = run_world(chosen, workers=3, times=times)
    assert isinstance(ran.error, StallError)
    assert ran.elapsed_s < 2000


@pytest.mark.parametrize("mode", ["partial-rollout", "colocate"])
def test_a_run_that_was_stopped_in_its_last_eval_makes_up_for_it_when_resumed(mode):
    loop_settings = settings(mode, train_steps=4)
    whole = run_world(loop_settings, evals=40)
    in_the_eval_s = whole.recorder.named("loaded")[-1].time_s + 0.05
    stopped = run_world(loop_settings, evals=40, stop_at_s=in_the_eval_s)
    assert isinstance(stopped.error, Interrupted)
    snapshot, state = stopped.checkpoints.snapshots[-1]
    assert snapshot.step == 4
    resumed = run_world(loop_settings, evals=40, resume_from=resume_from(snapshot, state))
    assert resumed.error is None
    in_the_cut = [summary["version"] for summary in state["evals_ended"]]
    made_up_for = [event.version for event in resumed.recorder.named("eval")]
    assert in_the_cut + made_up_for == [whole.pipeline.state.version]


def test_the_last_checkpoint_does_not_wait_for_the_last_eval():
    """Whatever happens in the eval, the training is kept. Its counters have the last step, whose line comes
    after the eval."""
    ran = run_world(settings("partial-rollout"), evals=200)
    (written,) = [event for event in ran.recorder.named("checkpointed") if event.step == 12]
    (scored,) = [event for event in ran.recorder.named("eval") if event.version == 6]
    assert written.time_s < scored.time_s <= ran.recorder.steps[-1].ended_s
    assert [summary.version for summary in ran.recorder.steps[-1].evals] == [6]
    assert ran.checkpoints.snapshots[-1][1]["observers"] == [{"steps": 12}]


def test_a_hang_is_reported_with_who_waits_for_whom():
    ran = run_world(settings("on-policy-pipeline"), times={"token_s": 1e9})
    assert isinstance(ran.error, StallError)
    assert "trainer waits for 4 takeable groups: 0 finished, 4 running" in str(ran.error)
    assert re.search(r"rollout-\d is busy", str(ran.error))
    assert ran.elapsed_s < 400


def test_at_most_two_published_versions_exist():
    times = {"prefetch_s": lambda rng: rng.random() * 9, "load_s": lambda rng: 0.1}
    changes = {"eta": Fraction(3), "window_steps": 1, "train_steps": 40}
    ran = run_world(settings("partial-rollout", **changes), workers=4, times=times)
    assert ran.error is None
    assert any(len(worker.loads) < 41 for worker in ran.workers), "a slow worker skips versions"
    assert all(worker.loads[-1] == 40 for worker in ran.workers)


def test_an_engine_that_preempts_is_warned_of_once_per_worker(monkeypatch):
    report = RolloutMeter.report

    def preempting(meter, **figures):
        return report(meter, **{**figures, "sums": {"preemptions": 5.0}})

    monkeypatch.setattr(RolloutMeter, "report", preempting)
    ran = run_world(settings("partial-rollout"), workers=2)
    messages = ran.recorder.fields("warning", "message")
    warned = sorted(message.split(":")[0] for message in messages if "KV cache is too small" in message)
    assert warned == ["rollout-0 preempted 5 sequences", "rollout-1 preempted 5 sequences"]
