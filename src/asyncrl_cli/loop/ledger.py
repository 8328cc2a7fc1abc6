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
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from asyncrl_cli.loop.ports import AttemptKey


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

    def state(self) -> dict[str, Any]:
        return {
            "admitted_total": self.admitted_total,
            "live": [[*key, state.value] for key, state in self._live.items()],
            "ended": {state.value: count for state, count in self._ended.items()},
            "reasons": dict(self.reasons),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.admitted_total = state["admitted_total"]
        self._live = {AttemptKey(uid, epoch, attempt): Account(name) for uid, epoch, attempt, name in state["live"]}
        self._ended = Counter({Account(name): count for name, count in state["ended"].items()})
        self.reasons = Counter(state["reasons"])
        self.check()
