"""The accounts of a run: every attempt is in exactly one state, and nothing is ever lost.

            admit            finish            take             train
    (new) -------> running -------> finished -------> training -------> trained
                      |                 |
                      +--> dropped <----+    for good: failed, stale
                      +--> requeued <---+    ends this attempt; the prompt starts again as the next one

At every transition `admitted_total` equals the sum of the six states.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.loop.ports import AttemptKey
from asyncrl_cli.safe_files import Count


class Account(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"
    REQUEUED = "requeued"


_ALLOWED = {
    Account.RUNNING: {Account.FINISHED, Account.DROPPED, Account.REQUEUED},
    Account.FINISHED: {Account.TRAINING, Account.DROPPED, Account.REQUEUED},
    Account.TRAINING: {Account.TRAINED},
}
_LIVE = frozenset(_ALLOWED)


class LedgerState(TypedDict):
    """As a checkpoint has it; at a cut nothing is in training."""

    admitted_total: Count
    live: list[tuple[str, Count, Count, Account]]
    ended: dict[Account, Count]
    reasons: dict[str, Count]


class Ledger:
    """Live attempts one by one, ended ones as totals (and the reasons of the untrained)."""

    def __init__(self) -> None:
        self.admitted_total = 0
        self.reasons: Counter[str] = Counter()
        self._live: dict[AttemptKey, Account] = {}
        self._ended: Counter[Account] = Counter()

    def admit(self, key: AttemptKey) -> None:
        assert key not in self._live, f"{key} was admitted twice"
        self.admitted_total += 1
        self._live[key] = Account.RUNNING
        self.check()

    def move(self, key: AttemptKey, to: Account, reason: str = "") -> None:
        """One transition of one live attempt; `reason` for dropped and requeued."""
        state = self._live[key]
        assert to in _ALLOWED[state], f"{key} cannot go from {state} to {to}"
        if to in _LIVE:
            self._live[key] = to
        else:
            del self._live[key]
            self._ended[to] += 1
        if reason:
            self.reasons[f"{to}: {reason}"] += 1
        self.check()

    def totals(self) -> dict[str, int]:
        """`admitted_total` and the six states, under their metric names."""
        live = Counter(self._live.values())
        return {"admitted_total": self.admitted_total} | {state.value: live[state] + self._ended[state] for state in Account}

    def check(self) -> None:
        counted = len(self._live) + self._ended.total()
        assert self.admitted_total == counted, f"admitted {self.admitted_total}, accounted for {counted}"

    def state(self) -> LedgerState:
        return {
            "admitted_total": self.admitted_total,
            "live": [(*key, state) for key, state in self._live.items()],
            "ended": dict(self._ended),
            "reasons": dict(self.reasons),
        }

    def restore(self, state: LedgerState) -> None:
        self.admitted_total = state["admitted_total"]
        self._live = {AttemptKey(uid, epoch, attempt): account for uid, epoch, attempt, account in state["live"]}
        self._ended = Counter(state["ended"])
        self.reasons = Counter(state["reasons"])
        self.check()
