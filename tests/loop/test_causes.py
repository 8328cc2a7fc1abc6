"""What the loop says of itself, once a second: who is in which state, and why somebody waits. Held against
the simulated world.

(That it names the true cause in every second of every seed: test_seeds.py.)
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from fractions import Fraction

import pytest

from asyncrl_cli.loop import governor
from asyncrl_cli.loop.executors import ReportBook
from asyncrl_cli.measure.states import ExecutorReport, Span, State
from tests.loop import worlds
from tests.loop.proof.causes import Watching
from tests.loop.proof.drawing import draw
from tests.loop.proof.faults import KeepingTrainer
from tests.loop.proof.invariants import InvariantError
from tests.loop.proof.scenarios import run
from tests.loop.worlds import MODES, run_world, settings


def test_a_worker_that_the_run_goes_on_without_is_not_said_to_be_restarted(monkeypatch):
    monkeypatch.setattr(Watching, "said", Counter())
    assert run(draw(5), Watching).broken is None
    assert Watching.said["slots: rollout-N is away"]


def test_engines_that_preempt_nothing_are_no_cause(monkeypatch):
    """With this limit every step cuts what may be in flight, and the loop says that engines preempted."""
    monkeypatch.setattr(governor, "THRASHES", -1.0)
    assert not draw(0).preemptions
    broken = run(draw(0), Watching).broken
    assert isinstance(broken, InvariantError)
    assert broken.invariant == "causes"
    assert "engines preempted too many" in str(broken)


def test_an_eval_that_holds_the_only_worker_is_what_the_feed_and_the_trainer_wait_for():
    """The groups in flight were due first, admission was closed by deadlines: and nobody said that an eval
    stood behind it."""
    times = dict(
        token_s=0.1, response_tokens=lambda rng: 40, prefetch_s=lambda rng: 0.0, load_s=lambda rng: 0.1
    )
    changes = {"eval_every_versions": 1, "eta": Fraction(1, 2), "window_steps": 1}
    ran = run_world(settings("partial-rollout", **changes), workers=1, slots=8, evals=48, times=times)
    ticks = [tick for tick in ran.recorder.ticks if tick.phase == "running" and tick.admission == "deadlines"]
    held = [tick for tick in ticks if tick.eval_running and tick.worker_versions["rollout-0"] < tick.version]
    assert len(held) > 10
    for tick in held:
        version = tick.worker_versions["rollout-0"]
        assert re.fullmatch(
            rf"the eval of version {version} has held rollout-0 for \d+ s", tick.admission_cause
        )
        assert tick.reports["feed"].waiting_for == f"admission: deadlines ({tick.admission_cause})"
        if tick.ledger["training"] == 0:
            assert tick.reports["trainer-0"].waiting_for.endswith(
                f"admission waits: deadlines; {tick.admission_cause}"
            )


@pytest.mark.parametrize("mode", MODES)
def test_the_end_of_a_run_waits_for_its_last_version_and_says_so(mode):
    ran = run_world(settings(mode), evals=64, times={"token_s": 0.2})
    ending = [tick for tick in ran.recorder.ticks if tick.phase == "evaluating"]
    assert len(ending) > 3
    for tick in ending:
        assert tick.reports["trainer-0"].state in (State.STARVED, State.SYNCING)
        waits = (
            f"version {tick.version} to be loaded and scored: ",
            "the checkpoint of step 12 to be written",
        )
        assert tick.reports["trainer-0"].waiting_for.startswith(waits)
    assert any("eval of version" in tick.reports["trainer-0"].waiting_for for tick in ending)


class SilentTrainer(KeepingTrainer):
    """Its process computes and answers nothing meanwhile: a report that is asked for in a step comes after
    it."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._answers = asyncio.Lock()

    async def train(self, batch):
        async with self._answers:
            return await super().train(batch)

    async def report(self):
        async with self._answers:
            return await super().report()


def test_a_trainer_that_does_not_report_within_a_step_is_busy_all_the_same(monkeypatch):
    monkeypatch.setattr(worlds, "KeepingTrainer", SilentTrainer)
    ran = run_world(settings("partial-rollout"), trainer_times={"train_s": lambda batch: 5.0})
    ticks = [tick for tick in ran.recorder.ticks if "trainer-0" in tick.reports and tick.phase == "running"]
    assert Counter(tick.reports["trainer-0"].state is State.BUSY for tick in ticks)[True] > 40
    assert all(
        (tick.reports["trainer-0"].state is State.BUSY) == (tick.ledger["training"] > 0) for tick in ticks
    )


def report(now_s, state_s, spans):
    return ExecutorReport(
        name="trainer-0",
        role="trainer",
        now_s=now_s,
        state=State.STARVED,
        waiting_for="",
        state_s=state_s,
        spans=tuple(Span(state=state, start_s=start_s, end_s=end_s) for state, start_s, end_s in spans),
        sums={"trained_tokens": now_s},
        gauges={},
    )


def test_a_report_that_was_overtaken_takes_nothing_back():
    """Asked for within a step, it may come after the step's own: its sums are older, its spans are missing
    from the newer one."""
    book = ReportBook()
    book.add(report(1.0, {State.STARVED: 1.0}, [(State.STARVED, 0.0, 1.0)]), 1.0)
    asked = report(3.0, {State.STARVED: 1.0, State.BUSY: 2.0}, [(State.BUSY, 1.0, 3.0)])
    newer = report(5.0, {State.STARVED: 1.0, State.BUSY: 4.0}, [(State.BUSY, 3.0, 5.0)])
    assert book.add(newer, 5.0)
    assert not book.add(asked, 5.1)
    assert book.latest["trainer-0"] is newer
    spans = [(span.state, span.start_s, span.end_s) for span in book.take_spans()["trainer-0"]]
    assert spans == [(State.STARVED, 0.0, 1.0), (State.BUSY, 1.0, 3.0), (State.BUSY, 3.0, 5.0)]
