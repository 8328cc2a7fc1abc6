"""Which groups are not worth training, and when there are so many of them that the run should end.

DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): groups whose trajectories all have the same reward
are not trained. Their advantages would be 0 under every estimator that compares a response with its group.
Such a group is dropped when it finishes, which frees its place in the window: another prompt starts there,
under all rules of admission. The filter compares the task's reward (verl's `filter_groups.metric = "acc"`),
without the penalty of `algorithm.overlong_buffer_tokens`.

A resumed run counts from zero: what was wrong may have been mended.
"""

from __future__ import annotations

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.contracts.prompt_group import GroupResult
from asyncrl_cli.profile.arithmetic import LoopSettings

EQUAL_REWARDS = "equal rewards"
"""The ledger's reason for dropping such a group."""
_FROM_TRAJECTORIES = 64
"""`task.max_failed_ratio` is checked from this many trajectories on."""


class FailuresLimit:
    """`task.max_failed_ratio`."""

    def __init__(self, max_failed_ratio: float) -> None:
        self._most = max_failed_ratio
        self._trajectories = self._failed = 0
        self._last = ""

    def count(self, result: GroupResult) -> None:
        self._trajectories += len(result.trajectories) + len(result.failures)
        self._failed += len(result.failures)
        if result.failures:
            self._last = result.failures[-1].text

    def check(self) -> None:
        """Raises AsyncrlError if too many trajectories have failed."""
        if self._trajectories >= _FROM_TRAJECTORIES and self._failed > self._most * self._trajectories:
            raise AsyncrlError(
                f"{self._failed} of {self._trajectories} trajectories failed, more than "
                f"task.max_failed_ratio = {self._most} allows; the last one: {self._last}",
                hint="fix the reward, environment or agent (the run's log has every failure) and resume, or "
                "resume with a higher task.max_failed_ratio",
            )


class GroupFilter:
    """Judges finished groups. `rewards`: the common reward of each group dropped since the last train
    step."""

    def __init__(self, settings: LoopSettings) -> None:
        algorithm = settings.profile.algorithm
        self.is_on = algorithm.filter_groups
        self.rewards: list[float] = []
        self._num_batches = algorithm.max_num_gen_batches
        self._step_groups = settings.schedule.step_groups
        self._in_a_row, self._last = 0, 0.0

    def leaves_out(self, result: GroupResult) -> bool:
        """Whether the group should be dropped. Counts it if so."""
        rewards = {trajectory.reward for trajectory in result.trajectories}
        if not self.is_on or len(rewards) > 1:
            self._in_a_row = 0
            return False
        self._last = rewards.pop()
        self.rewards.append(self._last)
        self._in_a_row += 1
        return True

    def check(self) -> None:
        """Raises AsyncrlError if too many groups in a row were dropped."""
        if self._in_a_row > self._num_batches * self._step_groups:
            raise AsyncrlError(
                f"each of the last {self._in_a_row} groups had equal rewards (the last one: {self._last:g}), "
                f"more than algorithm.max_num_gen_batches = {self._num_batches} times R = "
                f"{self._step_groups}: nothing is left to train",
                hint="start a run with prompts that the model solves now and then (too easy and too hard "
                "ones give equal rewards) or a larger rollout.n, or resume with a higher "
                "algorithm.max_num_gen_batches",
            )
