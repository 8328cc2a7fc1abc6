"""Workers that die and are restarted, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, Interrupted, StallError
from asyncrl_cli.contracts.weight_version import Published
from asyncrl_cli.loop.admission import Admission
from asyncrl_cli.loop.executors import Executors, ReportBook
from asyncrl_cli.loop.fleet import Fleet, WorkerSlots
from asyncrl_cli.loop.groups import Groups
from asyncrl_cli.loop.weight_sync import WeightSync
from asyncrl_cli.measure.states import ExecutorReport, Span, State
from asyncrl_cli.observe.metrics import StepMetrics
from asyncrl_cli.simulate.simulated_trainer import SimulatedTrainer
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from asyncrl_cli.simulate.world import NumberedFeed
from tests.loop.proof.faults import Fault, FaultKind, Faults
from tests.loop.proof.memory import resume_from
from tests.loop.worlds import MODES, run_world, settings
from tests.marks import one_in

LONG = {"response_tokens": lambda rng: 60}
SLOW_START = {"restart_s": lambda rng: 5.0}


def death(at_s, executor="rollout-1", kind=FaultKind.WORKER_DIES):
    return Fault(kind=kind, executor=executor, at_s=at_s)


def run_with(faults, mode="partial-rollout", *, times=None, **changes):
    """`changes`: of the settings, and further arguments of `run_world`."""
    of_world = {
        key: changes.pop(key) for key in ("evals", "workers", "stop_at_s", "resume_from") if key in changes
    }
    chosen = settings(mode, **({"max_restarts": 1} | changes))
    return run_world(chosen, faults=Faults(faults), times=SLOW_START | (times or {}), **of_world)


def assert_whole(ran, train_steps=12):
    assert ran.error is None
    prompts = [key.uid for key in ran.trained]
    assert len(prompts) == len(set(prompts)) == 4 * train_steps
    totals = ran.recorder.steps[-1].ledger
    assert (totals["trained"], totals["dropped"]) == (4 * train_steps, 0)
    assert totals["admitted_total"] == totals["trained"] + totals["requeued"]
    assert {worker.version for worker in ran.workers} == {ran.pipeline.state.version}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [FaultKind.WORKER_DIES, FaultKind.WORKER_HANGS])
@pytest.mark.parametrize("at_s", one_in(3, [2.0, 0.05, 5.1]))
def test_a_run_whose_worker_dies_or_hangs_trains_every_group_once_and_within_the_bound(mode, kind, at_s):
    ran = run_with([death(at_s, kind=kind)], mode, times={"call_timeout_s": 40.0, "weights_timeout_s": 30.0})
    assert_whole(ran)
    assert max(ran.staleness()) <= settings(mode).schedule.max_staleness
    assert ran.recorder.fields("restarted", "worker") == ["rollout-1"]


def test_all_workers_may_die_at_once_and_nobody_calls_it_a_stall():
    """Each as often as `max_restarts`, which is 1."""
    slow = {"restart_s": lambda rng: 1000.0, "call_timeout_s": 5000.0}
    ran = run_with([death(3.0, "rollout-0"), death(3.0, "rollout-1")], times=slow, stall_timeout_s=50.0)
    assert_whole(ran)
    assert ran.elapsed_s > 1000
    assert ran.recorder.steps[-1].restarts == 2


def test_an_overview_says_which_restart_of_which_worker_and_that_admission_waits_for_it():
    deaths, long = [death(3.0, "rollout-0"), death(3.0)], {"restart_s": lambda rng: 20.0}
    ran = run_with(deaths, times=long, max_restarts=3)
    gone = [tick for tick in ran.recorder.ticks if 4 < tick.time_s < 22]
    assert len(gone) > 10
    waits = "restart (rollout-0 is being restarted (1 of 3), rollout-1 is being restarted (1 of 3))"
    for tick in gone:
        assert tick.restarting == {"rollout-0": "1 of 3", "rollout-1": "1 of 3"}
        assert tick.admission == "restart"
        assert tick.reports["feed"].waiting_for == f"admission: {waits}"
    others = [tick for tick in ran.recorder.ticks if tick.time_s < 2.9 or tick.time_s > 24]
    assert {tuple(tick.restarting) for tick in others} == {()}
    assert "restart" not in {tick.admission for tick in others}


def test_while_others_have_a_process_admission_waits_for_them():
    ran = run_with([death(3.0)], times={"restart_s": lambda rng: 20.0})
    gone = [tick for tick in ran.recorder.ticks if 4 < tick.time_s < 22]
    assert {tuple(tick.restarting) for tick in gone} == {("rollout-1",)}
    assert "restart" not in {tick.admission for tick in gone}


def test_many_calls_that_fail_together_are_one_failure():
    ran = run_with([death(3.0)], times=LONG, eta=Fraction(2))
    lost, restarted, warnings = (ran.recorder.named(name) for name in ("lost", "restarted", "warning"))
    assert len(ran.recorder.named("replaced")) > 1
    assert [event.fields for event in lost] == [
        {"worker": "rollout-1", "error": "rollout-1 failed: simulated death at 3 s", "restarts_left": 0}
    ]
    (back,) = restarted
    assert back.fields == {"worker": "rollout-1", "restart_s": 5.0, "restarts_left": 0}
    message = "rollout-1 failed: simulated death at 3 s; restarting it (1 of rollout.max_restarts = 1)"
    assert [event.fields["message"] for event in warnings] == [message]
    assert {record.restarts for record in ran.recorder.steps if record.ended_s > 3.0} == {1}


def running_on(event):
    return event.fields["workers"] if event.name == "running" else {}


def test_a_worker_that_dies_more_often_than_allowed_fails_the_run_with_its_own_error_after_a_checkpoint():
    ran = run_with([death(3.0), death(12.0)], train_steps=200, checkpoint_every_steps=0)
    assert isinstance(ran.error, ExecutorFailed)
    assert str(ran.error) == "rollout-1 failed: simulated death at 12 s"
    assert ran.checkpoints.snapshots[-1][0].step == len(ran.trainer.batches) > 0
    assert len(ran.recorder.named("restarted")) == 1


def test_an_error_that_a_fresh_process_would_repeat_is_no_reason_for_one(monkeypatch):
    async def refuse(worker, version, interrupt):
        message = f"ValueError: weights of version {version} do not fit the engine's model"
        raise ExecutorFailed(message, executor=worker.name)

    monkeypatch.setattr(SimulatedWorker, "load", refuse)
    ran = run_with([], max_restarts=3)
    assert "do not fit" in str(ran.error)
    assert ran.recorder.named("lost") == []


def test_a_restart_that_fails_is_tried_again_while_any_is_left():
    ran = run_with([death(3.0), death(5.0)], max_restarts=2, train_steps=30)
    assert_whole(ran, train_steps=30)
    assert ran.recorder.fields("lost", "restarts_left") == [1, 0]
    assert len(ran.recorder.named("restarted")) == 1
    failed = run_with([death(3.0), death(5.0)], max_restarts=1, train_steps=30)
    assert str(failed.error) == "rollout-1 failed: simulated death at 5 s"


def test_an_attempt_that_was_lost_with_its_worker_does_not_count_as_stale():
    """max_requeues = 1: lost twice and stale once is within it, stale twice is not."""
    changes = {"on_stale": "requeue", "on_exhausted": "fail", "max_requeues": 1, "max_staleness": 0}
    loop_settings = settings("partial-rollout", eta=Fraction(1), **changes)
    worker = WorkerSlots(name="w", slots=2)
    admission, events = Admission(loop_settings, [worker]), []

    def event(name, key, **fields):
        events.append((key.attempt, name))

    groups = Groups(loop_settings, admission, NumberedFeed(), event)
    for _ in range(2):
        groups.start()
        admission.lose("w")
    groups.start()
    groups.open_window()
    worker.end_load(admission.version)
    groups.start()
    assert events == [(0, "running"), (0, "replaced"), (0, "replaced"), (0, "requeued"), (1, "running")]
    with pytest.raises(AsyncrlError, match="requeued 1 times for staleness"):
        groups.open_window()


def test_the_tokens_of_a_dead_worker_are_waste():
    ran = run_with([death(6.0)], times={"response_tokens": lambda rng: 100})
    calm = run_with([], times={"response_tokens": lambda rng: 100})
    assert calm.recorder.steps[-1].tokens_discarded == 0
    num_lost = sum(sum(event.fields["workers"].values()) for event in ran.recorder.named("replaced"))
    assert 0 < ran.recorder.steps[-1].tokens_discarded <= 100 * num_lost


def test_an_eval_whose_only_worker_dies_is_done_again():
    calm = run_with([], evals=40, train_steps=4, workers=1)
    in_the_last_eval_s = calm.recorder.named("loaded")[-1].time_s + 0.05
    ran = run_with([death(in_the_last_eval_s, "rollout-0")], evals=40, train_steps=4, workers=1)
    assert ran.error is None
    versions, calm_versions = ([event.version for event in one.recorder.named("eval")] for one in (ran, calm))
    assert versions == calm_versions
    assert set(ran.recorder.fields("eval", "num_prompts")) == {40}
    interrupted = "the eval of version 2 was interrupted by the loss of rollout-0"
    assert any(interrupted in message for message in ran.recorder.fields("warning", "message"))


def test_an_eval_with_another_helper_scores_every_prompt():
    calm = run_with([], evals=80, train_steps=4)
    in_the_last_eval_s = calm.recorder.named("loaded")[-1].time_s + 0.05
    ran = run_with([death(in_the_last_eval_s)], evals=80, train_steps=4)
    assert ran.error is None
    scored = [(event.version, event.fields["num_prompts"]) for event in ran.recorder.named("eval")]
    assert scored == [(0, 80), (2, 80)]
    assert not any("eval" in message for message in ran.recorder.fields("warning", "message"))


def test_colocated_a_worker_that_dies_while_the_trainer_computes_is_restarted_when_the_resources_come_back(
    monkeypatch,
):
    paused, restarted = [], []
    for name, kept in (("pause", paused), ("restart", restarted)):
        monkeypatch.setattr(SimulatedWorker, name, noting(getattr(SimulatedWorker, name), kept))
    run_with([], "colocate")
    first_s = paused[0]
    ran = run_with([death(first_s + 0.2)], "colocate")
    assert_whole(ran)
    (restart_s,) = restarted
    window_ends_s = next(record for record in ran.recorder.steps if record.step == 2).ended_s
    assert first_s + 2 * 0.7 < restart_s <= window_ends_s


def test_colocated_a_restart_and_a_trainer_that_wait_for_each_other_are_named(monkeypatch):
    """Planted: the trainer goes on without having given the resources back."""
    paused = []
    monkeypatch.setattr(SimulatedWorker, "pause", noting(SimulatedWorker.pause, paused))
    run_with([], "colocate")
    kept = property(
        lambda self: self.__dict__.get("has", False), lambda self, has: vars(self).update(has=True)
    )
    monkeypatch.setattr(Executors, "trainer_has_resources", kept, raising=False)
    ran = run_with([death(paused[0] + 0.2)], "colocate", stall_timeout_s=100.0)
    assert isinstance(ran.error, StallError)
    assert "rollout-1 (restart) waits for the trainer to give the resources back" in str(ran.error)
    assert "; trainer waits for 4 takeable groups" in str(ran.error)


@pytest.mark.parametrize(("hangs_after_s", "trained_steps"), [(-0.01, 0), (0.3, 2)])
def test_colocated_a_stop_does_not_wait_for_a_hung_worker_to_hand_over(
    monkeypatch, hangs_after_s, trained_steps
):
    """It hangs when it should give the resources to the trainer, or while the trainer has them, for two steps
    of 0.7 s."""
    paused = []
    monkeypatch.setattr(SimulatedWorker, "pause", noting(SimulatedWorker.pause, paused))
    run_with([], "colocate")
    hang = death(paused[0] + hangs_after_s, kind=FaultKind.WORKER_HANGS)
    limits = {"call_timeout_s": 400.0, "weights_timeout_s": 400.0}
    ran = run_with([hang], "colocate", stop_at_s=paused[0] + 10, times=limits)
    assert isinstance(ran.error, Interrupted)
    assert ran.elapsed_s < paused[0] + 12
    assert ran.checkpoints.snapshots[-1][0].step == len(ran.recorder.steps) == trained_steps
    snapshot, state = ran.checkpoints.snapshots[-1]
    resumed = run_with([], "colocate", resume_from=resume_from(snapshot, state))
    trained = [key.uid for key in ran.trained + resumed.trained]
    assert len(set(trained)) == len(trained) == 12 * 4


def test_colocated_a_run_resumed_within_a_window_hands_the_resources_over_before_it_trains(
    monkeypatch,
):
    ran = run_with([], "colocate", checkpoint_every_steps=1, train_steps=6)
    within = [saved for saved in ran.checkpoints.snapshots if not saved[0].at_window_boundary]
    assert [snapshot.step for snapshot, _ in within] == [1, 3, 5]
    calls = []
    for kind, name in ((SimulatedWorker, "pause"), (SimulatedWorker, "resume"), (SimulatedTrainer, "train")):
        monkeypatch.setattr(kind, name, named(name, getattr(kind, name), calls))
    resumed = run_with([], "colocate", train_steps=6, resume_from=resume_from(*within[1]))
    assert [record.step for record in resumed.recorder.steps] == [4, 5, 6]
    pause, resume, train = (["pause"] * 2, ["resume"] * 2, ["train"])
    assert calls == [*pause, *train, *resume, *pause, *train, *train, *resume]


def named(name, call, calls):
    async def recorded(executor, *arguments):
        calls.append(name)
        return await call(executor, *arguments)

    return recorded


def noting(call, times):
    async def noted(worker):
        times.append(asyncio.get_running_loop().time())
        await call(worker)

    return noted


def test_a_stop_does_not_wait_for_a_restart():
    ran = run_with([death(3.0)], train_steps=100, times={"restart_s": lambda rng: 500.0}, stop_at_s=6.0)
    assert isinstance(ran.error, Interrupted)
    assert ran.elapsed_s < 9
    assert not ran.recorder.named("restarted")
    snapshot, state = ran.checkpoints.snapshots[-1]
    resumed = run_with([], train_steps=14, resume_from=resume_from(snapshot, state))
    trained = [key.uid for key in ran.trained + resumed.trained]
    assert len(set(trained)) == len(trained) == 14 * 4
    assert resumed.recorder.steps[-1].restarts == 1


@pytest.mark.parametrize("mode", MODES)
def test_without_restarts_the_first_failure_ends_the_run_after_a_checkpoint(mode):
    ran = run_with([death(6.0)], mode, max_restarts=0, train_steps=200, checkpoint_every_steps=0)
    assert isinstance(ran.error, ExecutorFailed)
    assert str(ran.error) == "rollout-1 failed: simulated death at 6 s"
    assert ran.elapsed_s < 60
    assert ran.checkpoints.snapshots[-1][0].step == len(ran.trainer.batches) > 0
    assert not ran.recorder.named("lost")
    (message,) = ran.recorder.fields("warning", "message")
    assert message == "rollout-1 is not restarted: rollout.max_restarts = 0"


def test_the_next_process_wants_the_newest_version_also_where_that_is_about_to_be_replaced():
    a, b = (WorkerSlots(name=name, slots=8, version=3) for name in ("a", "b"))
    Fleet([a, b], unit=1, queue_sequences=0)
    sync = WeightSync([a, b])
    newest = Published(version=3, num_bytes=0, publish_s=0.0, handle="the bytes")
    sync.offer(newest)
    assert sync.wanted(a) is None
    a.begun = 3
    a.forget_weights()
    assert sync.begun == {}
    assert sync.wanted(a) is newest
    b.begun = 2
    sync.reserve()
    assert sync.wanted(a) is None
    sync.offer(Published(version=4, num_bytes=0, publish_s=0.0, handle="newer bytes"))
    assert sync.wanted(a).version == 4


def report(now_s, state_s, *, sums, spans=(), state=State.BUSY, running_tokens=0):
    return ExecutorReport(
        name="rollout-0",
        role="rollout",
        now_s=now_s,
        state=state,
        waiting_for="",
        state_s=state_s,
        spans=tuple(Span(state=state, start_s=start_s, end_s=end_s) for state, start_s, end_s in spans),
        sums=sums,
        gauges={"slots": 8, "running_sequences": 5, "running_tokens": running_tokens},
    )


def test_the_sums_of_a_restarted_executor_go_on_over_the_time_without_a_process():
    """Clocks: the first process's is 100 s ahead of the driver's, the second's 1000 s. It is lost at 14, back
    at 20, and its own clock began at 17, when it started to start."""
    book = ReportBook()
    busy, starved = (State.BUSY, 100.0, 108.0), (State.STARVED, 108.0, 110.0)
    sums = {"idle_s": 2.0, "sampled_tokens": 50.0}
    first = report(
        110.0, {State.BUSY: 8.0, State.STARVED: 2.0}, sums=sums, spans=(busy, starved), running_tokens=7
    )
    book.add(first, 10.0, "rollout-0")
    assert book.lost("rollout-0", 14.0) == 7
    down = book.latest["rollout-0"]
    running = down.gauges["running_sequences"]
    assert (down.state, down.sums["idle_s"], repr(running)) == (State.FAILED, 6.0, "0")
    book.advance_lost(16.0)
    assert book.latest["rollout-0"].sums == {"idle_s": 8.0, "sampled_tokens": 50.0}
    book.returned("rollout-0", 20.0)
    assert book.latest["rollout-0"].state_s == {State.BUSY: 8.0, State.STARVED: 2.0, State.FAILED: 10.0}
    spans = ((State.STARVED, 1017.0, 1021.0), (State.BUSY, 1021.0, 1022.0))
    state_s, sums = {State.STARVED: 4.0, State.BUSY: 1.0}, {"idle_s": 4.0, "sampled_tokens": 3.0}
    second = report(1022.0, state_s, sums=sums, spans=spans)
    assert book.add(second, 22.0, "rollout-0")
    joined = book.latest["rollout-0"]
    assert joined.sums == {"idle_s": 13.0, "sampled_tokens": 53.0}
    assert joined.state_s == {State.BUSY: 9.0, State.STARVED: 3.0, State.FAILED: 10.0}
    assert sum(joined.state_s.values()) == 22.0
    assert [(str(span.state), span.start_s, span.end_s) for span in book.take_spans()["rollout-0"]] == [
        ("busy", 0.0, 8.0),
        ("starved", 8.0, 10.0),
        ("failed", 10.0, 20.0),
        ("starved", 20.0, 21.0),
        ("busy", 21.0, 22.0),
    ]
    third = report(1023.0, {State.STARVED: 4.0, State.BUSY: 2.0}, sums={"idle_s": 4.0, "sampled_tokens": 9.0})
    book.add(third, 23.0, "rollout-0")
    assert book.latest["rollout-0"].sums == {"idle_s": 13.0, "sampled_tokens": 59.0}


def test_metrics_of_a_run_with_a_restart_have_no_negative_differences_and_count_the_dead_worker_as_idle():
    ran = run_with([death(3.0)], times={"restart_s": lambda rng: 30.0}, train_steps=30)
    metrics = StepMetrics(trigger_parameter_sync_step=2, started_s=0.0)
    steps = [metrics.update(record) for record in ran.recorder.steps]
    for line in steps:
        assert line.get("rollouter/tokens_per_s", 0) >= 0
        shares = ("rollouter/slot_utilization", "rollouter/idle_ratio", "overlap_ratio")
        assert all(0 <= line.get(share, 0) <= 1 for share in shares)
        assert [key for key in line if key.startswith("data/")] == ["data/orphans"]  # nothing has bytes here
    while_down = [
        line for line in steps if line["time_s"] - line["timing/step_s"] > 4.0 and line["time_s"] < 30.0
    ]
    assert len(while_down) > 5
    idle_s = sum(line["rollouter/idle_ratio"] * line["timing/step_s"] for line in while_down)
    # one of two (its time is counted once a second)
    assert idle_s >= 0.5 * sum(line["timing/step_s"] for line in while_down)
    assert Counter(line["rollouter/restarts"] for line in steps).keys() == {0, 1}


def test_the_time_before_the_loop_began_is_nobodys():
    """The executor's clock is 100 s ahead of the driver's. It was ready at 102, and the loop begins at 6 (its
    106)."""
    book = ReportBook(began_s=6.0)
    spans = ((State.LOADING, 100.0, 102.0), (State.STARVED, 102.0, 107.0), (State.BUSY, 107.0, 109.0))
    state_s = {State.LOADING: 2.0, State.STARVED: 5.0, State.BUSY: 2.0}
    sums = {"idle_s": 7.0, "sampled_tokens": 30.0}
    book.add(report(109.0, state_s, sums=sums, spans=spans), 9.0, "rollout-0")
    first = book.latest["rollout-0"]
    assert first.state_s == {State.LOADING: 0.0, State.STARVED: 1.0, State.BUSY: 2.0}
    assert first.sums == {"idle_s": 1.0, "sampled_tokens": 30.0}
    taken = book.take_spans()["rollout-0"]
    assert [(span.state, span.start_s, span.end_s) for span in taken] == [
        (State.STARVED, 6.0, 7.0),
        (State.BUSY, 7.0, 9.0),
    ]
    state_s |= {State.BUSY: 5.0}
    book.add(report(112.0, state_s, sums={"idle_s": 7.0, "sampled_tokens": 80.0}), 12.0, "rollout-0")
    assert sum(book.latest["rollout-0"].state_s.values()) == 6.0
    assert book.latest["rollout-0"].sums == {"idle_s": 1.0, "sampled_tokens": 80.0}


def test_the_time_before_the_loop_began_is_nobodys_if_the_second_report_overtakes_the_first():
    """The clocks of the test above. The first report was made at 6.5 and arrives at 9.5, the second one at
    9."""
    book = ReportBook(began_s=6.0)
    state_s = {State.LOADING: 2.0, State.STARVED: 5.0, State.BUSY: 2.0}
    early = ((State.LOADING, 100.0, 102.0), (State.STARVED, 102.0, 106.5))
    late = report(106.5, {State.LOADING: 2.0, State.STARVED: 4.5}, sums={"idle_s": 6.5}, spans=early)
    spans = ((State.STARVED, 106.5, 107.0), (State.BUSY, 107.0, 109.0))
    sums = {"idle_s": 7.0, "sampled_tokens": 30.0}
    book.add(report(109.0, state_s, sums=sums, spans=spans), 9.0, "rollout-0")
    book.add(late, 9.5, "rollout-0")
    assert book.latest["rollout-0"].state_s == {State.LOADING: 0.0, State.STARVED: 1.0, State.BUSY: 2.0}
    assert book.latest["rollout-0"].sums == {"idle_s": 1.0, "sampled_tokens": 30.0}
    sums, state_s = {"idle_s": 7.0, "sampled_tokens": 35.0}, state_s | {State.BUSY: 3.0}
    book.add(report(110.0, state_s, sums=sums), 10.0, "rollout-0")
    assert sum(book.latest["rollout-0"].state_s.values()) == 4.0
    assert book.latest["rollout-0"].sums == {"idle_s": 1.0, "sampled_tokens": 35.0}
    taken = [(span.state, span.start_s, span.end_s) for span in book.take_spans()["rollout-0"]]
    assert taken == [(State.STARVED, 6.0, 6.5), (State.STARVED, 6.5, 7.0), (State.BUSY, 7.0, 9.0)]


def test_only_the_executor_that_failed_is_marked_as_failed():
    """rollout-1 too begins rollout-10's message."""
    ran = run_with([death(3.0, "rollout-10")], workers=11, max_restarts=0)
    assert isinstance(ran.error, ExecutorFailed)
    assert (ran.error.executor, str(ran.error)) == ("rollout-10", "rollout-10 failed: simulated death at 3 s")
    states = {name: report.state for name, report in ran.recorder.ticks[-1].reports.items()}
    assert {name for name, state in states.items() if state is State.FAILED} == {"rollout-10"}
    assert set(states.values()) == {State.FAILED, State.DONE}


AWAY = {"min_workers": 1, "train_steps": 12}


def test_a_run_goes_on_without_a_worker_that_has_no_restart_left():
    ran = run_with([death(3.0)], max_restarts=0, **AWAY)
    assert ran.error is None
    assert len({key.uid for key in ran.trained}) == 12 * 4
    (away,) = ran.recorder.named("away")
    assert away.fields["worker"] == "rollout-1"
    # and it waits for nobody's last load but the others'
    assert ran.workers[0].version == ran.pipeline.state.version
    ticks = [tick for tick in ran.recorder.ticks if 4 < tick.time_s < ran.elapsed_s - 1]
    assert {tick.restarting.get("rollout-1") for tick in ticks} == {"rollout.max_restarts = 0 are used up"}


def test_one_too_few_ends_the_run_with_a_checkpoint():
    ran = run_with([death(3.0), death(6.0, "rollout-0")], max_restarts=0, **AWAY)
    assert str(ran.error) == "rollout-0 failed: simulated death at 6 s"
    assert ran.checkpoints.snapshots[-1][0].step == len(ran.trainer.batches)


@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("evals", [8, 60])
def test_another_worker_takes_the_last_eval_over_from_one_that_goes_away(evals, seconds):
    """Whether the other one is busy with the eval, has nothing left to do (one worker has room for 8), or has
    yet to load."""
    lengths = {"response_tokens": lambda rng: rng.randint(60, 120)}
    calm = run_with([], evals=evals, times=lengths, **AWAY)
    first = calm.recorder.named("loaded")[-2].fields["worker"]
    dies = Fault(kind=FaultKind.DIES_IN_EVAL, executor=first, nth=6, seconds=seconds)
    ran = run_with([dies], max_restarts=0, evals=evals, times=lengths, **AWAY)
    assert_whole(ran, 12)
    assert ran.recorder.fields("away", "worker") == [first]
    scored = [event for event in ran.recorder.named("eval") if event.version == 6]
    assert [event.fields["num_prompts"] for event in scored] == [evals]
    assert [summary.version for summary in ran.recorder.steps[-1].evals] == [6]


@pytest.mark.parametrize("weights_mode", ["async", "sync"])
def test_a_worker_without_room_comes_back_when_there_is_some(weights_mode):
    no_room = [Fault(kind=FaultKind.NO_ROOM, executor="rollout-1", nth=nth) for nth in (1, 2)]
    ran = run_with([death(3.0), *no_room], weights_mode=weights_mode, **(AWAY | {"train_steps": 60}))
    assert_whole(ran, 60)
    away, restarted = ran.recorder.named("away"), ran.recorder.named("restarted")
    assert [event.fields["why"] for event in away] == ["no room"], "told once"
    assert [event.fields["worker"] for event in restarted] == ["rollout-1"]
    ended_s = [record.ended_s for record in ran.recorder.steps]
    # the others go on meanwhile, and so do syncs
    assert sum(away[0].time_s < end_s < restarted[0].time_s for end_s in ended_s) > 5


def test_a_worker_without_room_is_done_without_while_the_last_other_one_is_restarted():
    faults = [death(3.0, "rollout-0"), death(3.0), Fault(kind=FaultKind.NO_ROOM, executor="rollout-1", nth=1)]
    ran = run_with(faults, times={"restart_s": lambda rng: 60.0}, **(AWAY | {"train_steps": 60}))
    assert_whole(ran, 60)
    assert ran.recorder.fields("away", "worker") == ["rollout-1"]
    assert set(ran.recorder.fields("restarted", "worker")) == {"rollout-0", "rollout-1"}


def test_of_two_workers_without_room_the_second_ends_the_run_if_one_is_needed():
    no_room = [Fault(kind=FaultKind.NO_ROOM, executor=f"rollout-{worker}", nth=1) for worker in (0, 1)]
    ran = run_with([death(3.0, "rollout-0"), death(3.0), *no_room], **AWAY)
    assert str(ran.error).endswith("simulated lack of room")
    assert len(ran.recorder.named("away")) == 1


def test_without_min_workers_a_start_without_room_uses_up_a_restart():
    no_room = Fault(kind=FaultKind.NO_ROOM, executor="rollout-1", nth=1)
    ran = run_with([death(3.0), no_room], max_restarts=2, train_steps=30)
    assert_whole(ran, 30)
    assert ran.recorder.fields("lost", "restarts_left") == [1, 0]
    without = run_with([death(3.0), no_room])
    assert str(without.error) == "rollout-1 failed: simulated lack of room"


def test_responses_whose_arrays_are_gone_with_a_node_are_made_again(monkeypatch):
    async def gone(worker):
        return True

    monkeypatch.setattr(SimulatedWorker, "node_is_gone", gone)
    ran = run_with([death(5.0)], eta=Fraction(2), times={"response_tokens": lambda rng: rng.randint(5, 120)})
    assert_whole(ran)
    lost = next(place for place, event in enumerate(ran.recorder.events) if event.name == "lost")
    before, after = ran.recorder.events[:lost], ran.recorder.events[lost:]
    made_there = {event.key for event in before if "rollout-1" in running_on(event)}
    taken = {event.key for event in before if event.name == "training"}
    finished = {event.key for event in before if event.name == "finished"} - taken
    again = {event.key for event in after if event.name == "requeued"}
    assert again == finished & made_there != set()
    assert not again & {key for key in ran.trained if key in again}
    assert ran.recorder.steps[-1].tokens_discarded > 0


@pytest.mark.parametrize("mode", ["partial-rollout", "stale-samples"])
def test_a_resumed_run_goes_on_with_the_tokens_of_running_responses(mode):
    chosen = settings(mode, train_steps=20, eta=Fraction(2))
    first = run_world(chosen, times={"response_tokens": lambda rng: 200})
    snapshot, state = max(first.checkpoints.snapshots, key=lambda snapshot: len(snapshot[0].partial_groups))
    kept = {tuple(entry["key"]): entry["kept"] for entry in state["groups"]["running"]}
    kept_tokens = sum(
        count for group in kept.values() for versions, _ in group.values() for _, count in versions
    )
    long = {"response_tokens": lambda rng: 200}
    resumed = run_world(chosen, times=long, workers=3, resume_from=resume_from(snapshot, state))
    assert resumed.error is None
    before = [
        group.key.uid
        for batch in first.trainer.batches
        if batch.step <= snapshot.step
        for group in batch.groups
    ]
    prompts = before + [key.uid for key in resumed.trained]
    assert len(prompts) == len(set(prompts)) == 20 * 4
    discarded, placed = resumed.recorder.steps[-1].tokens_discarded, resumed.recorder.named("replaced")
    assert sum(event.fields.get("kept_tokens", 0) for event in placed) == kept_tokens - discarded
    assert kept_tokens > 10 * discarded
    sampled = sum(worker.engine.counters()[0] for worker in resumed.workers)
    trained = sum(meta.response_tokens for _, meta in resumed.trajectories)
    finished = sum(
        m["response_tokens"] for entry in state["groups"]["finished"] for m in entry["result"]["trajectories"]
    )
    ended = [part["result"] for entry in state["groups"]["running"] for part in entry["ended"]]
    finished += sum(m["response_tokens"] for result in ended for m in result["trajectories"])
    assert sampled == pytest.approx(trained - kept_tokens - finished + discarded, abs=1)
    assert max(resumed.staleness()) <= chosen.schedule.max_staleness


@pytest.mark.parametrize("mode", ["partial-rollout", "stale-samples"])
def test_responses_that_the_engine_cannot_continue_start_again_and_their_tokens_are_waste(mode):
    chosen = settings(mode, train_steps=20, eta=Fraction(2))
    first = run_world(chosen, times={"response_tokens": lambda rng: 200})
    snapshot, state = max(first.checkpoints.snapshots, key=lambda snapshot: len(snapshot[0].partial_groups))
    kept = [one for entry in state["groups"]["running"] for one in entry["kept"].values()]
    whole, others = (
        [sum(count for _, count in one[0]) for one in kept if one[1] is is_whole]
        for is_whole in (True, False)
    )
    long, without = (
        {"response_tokens": lambda rng: 200},
        replace(resume_from(snapshot, state), continues=False),
    )
    resumed = run_world(chosen, times=long, resume_from=without)
    assert resumed.error is None
    assert others
    continued_tokens = sum(event.fields.get("kept_tokens", 0) for event in resumed.recorder.named("replaced"))
    assert continued_tokens == sum(whole)
    assert resumed.recorder.steps[-1].tokens_discarded >= state["groups"]["tokens_discarded"] + sum(others)
    assert len({key.uid for key in resumed.trained}) == (20 - snapshot.step) * 4


def test_a_checkpoint_does_without_a_silent_worker_and_says_whose_responses_it_lacks():
    """That nothing has failed yet is seen: the worker's own time limit comes later."""
    ran = run_with([death(0.5, kind=FaultKind.WORKER_HANGS)], times=LONG, checkpoint_every_steps=1)
    assert_whole(ran)
    begins = "the running responses of rollout-1 are not in the checkpoint of step "
    lacks = [text for text in ran.recorder.fields("warning", "message") if text.startswith(begins)]
    assert lacks
    assert all(text.endswith(": a report of its responses took longer than so far = 5 s") for text in lacks)
