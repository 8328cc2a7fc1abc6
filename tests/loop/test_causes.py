"""What the loop says of itself, once a second: who is in which state, and why somebody waits. Held against the simulated world."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from fractions import Fraction
from typing import ClassVar

import pytest

from asyncrl_cli.loop.reports import ReportBook
from asyncrl_cli.loop.states import ExecutorReport, Span, State
from tests.loop import worlds
from tests.loop.proof import scenarios
from tests.loop.proof.drawing import draw
from tests.loop.proof.faults import KeepingTrainer
from tests.loop.proof.invariants import Invariants
from tests.loop.worlds import MODES, run_world, settings
from tests.marks import one_in

ENDED = ("done", "stopped", "failed")
NUM_SEEDS, CHUNK_SEEDS = 100, 2
TOOL = r"waits for a tool of (\S+)/\d+ \(\d+ s so far\)(?: and \d+ more)?"
FINISHES = rf"(rollout-\d+) is finishing (\d+) responses(?: \({TOOL}\))? before it loads (version \d+)"


class Watching(Invariants):
    """Also holds every tick's words against what the workers were really asked to do (the trace of calls)."""

    said: ClassVar[Counter[str]] = Counter()

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.doing: dict[str, str] = {}

    def note(self, text: str) -> None:
        super().note(text)
        if found := re.match(r"(rollout-\d+) (prefetches|loads) version (\d+)", text):
            self.doing[found[1]] = f"{found[1]} is {'receiving' if found[2] == 'prefetches' else 'loading'} version {found[3]}"
        elif found := re.match(r"(?:loaded|lost) .*'worker': '(rollout-\d+)'", text):
            self.doing.pop(found[1], None)

    def tick(self, snapshot) -> None:
        super().tick(snapshot)
        if snapshot.phase not in ENDED:
            self.check_closed(snapshot)
            self.check_trainer(snapshot)

    def check_closed(self, snapshot) -> None:
        closed, feed = self.books.closed(), snapshot.reports["feed"]
        all_down = all(worker.down for worker in self.books.workers.values())
        expected = "restart" if closed == "loading" and all_down else closed
        self.check(snapshot.admission == expected, "causes", f"closed by {snapshot.admission!r}, counted {expected!r}")
        self.check(bool(snapshot.admission_cause) == bool(closed), "causes", f"{closed!r} because of {snapshot.admission_cause!r}")
        wait = f"admission: {expected} ({snapshot.admission_cause})" if closed else ""
        state = State.BLOCKED if closed else State.BUSY
        self.check((feed.state, feed.waiting_for) == (state, wait), "causes", f"feed {feed.state} for {feed.waiting_for!r}: {wait}")
        for claim in snapshot.admission_cause.split(", ") if closed else ():
            self.check_claim(claim)
            Watching.said[f"{expected}: {re.sub(r'[0-9]+', 'N', claim)}"] += 1

    def check_claim(self, claim: str) -> None:
        books, workers = self.books, self.books.workers
        used = [(sum(book.unfinished.values()) + book.eval_sequences, book.slots) for book in workers.values() if not book.down]
        slots = sum(book.slots for book in workers.values() if not book.down)
        evals = sum(book.eval_sequences for book in workers.values())
        if found := re.fullmatch(r"the eval of version (\d+) has held (rollout-\d+) for \d+ s", claim):
            book = workers[found[2]]
            holds = (book.eval_sequences > 0 or not book.unfinished) and book.version == int(found[1]) < books.version
        elif found := re.fullmatch(FINISHES, claim):
            holds = self.doing.get(found[1]) == f"{found[1]} is loading {found[4]}"
            with_slot, left = sum(workers[found[1]].unfinished.values()), int(found[2])
            holds = holds and (left == with_slot if self.settings.profile.rollout.hold_slots else left >= with_slot)
            holds = holds and (found[3] is None or found[3] in map(str, books.live))
        elif found := re.fullmatch(r"(rollout-\d+) is (?:receiving|loading) version \d+", claim):
            holds = self.doing.get(found[1]) == claim
        elif found := re.fullmatch(r"(rollout-\d+) is being restarted(?: \(\d of \d\))?", claim):
            holds = workers[found[1]].down and not workers[found[1]].away
        elif found := re.fullmatch(r"(rollout-\d+) is away", claim):
            holds = workers[found[1]].away
        elif found := re.fullmatch(r"(rollout-\d+) is about to receive version (\d+)", claim):
            holds = found[1] not in self.doing and workers[found[1]].version < int(found[2]) == self.published
        elif found := re.fullmatch(r"version (\d+) is being published", claim):
            holds = self.published < int(found[1]) <= max(books.version, self.published + 1)  # the next is being gathered
        elif found := re.fullmatch(r"(\d+) of (\d+) in use", claim):
            holds = (sum(min(pair) for pair in used), slots) == (int(found[1]), int(found[2]))
        elif found := re.fullmatch(r"(\d+) sequences queued", claim):
            holds = sum(max(0, running - own) for running, own in used) == int(found[1])
        elif found := re.fullmatch(r"(\d+) by the eval of version (\d+)", claim):
            holds = evals == int(found[1])
        elif found := re.fullmatch(r"all (\d+) groups of the window have started", claim):
            holds = len(books.untaken) + books.taken_in_window >= books.budget == int(found[1])
        else:
            known = ("the run is stopping", "every group of the run has started", f"version {books.version + 1} opens the next")
            holds = claim in known or re.fullmatch(r"\d+ more", claim)
        self.check(bool(holds), "causes", f"it is not so that {claim!r}; really: {self.doing}, {workers}")

    def check_trainer(self, snapshot) -> None:
        trainer = snapshot.reports.get("trainer-0")
        if trainer is None:
            return
        training = snapshot.ledger["training"]
        self.check((trainer.state is State.BUSY) == (training > 0), "causes", f"trainer {trainer.state}, training {training}")
        if trainer.state is State.STARVED and snapshot.phase != "stopping":
            self.check(bool(trainer.waiting_for), "causes", "the trainer waits for nothing")


@pytest.mark.parametrize("first", one_in(NUM_SEEDS, range(0, NUM_SEEDS, CHUNK_SEEDS)))
def test_whatever_waits_names_its_true_cause_in_every_second_of_every_seed(first, monkeypatch):
    monkeypatch.setattr(scenarios, "Invariants", Watching)
    broken = [outcome for outcome in map(scenarios.run, map(draw, range(first, first + CHUNK_SEEDS))) if outcome.broken is not None]
    assert not broken, "\n".join(f"{outcome.scenario.seed}: {outcome.broken!r}" for outcome in broken)


def test_a_worker_that_the_run_goes_on_without_is_not_said_to_be_restarted(monkeypatch):
    monkeypatch.setattr(scenarios, "Invariants", Watching)
    monkeypatch.setattr(Watching, "said", Counter())
    assert scenarios.run(draw(86)).broken is None
    assert Watching.said["slots: rollout-N is away"]


def test_an_eval_that_holds_the_only_worker_is_what_the_feed_and_the_trainer_wait_for():
    """The groups in flight were due first, admission was closed by deadlines: and nobody said that an eval stood behind it."""
    times = {"token_s": 0.1, "response_tokens": lambda rng: 40, "prefetch_s": lambda rng: 0.0, "load_s": lambda rng: 0.1}
    changes = {"eval_every_versions": 1, "eta": Fraction(1, 2), "window_steps": 1}
    ran = run_world(settings("partial-rollout", **changes), workers=1, slots=8, evals=48, times=times)
    ticks = [tick for tick in ran.recorder.ticks if tick.phase == "running" and tick.admission == "deadlines"]
    held = [tick for tick in ticks if tick.eval_running and tick.worker_versions["rollout-0"] < tick.version]
    assert len(held) > 10
    for tick in held:
        version = tick.worker_versions["rollout-0"]
        assert re.fullmatch(rf"the eval of version {version} has held rollout-0 for \d+ s", tick.admission_cause)
        assert tick.reports["feed"].waiting_for == f"admission: deadlines ({tick.admission_cause})"
        if tick.ledger["training"] == 0:
            assert tick.reports["trainer-0"].waiting_for.endswith(f"admission waits: deadlines; {tick.admission_cause}")


@pytest.mark.parametrize("mode", MODES)
def test_the_end_of_a_run_waits_for_its_last_version_and_says_so(mode):
    ran = run_world(settings(mode), evals=64, times={"token_s": 0.2})
    ending = [tick for tick in ran.recorder.ticks if tick.phase == "evaluating"]
    assert len(ending) > 3
    for tick in ending:
        assert tick.reports["trainer-0"].state in (State.STARVED, State.SYNCING)
        waits = (f"version {tick.version} to be loaded and scored: ", "the checkpoint of step 12 to be written")
        assert tick.reports["trainer-0"].waiting_for.startswith(waits)
    assert any("eval of version" in tick.reports["trainer-0"].waiting_for for tick in ending)


class SilentTrainer(KeepingTrainer):
    """Its process computes and answers nothing meanwhile: a report that is asked for in a step comes after it."""

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
    assert all((tick.reports["trainer-0"].state is State.BUSY) == (tick.ledger["training"] > 0) for tick in ticks)


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
    """Asked for within a step, it may come after the step's own: its sums are older, its spans are missing from the newer one."""
    book = ReportBook()
    book.add(report(1.0, {State.STARVED: 1.0}, [(State.STARVED, 0.0, 1.0)]), 1.0)
    asked = report(3.0, {State.STARVED: 1.0, State.BUSY: 2.0}, [(State.BUSY, 1.0, 3.0)])
    newer = report(5.0, {State.STARVED: 1.0, State.BUSY: 4.0}, [(State.BUSY, 3.0, 5.0)])
    assert book.add(newer, 5.0)
    assert not book.add(asked, 5.1)
    assert book.latest["trainer-0"] is newer
    spans = [(span.state, span.start_s, span.end_s) for span in book.take_spans()["trainer-0"]]
    assert spans == [(State.STARVED, 0.0, 1.0), (State.BUSY, 1.0, 3.0), (State.BUSY, 3.0, 5.0)]
