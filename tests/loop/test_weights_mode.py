"""weights.mode: when the trainer goes on after a gather, and what that costs. On a virtual clock, to the
second."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest

from asyncrl_cli.base.errors import ExecutorFailed, Interrupted, StallError
from asyncrl_cli.contracts.weight_version import LoadReport
from asyncrl_cli.profile.schema import Interrupt
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from tests.loop.proof.faults import Fault, FaultKind, Faults
from tests.loop.worlds import MODES, Ran, run_world, settings

EXACT = {"response_tokens": lambda rng: 50, "prefetch_s": lambda rng: 0.5, "load_s": lambda rng: 0.3}
"""A response takes 1 s; the trainer trains 0.7 s, gathers 0.1 s and publishes 0.05 s."""


def run_sync(mode: str, *, times=EXACT, **changes) -> Ran:
    kept = {key: changes.pop(key) for key in ("faults", "stop_at_s", "workers", "evals") if key in changes}
    return run_world(
        settings(mode, weights_mode="sync", checkpoint_every_steps=0, **changes), times=times, **kept
    )


def parts(ran: Ran, step: int) -> dict[str, float]:
    return {
        part: round(seconds, 6)
        for part, seconds in ran.recorder.steps[step - 1].timing_s.items()
        if seconds > 1e-9
    }


def test_async_goes_on_after_the_gather_and_sync_after_the_last_load() -> None:
    """Nothing is admitted ahead: the trainer waits for the new version's rollouts either way, but by another
    name."""
    is_async = run_world(settings("on-policy-pipeline", checkpoint_every_steps=0), times=EXACT)
    assert parts(is_async, 5) == {"wait_data": 1.85, "train": 0.7, "gather": 0.1, "step": 2.65}
    is_sync = run_sync("on-policy-pipeline")
    for step in (1, 5):  # the first wait is before the first step
        assert parts(is_sync, step) == {"wait_data": 1.0, "train": 0.7, "gather": 0.95, "step": 2.65}
    assert is_async.error is is_sync.error is None
    assert sorted(is_async.trained) == sorted(is_sync.trained)


@pytest.mark.parametrize("mode", MODES)
def test_no_window_is_trained_before_every_worker_holds_its_version(mode: str) -> None:
    ran = run_sync(mode, times=None, workers=3)
    assert ran.error is None
    loaded: dict[int, list[float]] = {}
    for event in ran.recorder.named("loaded"):
        loaded.setdefault(event.version, []).append(event.time_s)
    begins = {}
    for before, record in pairwise(ran.recorder.steps):
        if before.version != before.window:
            begins[record.window] = before.ended_s  # the record is written once the trainer may go on
    assert begins
    for window, began_s in begins.items():
        assert len(loaded[window]) == 3
        assert max(loaded[window]) <= began_s


def test_a_synchronous_run_skips_no_version_and_has_one_on_its_way() -> None:
    times = {"prefetch_s": lambda rng: rng.random() * 9, "load_s": lambda rng: 0.1}
    ran = run_sync("partial-rollout", times=times, workers=4, eta=Fraction(3), window_steps=1, train_steps=20)
    assert ran.error is None
    assert [worker.loads for worker in ran.workers] == [list(range(21))] * 4


def test_a_worker_that_missed_a_version_takes_the_newest() -> None:
    late = Fault(kind=FaultKind.LATE_PREFETCH, executor="rollout-1", nth=3, seconds=8.0)
    changes = {"window_steps": 1, "eta": Fraction(3), "train_steps": 12, "checkpoint_every_steps": 0}
    ran = run_world(settings("partial-rollout", **changes), times=EXACT, faults=Faults([late]))
    assert ran.error is None
    assert ran.workers[0].loads == list(range(13))
    assert ran.workers[1].loads[:3] == [0, 1, 2]
    assert ran.workers[1].loads[3] > 3
    assert ran.workers[1].loads == sorted(set(ran.workers[1].loads))
    assert ran.workers[1].loads[-1] == 12


def test_a_transfer_that_arrives_again_changes_nothing() -> None:
    again = [
        Fault(kind=FaultKind.REPEATED_PREFETCH, executor="rollout-0", nth=nth, seconds=0.7)
        for nth in (2, 4, 5)
    ]
    plain, repeated = (
        run_sync("partial-rollout", train_steps=12, faults=Faults(faults)) for faults in ([], again)
    )
    assert repeated.error is None
    assert [worker.loads for worker in repeated.workers] == [worker.loads for worker in plain.workers]


def test_who_does_not_load_is_named_after_a_bounded_wait() -> None:
    stuck = Fault(kind=FaultKind.LATE_PREFETCH, executor="rollout-1", nth=3, seconds=250.0)
    ran = run_sync("stale-samples", faults=Faults([stuck]), sync_timeout_s=20.0)
    assert isinstance(ran.error, StallError)
    assert str(ran.error) == (
        "nothing has moved for 20 s, and the trainer waits for every worker to load version 2: rollout-1 is "
        "receiving version 2"
    )
    assert ran.checkpoints.snapshots[-1][0].step == len(ran.recorder.steps) == 4


def test_a_worker_that_its_probes_find_on_the_old_weights_is_warned_of_and_unclear_ones_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Version 2 does not arrive in the engine of rollout-1, and version 3 cannot be told from it."""
    told: dict[int, dict[str, Any]] = {
        2: {"verdict": "not loaded", "loaded_share": 0.02},
        3: {"verdict": "unclear"},
    }
    loaded = {"verdict": "loaded", "loaded_share": 0.99}
    load = SimulatedWorker.load

    async def probed(worker: SimulatedWorker, version: int, interrupt: Interrupt) -> LoadReport:
        report = await load(worker, version, interrupt)
        return replace(report, **(told.get(version, loaded) if worker.name == "rollout-1" else loaded))

    monkeypatch.setattr(SimulatedWorker, "load", probed)
    ran = run_sync("stale-samples")
    assert ran.error is None
    (warning,) = ran.recorder.named("warning")
    assert "rollout-1 disagrees with the trainer after loading version 2" in warning.fields["message"]
    assert "moved only 2% of the way from the previous version's to the new" in warning.fields["message"]
    synced = {record.sync["version"]: record.sync for record in ran.recorder.steps if record.sync}
    shown = [(synced[version]["loaded_share"], synced[version]["unclear_loads"]) for version in (1, 2, 3)]
    assert shown == [(0.99, 0), (0.02, 0), (0.99, 1)]
    loads = [event.fields for event in ran.recorder.named("loaded") if event.version == 2]
    verdicts = {fields["worker"]: fields["verdict"] for fields in loads}
    assert verdicts == {"rollout-0": "loaded", "rollout-1": "not loaded"}


def test_a_worker_that_dies_in_the_wait_ends_it_with_its_own_error() -> None:
    lost = Fault(kind=FaultKind.LOST_PREFETCH, executor="rollout-1", nth=3)
    ran = run_sync("stale-samples", faults=Faults([lost]))
    assert isinstance(ran.error, ExecutorFailed)
    assert str(ran.error).startswith("rollout-1 failed: simulated loss of version 2")
    assert ran.checkpoints.snapshots[-1][0].step == 4


@pytest.mark.slow
def test_a_stop_does_not_wait_for_the_loads() -> None:
    slow = EXACT | {"prefetch_s": lambda rng: 60.0}
    undisturbed = run_sync("on-policy-pipeline", times=slow)
    first_ends_s = undisturbed.recorder.steps[0].ended_s - 60.0
    ran = run_sync("on-policy-pipeline", times=slow, stop_at_s=first_ends_s)
    assert isinstance(ran.error, Interrupted)
    assert len(ran.recorder.steps) == 1
    assert ran.elapsed_s == pytest.approx(first_ends_s + 0.4, abs=1.0)  # and the checkpoint is written


def test_an_eval_that_defers_the_loads_is_its_own_part() -> None:
    ran = run_sync("partial-rollout", window_steps=1, evals=40, eval_every_versions=1)
    assert ran.error is None
    spent = [record.timing_s for record in ran.recorder.steps]
    assert any(timing["eval"] > 0.5 for timing in spent)
    for timing in spent:
        assert sum(seconds for part, seconds in timing.items() if part != "step") == pytest.approx(
            timing["step"]
        )
        assert min(timing.values()) > -1e-9
