"""rollout.call_timeout_s: a worker that works is not lost, however long its groups take, and one that stands
still is. On a virtual clock, with the limits far below the lengths."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from asyncrl_cli.base.errors import ExecutorLost
from asyncrl_cli.contracts.ports import WorkerUpdate
from asyncrl_cli.contracts.prompt_group import PartRequest
from asyncrl_cli.measure.states import State
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from tests.loop.worlds import MODES, Ran, run_world, settings

LIMIT_S = 10.0
TOKEN_S = 0.02
LONG = round(3 * LIMIT_S / TOKEN_S)
"""Tokens of a response that takes three times the limit."""


def run_long(
    mode: str, *, tokens: int = LONG, slots: int = 8, evals: int = 0, reward_s: float = 0.0, **changes: Any
) -> Ran:
    """Every wait that is not for a response is bounded by less than one response takes."""
    limits = dict(
        call_timeout_s=LIMIT_S, sync_timeout_s=2 * LIMIT_S, stall_timeout_s=4 * LIMIT_S, train_steps=6
    )
    times = {
        "response_tokens": lambda rng: tokens,
        "call_timeout_s": LIMIT_S,
        "weights_timeout_s": LIMIT_S,
        "reward_s": lambda rng: reward_s,
    }
    return run_world(settings(mode, **(limits | changes)), times=times, slots=slots, evals=evals)


def assert_whole(ran: Ran) -> None:
    assert ran.error is None
    assert len(set(ran.trained)) == len(ran.trained) == 6 * 4
    assert not ran.recorder.named("lost")


@pytest.mark.parametrize(
    ("mode", "weights_mode"), [*((mode, "async") for mode in MODES), ("stale-samples", "sync")]
)
def test_groups_and_drains_that_take_three_times_the_limit_are_no_loss(mode: str, weights_mode: str) -> None:
    ran = run_long(mode, weights_mode=weights_mode)
    assert_whole(ran)
    assert ran.elapsed_s > 3 * LIMIT_S


def test_so_are_evals_of_long_answers() -> None:
    ran = run_long("stale-samples", evals=6, eval_every_versions=1)
    assert_whole(ran)
    assert len(ran.recorder.named("eval")) > 1


def test_groups_may_queue_on_a_busy_worker_for_longer_than_the_limit() -> None:
    """Two slots, and two more groups of two wait for them: 8 s, 16 s and 24 s."""
    ran = run_long("stale-samples", tokens=400, slots=2, prefetch_groups=2)
    assert_whole(ran)


def stand_still_at(monkeypatch: pytest.MonkeyPatch, at_s: float) -> None:
    """From then on the engine of rollout-1's first process makes no token; its process goes on to answer."""
    submit = SimulatedWorker.submit
    begun: list[str] = []

    def stand_still(worker: SimulatedWorker) -> None:
        worker.engine.freeze()
        monkeypatch.setattr(worker.engine, "thaw", lambda version, *, recompute: None)

    def submits(worker: SimulatedWorker, request: PartRequest) -> None:
        submit(worker, request)
        if worker.name == "rollout-1" and not begun:
            begun.append(worker.name)
            asyncio.get_running_loop().call_at(at_s, stand_still, worker)
            asyncio.get_running_loop().call_at(at_s + 10 * LIMIT_S, int)  # the clock goes on

    monkeypatch.setattr(SimulatedWorker, "submit", submits)


@pytest.mark.parametrize("mode", ["on-policy-pipeline", "stale-samples", "colocate"])
def test_a_worker_that_stands_still_is_lost_after_the_limit_and_named(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    stand_still_at(monkeypatch, 5.0)
    ran = run_long(mode)
    assert isinstance(ran.error, ExecutorLost)
    assert str(ran.error).startswith("rollout-1 failed: it is stuck: ")
    assert str(ran.error).endswith("it made no token for rollout.call_timeout_s = 10 s")
    (failed,) = ran.recorder.named("failed")
    assert failed.time_s == pytest.approx(5.0 + LIMIT_S, abs=2.5)


@pytest.mark.parametrize("mode", ["stale-samples", "partial-rollout"])
def test_it_is_restarted_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    stand_still_at(monkeypatch, 5.0)
    ran = run_long(mode, max_restarts=1)
    assert ran.error is None
    assert ran.recorder.fields("restarted", "worker") == ["rollout-1"]
    assert len(set(ran.trained)) == len(ran.trained) == 6 * 4


def test_rewards_have_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take three times as long as a worker may be silent; the worker says that it computes them."""
    poll = SimulatedWorker.next_update

    async def next_update(worker: SimulatedWorker, seen: int) -> WorkerUpdate:
        update = await poll(worker, seen)
        (report,) = update.reports
        name = worker.name.replace("rollout", "reward")
        reward = replace(report, name=name, role="reward", state=State.BUSY, sums={}, spans=())
        return replace(update, reports=(report, reward))

    assert isinstance(run_long("stale-samples", tokens=50, reward_s=3 * LIMIT_S).error, ExecutorLost)
    monkeypatch.setattr(SimulatedWorker, "next_update", next_update)
    assert_whole(run_long("stale-samples", tokens=50, reward_s=3 * LIMIT_S))
