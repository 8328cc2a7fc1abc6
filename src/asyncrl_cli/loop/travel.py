"""How long new weights are on their way to the workers, in the one unit that admission knows: responses that end meanwhile.

    version rises, or the worker turns to it ──set_out──> published, sent (the worker generates on) ──arrived──> loaded

`set_out` keeps what runs on the worker, `arrived` counts how much of it has ended since. A travel is short if fewer than half of
the responses that ran at its beginning have ended; all loads count together, with less weight the older they are.

Worked example: two workers have 4 and 6 responses running when version 3 sets out for them; by its arrival 1 and 2 have ended, 3 of
10: the travel is short. Had nothing run at all it would not be: responses that all end within a window need no slack.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl_cli.loop.attempts import PartKey

_KEPT = 0.8
"""What the counts of all workers' last loads weigh once every worker has had one more."""


class Travel:
    def __init__(self, num_workers: int) -> None:
        self._kept = _KEPT ** (1 / num_workers)
        self._ran_before: dict[str, dict[PartKey, int]] = {}
        self._ran = self._ended = 0.0
        self.is_short = True
        """Whether weights arrive before half of the responses that run have ended. Before the first arrival nobody knows."""

    def set_out(self, worker: str, unfinished: Mapping[PartKey, int]) -> None:
        """A version sets out for the worker, if none is on its way there already."""
        if worker not in self._ran_before:
            self._ran_before[worker] = dict(unfinished)

    def arrived(self, worker: str, unfinished: Mapping[PartKey, int]) -> None:
        """The version has arrived, if one had set out. Responses that began meanwhile do not count."""
        before = self._ran_before.pop(worker, None)
        if before is None:
            return
        ran = sum(before.values())
        ended = ran - sum(min(count, unfinished.get(key, 0)) for key, count in before.items())
        self._ran = self._ran * self._kept + ran
        self._ended = self._ended * self._kept + ended
        self.is_short = self._ended < self._ran / 2

    def lost(self, worker: str) -> None:
        """The worker's process is gone, and with it the version on its way there."""
        self._ran_before.pop(worker, None)
