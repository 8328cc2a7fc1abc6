"""The limits that end a run whose groups are not worth training, counted again: `task.max_failed_ratio` and
`algorithm.max_num_gen_batches`."""

from __future__ import annotations

from asyncrl_cli.profile.arithmetic import LoopSettings

RATIO, BATCHES = "task.max_failed_ratio", "algorithm.max_num_gen_batches"
FROM_TRAJECTORIES = 64


class LimitsBook:
    """`seen`: the limits that have been exceeded at some time. A resumed run counts from zero."""

    def __init__(self, settings: LoopSettings) -> None:
        self.seen: set[str] = set()
        self._settings = settings
        self._trajectories = self._failed = self._in_a_row = 0

    def exceeded(self) -> list[str]:
        """The limits that are exceeded now."""
        settings, most = self._settings, self._settings.profile.task.max_failed_ratio
        too_many = self._trajectories >= FROM_TRAJECTORIES and self._failed / self._trajectories > most
        in_a_row = (
            self._in_a_row / settings.schedule.step_groups > settings.profile.algorithm.max_num_gen_batches
        )
        return [name for name, is_over in ((RATIO, too_many), (BATCHES, in_a_row)) if is_over]

    def group_ended(self, num_failed: int) -> None:
        """Every response of a group has come back."""
        self._trajectories += self._settings.profile.rollout.n
        self._failed += num_failed
        self.seen.update(self.exceeded())

    def judged(self, *, is_equal: bool) -> None:
        """The rewards of a group are known."""
        self._in_a_row = self._in_a_row + 1 if is_equal else 0
        self.seen.update(self.exceeded())
