"""Faults that a simulated run meets, from a seed: each happens at most once, and is counted when it really has.

`Faults` outlives a world: a fault that has happened does not happen again in the resumed run, as with a machine that was replaced.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What may go wrong. The first two happen at a time (`at_s`), the others to an executor's `nth` such call (from 1)."""

    WORKER_DIES = "worker dies"
    """Its calls fail, pending and later ones."""
    WORKER_HANGS = "worker hangs"
    """Its calls never return; their time limits end them."""
    SLOW_LOAD = "slow load"
    """A load takes `seconds` more."""
    LATE_PREFETCH = "late prefetch"
    """A transfer takes `seconds` more, so that this worker lags behind the others."""
    LOST_PREFETCH = "lost prefetch"
    """A transfer fails."""
    REPEATED_PREFETCH = "repeated prefetch"
    """A transfer arrives a second time, `seconds` later."""
    REWARD_RAISES = "reward raises"
    """The reward of one trajectory of a group raises."""
    STEP_FAILS = "train step fails"
    """The trainer fails in the `nth` train step of the run."""


FATAL = frozenset({FaultKind.WORKER_DIES, FaultKind.WORKER_HANGS, FaultKind.LOST_PREFETCH, FaultKind.STEP_FAILS})
"""Faults that fail a run: with the executor's own error, after a checkpoint if the trainer is whole. Where restarts are allowed, a
worker's are mended by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`at_s` on the run's clock, or the `nth` call; `seconds` for kinds that take time."""

    kind: FaultKind
    executor: str
    at_s: float = 0.0
    nth: int = 0
    seconds: float = 0.0


class Faults:
    """What is still to happen, and (`happened`) what has."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.pending: list[Fault] = list(faults)
        self.happened: Counter[FaultKind] = Counter()

    def at(self, executor: str) -> list[Fault]:
        """Those with a time; call `happens` when it has come."""
        timed = (FaultKind.WORKER_DIES, FaultKind.WORKER_HANGS)
        return [fault for fault in self.pending if fault.executor == executor and fault.kind in timed]

    def of_call(self, kind: FaultKind, executor: str, nth: int) -> Fault | None:
        """The fault that the executor's nth call meets, if any: it has happened then."""
        for fault in self.pending:
            if (fault.kind, fault.executor, fault.nth) == (kind, executor, nth):
                self.happens(fault)
                return fault
        return None

    def happens(self, fault: Fault) -> None:
        self.pending.remove(fault)
        self.happened[fault.kind] += 1


def draw_faults(
    seed: int, *, workers: Sequence[str], trainer: str = "trainer-0", until_s: float, loads: int, groups: int, steps: int
) -> Faults:
    """One fatal fault in half of the seeds, and up to three harmless ones of each kind.

    `until_s`, `loads` and `groups` (per worker) and `steps` say how long the run is expected to be: later faults never happen.
    """
    rng = random.Random(f"faults/{seed}")
    lengths = {
        FaultKind.SLOW_LOAD: loads,
        FaultKind.LATE_PREFETCH: loads,
        FaultKind.REPEATED_PREFETCH: loads,
        FaultKind.REWARD_RAISES: groups,
    }
    drawn = [
        Fault(kind=kind, executor=rng.choice(workers), nth=rng.randint(1, max(1, length)), seconds=rng.random() * until_s / 10)
        for kind, length in lengths.items()
        for _ in range(rng.randint(0, 3))
    ]
    if rng.random() < 0.5:
        kind = rng.choice(sorted(FATAL))
        nth = rng.randint(1, max(1, steps if kind is FaultKind.STEP_FAILS else loads))
        executor = trainer if kind is FaultKind.STEP_FAILS else rng.choice(workers)
        drawn.append(Fault(kind=kind, executor=executor, at_s=rng.random() * until_s, nth=nth))
    return Faults(drawn)


def draw_worker_faults(rng: random.Random, *, workers: Sequence[str], at_most: int, until_s: float, loads: int) -> list[Fault]:
    """Up to `at_most` fatal faults of each worker: what `max_restarts` of as many is for."""
    kinds = (FaultKind.WORKER_DIES, FaultKind.WORKER_DIES, FaultKind.WORKER_HANGS, FaultKind.LOST_PREFETCH)
    return [
        Fault(kind=rng.choice(kinds), executor=worker, at_s=rng.random() * until_s, nth=rng.randint(1, max(1, loads)))
        for worker in workers
        for _ in range(rng.randint(0, at_most))
    ]
