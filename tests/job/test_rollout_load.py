"""A load's stop includes its probe: in the actor itself, with an engine that only takes time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.job.meters import RolloutMeter
from asyncrl_cli.job.rollout_actor import Received, RolloutActor
from asyncrl_cli.loop.ports import Interrupt
from asyncrl_cli.loop.states import State
from asyncrl_cli.rollout.engine import PauseReport, Scores


class SlowEngine:
    def __init__(self) -> None:
        self.now_s = 0.0

    async def load(self, weights: Any, version: int, interrupt: Interrupt) -> PauseReport:
        self.now_s += 2.0
        return PauseReport(load_s=1.0, pause_s=1.5)

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        self.now_s += 0.5
        return Scores(logprobs=[[-1.0, -3.0]], pause_s=0.25)


@pytest.mark.parametrize("interrupt", ["keep-kv", "drain"])
def test_generation_stands_still_for_the_load_and_its_probe(interrupt: Interrupt) -> None:
    manifest: Any = SimpleNamespace(version=3, probe_tokens=((1, 2, 3),), probe_logprobs=((-1.0, -2.0),), temperature=1.0)
    actor, engine = object.__new__(RolloutActor), SlowEngine()
    actor._engine = engine  # type: ignore[assignment]
    actor._meter = RolloutMeter("rollout-0", 8, lambda: engine.now_s, lambda: None)
    actor._received = Received(manifest=manifest, weights={}, send_s=0.0)
    actor._meter.running(4)

    report = asyncio.run(actor.load(3, interrupt))

    assert (report.load_s, report.pause_s, report.logprob_abs_diff) == (1.0, 1.75, pytest.approx(0.5))
    state_s = actor._meter.report(version=3, sampled_tokens=0, decode_steps=0, running_tokens=0).state_s
    drained_s = 2.0 if interrupt == "drain" else 0.0  # sequences that a drain waits for are busy
    assert state_s.get(State.BUSY, 0.0) == drained_s
    assert state_s[State.LOADING] == 2.5 - drained_s
