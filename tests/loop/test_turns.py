"""Trajectories of several turns: tools, slots, weight syncs between turns, drains, and resumes. On a virtual
clock."""

from __future__ import annotations

import random
from typing import Any

import pytest

from asyncrl_cli.measure.states import State
from asyncrl_cli.simulate.sequences import ToolWait
from tests.loop.proof.memory import resume_from
from tests.loop.worlds import MODES, Ran, run_world, settings

TOOL_S = 30.0


def run_turns(
    mode: str,
    *,
    tool_s: float = 3.0,
    failure: str = "",
    slots: int = 8,
    resume_from: Any = None,
    **changes: Any,
) -> Ran:
    """Three turns of 20 tokens or so, at 0.02 s each; a tool takes `tool_s` or so. With `failure`, those of
    every fifth trajectory fail."""

    def calls(rng: random.Random, tokens: int) -> list[ToolWait]:
        if failure and rng.random() < 0.2:
            return [ToolWait(tool_s, 0, 0, failure)]
        return [ToolWait(tool_s * rng.uniform(0.5, 1.5), 5, rng.randint(1, 40)) for _ in range(2)]

    limits = dict(train_steps=6, call_timeout_s=10.0, sync_timeout_s=5 * TOOL_S, stall_timeout_s=9 * TOOL_S)
    chosen = settings(mode, **(limits | changes))
    times = {
        "response_tokens": lambda rng: 20,
        "tool_calls": calls,
        "hold_slots": chosen.profile.rollout.hold_slots,
        "call_timeout_s": 10.0,
    }
    return run_world(chosen, slots=slots, times=times, resume_from=resume_from)


@pytest.mark.parametrize("hold_slots", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_synced_at_any_moment_of_a_trajectory_and_the_bound_holds(
    mode: str, hold_slots: bool
) -> None:
    """Steps and tools take about as long, so that most syncs fall between turns or into a tool call."""
    ran = run_turns(mode, tool_s=1.0, slots=3, hold_slots=hold_slots)
    assert ran.error is None
    assert len(set(ran.trained)) == len(ran.trained) == 6 * 4
    bound = ran.pipeline.state.settings.schedule.max_staleness
    assert max(ran.staleness()) <= bound
    # a drain waits for a trajectory at a tool
    assert (max(ran.spans()) > 0) == (mode == "partial-rollout")
    assert {meta.num_turns for _, meta in ran.trajectories} == {3}


@pytest.mark.parametrize("mode", MODES)
def test_tools_that_take_three_times_the_limit_of_silence_are_no_loss(mode: str) -> None:
    ran = run_turns(mode, tool_s=TOOL_S)
    assert ran.error is None
    assert not ran.recorder.named("lost")
    assert len(ran.trained) == 6 * 4


@pytest.mark.slow
def test_a_drain_says_for_which_trajectory_and_tool_it_waits() -> None:
    ran = run_turns("stale-samples", tool_s=TOOL_S)
    waits = {
        what
        for tick in ran.recorder.ticks
        for what in (tick.admission_cause, *(report.waiting_for for report in tick.reports.values()))
    }
    drains = [text for text in waits if "before it loads version" in text and "waits for a tool of p" in text]
    assert drains, sorted(waits)
    trainer = [
        tick.reports["trainer-0"].waiting_for
        for tick in ran.recorder.ticks
        if "trainer-0" in tick.reports and "waits for a tool of p" in tick.reports["trainer-0"].waiting_for
    ]
    assert trainer, "the trainer does not say that its groups wait for tools"


def test_waiting_for_tools_is_a_state_that_counts_as_idle() -> None:
    ran = run_turns("on-policy-pipeline", tool_s=TOOL_S)
    report = ran.recorder.steps[-1].reports["rollout-0"]
    assert report.state_s[State.WAITING] > 2 * TOOL_S
    assert report.sums["idle_s"] >= report.state_s[State.WAITING]


def test_failed_tools_are_counted_by_kind_over_a_resume() -> None:
    changes = {"max_failed_ratio": 0.9, "checkpoint_every_steps": 2, "n": 4}
    ran = run_turns("partial-rollout", failure="tool-timeout", **changes)
    assert ran.error is None
    snapshot, state = ran.checkpoints.snapshots[1]
    resumed = run_turns(
        "partial-rollout", failure="tool-timeout", resume_from=resume_from(snapshot, state), **changes
    )
    assert resumed.error is None
    before = state["groups"]["failures"]["tool-timeout"]
    assert before > 0
    assert list(resumed.recorder.steps[-1].failures) == ["tool-timeout"]
    assert resumed.recorder.steps[-1].failures["tool-timeout"] > before
    finished = {tuple(entry["try"]["key"]) for entry in state["groups"]["finished"]}
    running = {tuple(entry["key"]) for entry in state["groups"]["running"]}
    trained = {tuple(key) for key in resumed.trained}
    assert finished <= trained, "a finished group was not kept"
    assert running <= trained | {tuple(event.key) for event in resumed.recorder.named("dropped") if event.key}
    assert running == {tuple(event.key) for event in resumed.recorder.named("replaced") if event.key}
