"""The trainer's devices generate while the trainer waits (`placement.lend`). That they never do so beside it
is an invariant of every seed (proof/)."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl_cli.base.errors import ConfigError, ExecutorLost
from asyncrl_cli.loop.lending import STOP_S, Forecast
from asyncrl_cli.profile.loaded import load
from tests.loop.proof.faults import Fault, FaultKind, Faults, FaultyWorker, KeepingTrainer
from tests.loop.worlds import run_world, settings

STARVES = {"slots": 4, "workers": 1}
"""Two groups at once, of which a step takes four: the trainer waits for two rounds."""
DIES = Fault(kind=FaultKind.WORKER_DIES, executor="rollout-1", at_s=4.0)


def constant(rng) -> int:
    return 50


def run(*, lend: bool, mode: str = "partial-rollout", stop_grace_s: float = 60.0, **changes):
    changes = {"times": {"response_tokens": constant}, **STARVES, **changes}
    return run_world(settings(mode, lend=lend, stop_grace_s=stop_grace_s), lent=int(lend), **changes)


def test_the_worked_example_of_the_forecast():
    forecast = Forecast(0.0)
    forecast.lent(0.0, 0)
    forecast.recalled(0.0, 0, wake_s=6.0, recall_s=2.0)
    # a group every 5 s; 4 are missing: (20 - 6) / 2 = 7 s saved
    assert forecast.pays(50.0, 10, 4, share=0.5)
    # one is missing, and would be here before the worker is
    assert not forecast.pays(50.0, 10, 1, share=0.5)
    forecast.recalled(0.0, 0, wake_s=6.0, recall_s=7.5)
    assert not forecast.pays(50.0, 10, 4, share=0.5)


def test_what_is_counted_while_devices_are_lent_does_not_make_the_workers_seem_fast():
    forecast = Forecast(0.0)
    forecast.lent(50.0, 10)  # a group every 5 s
    forecast.recalled(60.0, 20, wake_s=6.0, recall_s=0.5)  # every second, while lent
    assert forecast.pays(60.0, 20, 4, share=0.5)  # a gap of 20 s
    assert not forecast.pays(60.0, 20, 1, share=0.5)  # of 5 s


def test_a_starving_trainer_waits_for_a_shorter_time():
    plain, lent = run(lend=False), run(lend=True)
    assert plain.error is None
    assert lent.error is None
    assert len(lent.trained) == len(plain.trained) == 48
    waited = [sum(one.timing_s["wait_data"] for one in ran.recorder.steps) for ran in (plain, lent)]
    # Twice the slots while the trainer waits; waking and weights (0.4 s on average) cost some of it.
    assert waited[1] < 0.8 * waited[0]
    assert lent.elapsed_s < plain.elapsed_s - 0.2 * waited[0]
    assert len(lent.recorder.named("lent")) == len(lent.recorder.named("recalled")) > 5


def test_devices_are_not_lent_if_the_trainer_never_waits():
    ran = run(lend=True, workers=4, trainer_times={"train_s": lambda batch: 10.0})
    assert ran.error is None
    assert len(ran.recorder.named("lent")) <= 2  # before the first step, and while nothing is measured


def test_costs_that_exceed_the_wait_end_the_lending():
    times = {"response_tokens": constant, "wake_s": 5.0, "sleep_s": 5.0}
    ran = run(lend=True, times=times)
    assert ran.error is None
    assert 1 <= len(ran.recorder.named("lent")) <= 2


@pytest.mark.parametrize("mode", ["stale-samples", "partial-rollout"])
def test_what_a_recall_stops_continues_elsewhere_and_nothing_is_sampled_twice(mode):
    ran = run(lend=True, mode=mode, times={})
    kept = [event.fields.get("kept_tokens", 0) for event in ran.recorder.named("replaced")]
    assert ran.error is None
    assert sum(kept) > 0
    tokens = sum(meta.response_tokens for _, meta in ran.trajectories)
    record = ran.recorder.steps[-1]
    # nothing was lost but what a load without partial rollouts does not let continue
    assert record.tokens_trained == tokens
    assert mode == "stale-samples" or record.tokens_discarded == 0


@pytest.mark.parametrize("kind", [FaultKind.WORKER_DIES, FaultKind.WORKER_HANGS, FaultKind.LOST_PREFETCH])
def test_the_run_goes_on_without_a_lent_worker_that_fails(kind):
    faults = Faults([Fault(kind=kind, executor="rollout-1", at_s=3.0, nth=2)])
    times = {"response_tokens": constant, "call_timeout_s": 20.0}
    ran = run(lend=True, faults=faults, times=times)
    assert ran.error is None
    assert faults.happened[kind] == 1
    assert len(ran.trained) == 48
    assert [event.fields["worker"] for event in ran.recorder.named("away")] == ["rollout-1"]
    assert not ran.recorder.named("restarted")


def test_a_step_says_how_long_and_how_much_the_devices_generated():
    ran = run(lend=True)
    sums = [record.lending for record in ran.recorder.steps]
    lent_s = sum(ran.recorder.fields("recalled", "lent_s"))
    assert sum(one["placement/lent_s"] for one in sums) == pytest.approx(lent_s)
    assert 0 < sum(one["placement/lent_tokens"] for one in sums) <= ran.workers[1].engine.counters()[0]


@pytest.mark.parametrize(
    "other", ["placement.colocate=true", "run.deterministic=true", "weights.transport=nccl"]
)
def test_what_lending_excludes_is_refused_with_a_hint(other):
    profile = "colocate" if "colocate" in other else "on-policy-pipeline"
    with pytest.raises(ConfigError, match=r"placement\.lend") as refused:
        load(profile, ["placement.lend=true", "placement.device=cuda", other], environ={})
    assert "placement.lend=false" in refused.value.hint


@pytest.mark.parametrize(
    ("hangs", "stop_grace_s", "waits_s"), [(False, 60.0, 1.5), (True, 60.0, STOP_S), (True, 5.0, 2.5)]
)
def test_the_last_checkpoint_has_what_a_recall_was_handing_back_when_the_stop_came(
    hangs, stop_grace_s, waits_s
):
    changes = {"times": {"sleep_s": 3.0, "call_timeout_s": 600.0}, "slots": 8}
    undisturbed = run(lend=True, **changes)
    recalled, lent_s = undisturbed.recorder.named("recalled")[0], 3.0
    stop_at_s = recalled.time_s - lent_s / 2
    hang = Fault(kind=FaultKind.WORKER_HANGS, executor="rollout-1", at_s=stop_at_s)
    faults = Faults([hang] if hangs else [])
    ran = run(lend=True, stop_at_s=stop_at_s, stop_grace_s=stop_grace_s, faults=faults, **changes)
    assert "stopped after step" in str(ran.error)
    # it waits for the recall, or for what hangs as long as it may, and writes for 0.4 s
    assert ran.elapsed_s == pytest.approx(stop_at_s + waits_s + 0.4, abs=0.2)
    snapshot, state = ran.checkpoints.snapshots[-1]
    warned = [text for text in ran.recorder.fields("warning", "message") if "did not hand back" in text]
    assert [text.partition(":")[0] for text in warned] == [
        f"rollout-1 did not hand back what ran there within {waits_s:g} s"
    ] * hangs
    kept = {tuple(entry["key"]): entry["kept"] for entry in state["groups"]["running"]}
    if not hangs:
        stopped = [one for one in ran.pipeline.state.groups.ledger.running.values() if one.unplaced]
        assert sum(len(one.partial) for one in stopped) > 0
        for one in stopped:
            assert {int(index) for index in kept[one.key]} >= one.partial.keys()
            assert snapshot.partial_groups[one.key].keys() >= one.partial.keys()


def test_the_trainer_waits_until_a_failed_worker_has_left_its_device(monkeypatch):
    ended, began = [], []

    async def end(worker, original=FaultyWorker.end):
        await original(worker)
        ended.append(asyncio.get_running_loop().time())
        await asyncio.sleep(50.0)

    async def train(trainer, batch, original=KeepingTrainer.train):
        began.append(asyncio.get_running_loop().time())
        return await original(trainer, batch)

    monkeypatch.setattr(FaultyWorker, "end", end)
    monkeypatch.setattr(KeepingTrainer, "train", train)
    ran = run(lend=True, times={"response_tokens": constant}, faults=Faults([DIES]))
    assert ran.error is None
    (ended_s,) = ended
    assert ran.recorder.named("lent")[0].time_s < ended_s
    assert min(step_s - ended_s for step_s in began if step_s > ended_s) >= 50.0


def test_a_run_stops_if_a_failed_worker_does_not_leave_the_device(monkeypatch):
    async def end(worker):
        raise ExecutorLost("process 7 still runs", executor=worker.name)

    monkeypatch.setattr(FaultyWorker, "end", end)
    ran = run(lend=True, times={"response_tokens": constant}, faults=Faults([DIES]))
    assert str(ran.error) == "rollout-1 failed: process 7 still runs"
    assert ran.checkpoints.snapshots[-1][0].step == len(ran.trainer.batches)
