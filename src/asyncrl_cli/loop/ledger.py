"""The ledger of all attempts of a run.

Every attempt is in exactly one stage, and nothing is ever lost: at every transition `admitted_total` equals
the sum over the six stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.contracts.prompt_group import AttemptKey
from asyncrl_cli.loop.attempts import Attempt, Stage

_ALLOWED = {
    Stage.RUNNING: {Stage.FINISHED, Stage.DROPPED, Stage.REQUEUED},
    Stage.FINISHED: {Stage.TRAINING, Stage.DROPPED, Stage.REQUEUED},
    Stage.TRAINING: {Stage.TRAINED},
}


class LedgerState(TypedDict):
    """The ledger's part of a checkpoint. Live attempts are stored with their groups (`GroupsState`)."""

    admitted_total: Count
    ended: dict[Stage, Count]
    reasons: dict[str, Count]


class Ledger:
    """Live attempts by stage, in order of arrival. Ended attempts are kept as totals only, with reasons for
    the untrained ones."""

    def __init__(self) -> None:
        self.admitted_total = 0
        self.reasons: Counter[str] = Counter()
        self.ended: Counter[Stage] = Counter()
        self.running: dict[AttemptKey, Attempt] = {}
        self.finished: dict[AttemptKey, Attempt] = {}
        self.training: dict[AttemptKey, Attempt] = {}
        self.deadlines: Counter[int] = Counter()
        """The number of untaken attempts per deadline."""
        self._live = {
            Stage.RUNNING: self.running,
            Stage.FINISHED: self.finished,
            Stage.TRAINING: self.training,
        }

    def admit(self, attempt: Attempt) -> None:
        assert not any(attempt.key in attempts for attempts in self._live.values()), (
            f"{attempt.key} was admitted twice"
        )
        self.admitted_total += 1
        self._enter(attempt, Stage.RUNNING)
        self.check()

    def move(self, attempt: Attempt, to: Stage, reason: str = "") -> None:
        """Move one live attempt to another stage; `reason` says why one is dropped or requeued."""
        assert to in _ALLOWED.get(attempt.stage, ()), f"{attempt.key} cannot go from {attempt.stage} to {to}"
        del self._live[attempt.stage][attempt.key]
        if attempt.stage is not Stage.TRAINING and to is not Stage.FINISHED:
            self._count_deadline(attempt, -1)
        attempt.stage = to
        if to in self._live:
            self._live[to][attempt.key] = attempt
        else:
            self.ended[to] += 1
        if reason:
            self.reasons[f"{to}: {reason}"] += 1
        self.check()

    def set_deadline(self, attempt: Attempt, deadline: int) -> None:
        """Raise the deadline of a running attempt, whose responses with the oldest weights were lost."""
        assert deadline >= attempt.deadline, (
            f"{attempt.key}: the deadline {attempt.deadline} cannot fall to {deadline}"
        )
        self._count_deadline(attempt, -1)
        attempt.deadline = deadline
        self._count_deadline(attempt, +1)

    def totals(self) -> dict[str, int]:
        """`admitted_total` and the six stages, under their metric names."""
        live = {stage: len(attempts) for stage, attempts in self._live.items()}
        return {"admitted_total": self.admitted_total} | {
            stage.value: live.get(stage, 0) + self.ended[stage] for stage in Stage
        }

    def check(self) -> None:
        counted = sum(map(len, self._live.values())) + self.ended.total()
        assert self.admitted_total == counted, f"admitted {self.admitted_total}, accounted for {counted}"

    def state(self) -> LedgerState:
        return {
            "admitted_total": self.admitted_total,
            "ended": dict(self.ended),
            "reasons": dict(self.reasons),
        }

    def restore(self, state: LedgerState, live: Iterable[Attempt]) -> None:
        """`live`: the attempts that had not ended, each in its stage."""
        self.admitted_total = state["admitted_total"]
        self.ended, self.reasons = Counter(state["ended"]), Counter(state["reasons"])
        for attempt in live:
            self._enter(attempt, attempt.stage)
        self.check()

    def _enter(self, attempt: Attempt, stage: Stage) -> None:
        """Add a live attempt that is new to the ledger."""
        attempt.stage = stage
        self._live[stage][attempt.key] = attempt
        self._count_deadline(attempt, +1)

    def _count_deadline(self, attempt: Attempt, change: int) -> None:
        self.deadlines[attempt.deadline] += change
        if not self.deadlines[attempt.deadline]:
            del self.deadlines[attempt.deadline]
