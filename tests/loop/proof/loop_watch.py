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
        self._step_groups = settings.schedule.step_groups
        self._books = books
        self._check = check

    def ledger(self) -> None:
        ledger = self._groups.ledger.totals()
        self._check(
            2 * ledger["admitted_total"] == sum(ledger.values()), "ledger", f"{ledger} does not add up"
        )
        self._same("ledger", "the ledger", ledger, self._books.totals())

    def everything(self) -> None:
        self.ledger()
        same, books, admission, ledger = self._same, self._books, self._groups.admission, self._groups.ledger
        untaken = {key: attempt.deadline for key, attempt in {**ledger.running, **ledger.finished}.items()}
        same("deadlines", "deadlines", untaken, books.untaken)
        same("takes", "finished groups", list(ledger.finished), books.finish_order)
        window = (admission.version, admission.taken_in_window, admission.trained_groups, admission.budget)
        counted = (books.version, books.taken_in_window, books.trained, books.budget)
        same("admission", "version, taken, trained and budget", window, counted)
        same("admission", "what admission is closed by", admission.closed().value, books.closed())
        takeable = [attempt.key for attempt in admission.takeable(self._step_groups)]
        same("takes", "what may be taken", takeable, books.takeable(self._step_groups))

    def _same(self, invariant: str, what: str, found: object, counted: object) -> None:
        self._check(found == counted, invariant, f"{what}: the loop says {found}, counted {counted}")
