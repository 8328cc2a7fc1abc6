"""What the loop says of itself in every tick, against what the workers were really asked to do."""

from __future__ import annotations

import re
from collections import Counter
from typing import ClassVar

from asyncrl_cli.measure.states import State
from tests.loop.proof.invariants import Invariants

ENDED = ("done", "stopped", "failed")
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
            self.doing[found[1]] = (
                f"{found[1]} is {'receiving' if found[2] == 'prefetches' else 'loading'} version {found[3]}"
            )
        elif found := re.match(r"(?:loaded|lost) .*'worker': '(rollout-\d+)'", text):
            self.doing.pop(found[1], None)

    def tick(self, overview) -> None:
        super().tick(overview)
        if overview.phase not in ENDED:
            self.check_closed(overview)
            self.check_trainer(overview)

    def check_closed(self, overview) -> None:
        closed, feed = self.books.closed(), overview.reports["feed"]
        all_down = all(worker.down for worker in self.books.workers.values())
        expected = "restart" if closed == "loading" and all_down else closed
        self.check_same("causes", "what admission is closed by", overview.admission, expected)
        cause = overview.admission_cause
        self.check(bool(cause) == bool(closed), "causes", f"{closed!r} because of {cause!r}")
        wait = f"admission: {expected} ({cause})" if closed else ""
        state = State.BLOCKED if closed else State.BUSY
        self.check_same("causes", "the feed", (feed.state, feed.waiting_for), (state, wait))
        for claim in overview.admission_cause.split(", ") if closed else ():
            self.check_claim(claim)
            Watching.said[f"{expected}: {re.sub(r'[0-9]+', 'N', claim)}"] += 1

    def check_claim(self, claim: str) -> None:
        books, workers = self.books, self.books.workers
        used = [
            (sum(book.unfinished.values()) + book.eval_sequences, book.slots)
            for book in workers.values()
            if not book.down
        ]
        slots = sum(book.slots for book in workers.values() if not book.down)
        evals = sum(book.eval_sequences for book in workers.values())
        if found := re.fullmatch(r"the eval of version (\d+) has held (rollout-\d+) for \d+ s", claim):
            book = workers[found[2]]
            # with a reward model, sequences that have ended are still to be judged
            works = book.eval_sequences > 0 or not book.unfinished or "reward" in books.scorers
            holds = works and book.version == int(found[1]) < books.version
        elif found := re.fullmatch(FINISHES, claim):
            holds = self.doing.get(found[1]) == f"{found[1]} is loading {found[4]}"
            with_slot, left = sum(workers[found[1]].unfinished.values()), int(found[2])
            holds = holds and (
                left == with_slot if self.settings.profile.rollout.hold_slots else left >= with_slot
            )
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
            # the next is being gathered
            holds = self.published < int(found[1]) <= max(books.version, self.published + 1)
        elif found := re.fullmatch(r"(\d+) of (\d+) in use", claim):
            holds = (sum(min(pair) for pair in used), slots) == (int(found[1]), int(found[2]))
        elif found := re.fullmatch(r"(\d+) sequences queued", claim):
            holds = sum(max(0, running - own) for running, own in used) == int(found[1])
        elif found := re.fullmatch(r"(\d+) by the eval of version (\d+)", claim):
            holds = evals == int(found[1])
        elif found := re.fullmatch(r"all (\d+) groups of the window have started", claim):
            holds = len(books.untaken) + books.taken_in_window >= books.budget == int(found[1])
        elif found := re.fullmatch(
            r"(\d+) of at most (\d+) sequences run: engines preempted too many", claim
        ):
            in_flight = sum(sum(book.unfinished.values()) for book in workers.values())
            holds = books.preempts and books.is_crowded and in_flight == int(found[1])
        else:
            known = (
                "the run is stopping",
                "every group of the run has started",
                f"version {books.version + 1} opens the next",
            )
            holds = claim in known or re.fullmatch(r"\d+ more", claim)
        self.check(bool(holds), "causes", f"it is not so that {claim!r}; really: {self.doing}, {workers}")

    def check_trainer(self, overview) -> None:
        trainer = overview.reports.get("trainer-0")
        if trainer is None:
            return
        is_busy = overview.ledger["training"] > 0
        self.check_same("causes", "whether the trainer is busy", trainer.state is State.BUSY, is_busy)
        if trainer.state is State.STARVED and overview.phase != "stopping":
            self.check(bool(trainer.waiting_for), "causes", "the trainer waits for nothing")
