"""Whether weights travel fast, after docs/admission.md ("short"): counted anew from all arrivals each time it
is asked."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl_cli.contracts.prompt_group import PartKey


class TravelBook:
    def __init__(self, num_workers: int) -> None:
        self._weight = 0.8 ** (1 / num_workers)  # of an arrival, relative to the next one
        self._ran_before: dict[str, dict[PartKey, int]] = {}
        self._arrivals: list[tuple[int, int]] = []
        """For each version that arrived at a worker: responses that ran there when it set out, and how many
        have ended since."""

    @property
    def is_short(self) -> bool:
        ran, ended = 0.0, 0.0
        for of_ran, of_ended in self._arrivals:
            ran, ended = ran * self._weight + of_ran, ended * self._weight + of_ended
        return not self._arrivals or ended < ran / 2

    def set_out(self, worker: str, unfinished: Mapping[PartKey, int]) -> None:
        """A version is made, or asked for, that is on its way to a worker from now on, unless one is
        already."""
        self._ran_before.setdefault(worker, dict(unfinished))

    def arrived(self, worker: str, unfinished: Mapping[PartKey, int]) -> None:
        if worker in self._ran_before:
            before = self._ran_before.pop(worker)
            ended = [count - min(count, unfinished.get(key, 0)) for key, count in before.items()]
            self._arrivals.append((sum(before.values()), sum(ended)))

    def lost(self, worker: str) -> None:
        self._ran_before.pop(worker, None)
