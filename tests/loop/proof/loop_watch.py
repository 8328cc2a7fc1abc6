"""The loop's own state, which it keeps incrementally, against a count from scratch
(`tests.loop.proof.books`)."""

from __future__ import annotations

from asyncrl_cli.loop.groups import Groups
from asyncrl_cli.profile.arithmetic import LoopSettings
from tests.loop.proof.books import Books
from tests.loop.proof.ledger_watch import Check


class LoopWatch:
    """Compares when it is told to: the ledger after every transition, everything once a change is
    complete."""

    def __init__(self, groups: Groups, settings: LoopSettings, books: Books, check: Check) -> None:
        self._groups = groups
        self._settings = settings
        self._books = books
        self._check = check

    def ledger(self) -> None:
        ledger, mine = self._groups.ledger.totals(), self._books.totals()
        self._check(
            2 * ledger["admitted_total"] == sum(ledger.values()), "ledger", f"{ledger} does not add up"
        )
        self._check(ledger == mine, "ledger", f"the ledger says {ledger}, counted {mine}")

    def everything(self) -> None:
        self.ledger()
        admission, books = self._groups.admission, self._books
        ledger = self._groups.ledger
        untaken = {key: attempt.deadline for key, attempt in {**ledger.running, **ledger.finished}.items()}
        self._check(
            untaken == books.untaken,
            "deadlines",
            f"the loop's deadlines are {untaken}, counted {books.untaken}",
        )
        self._check(
            list(ledger.finished) == books.finish_order,
            "takes",
            f"{list(ledger.finished)} are not {books.finish_order}",
        )
        numbers = (admission.version, admission.taken_in_window, admission.trained_groups, admission.budget)
        mine = (books.version, books.taken_in_window, books.trained, books.budget)
        self._check(
            numbers == mine, "admission", f"version, taken, trained and budget are {numbers}, counted {mine}"
        )
        closed, my_closed = admission.closed().value, books.closed()
        self._check(
            closed == my_closed,
            "admission",
            f"closed by {closed or 'nothing'!r}, should be {my_closed or 'nothing'!r}",
        )
        num_groups = self._settings.schedule.step_groups
        takeable, my_takeable = (
            [attempt.key for attempt in admission.takeable(num_groups)],
            books.takeable(num_groups),
        )
        self._check(takeable == my_takeable, "takes", f"{takeable} may be taken, should be {my_takeable}")
