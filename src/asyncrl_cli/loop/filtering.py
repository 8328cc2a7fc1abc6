"""DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): groups whose trajectories all have the same reward are not trained.

Their advantages would be 0 under every estimator that compares a response with its group. Such a group is dropped when it finishes,
which frees its place in the window: another prompt starts there, under all rules of admission. The filter compares the task's
reward (verl's `filter_groups.metric = "acc"`), without the penalty of `algorithm.overlong_buffer_tokens`.
"""

from __future__ import annotations

from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.loop.attempts import GroupResult
from asyncrl_cli.profile.arithmetic import LoopSettings

REASON = "equal rewards"
"""The ledger's reason for dropping such a group."""


class GroupFilter:
    """Judges finished groups. `rewards`: the common reward of each group dropped since the last `take_rewards`."""

    def __init__(self, settings: LoopSettings) -> None:
        algorithm = settings.profile.algorithm
        self.is_on = algorithm.filter_groups
        self.rewards: list[float] = []
        self._num_batches = algorithm.max_num_gen_batches
        self._step_groups = settings.schedule.step_groups
        self._in_a_row = 0

    def leaves_out(self, result: GroupResult) -> bool:
        """Whether the group should be dropped. Counts it if so."""
        rewards = {trajectory.reward for trajectory in result.trajectories}
        if not self.is_on or len(rewards) > 1:
            self._in_a_row = 0
            return False
        self.rewards.extend(rewards)
        self._in_a_row += 1
        return True

    def check(self) -> None:
        """Raises AsyncrlError if too many groups in a row were dropped. A resumed run counts from zero."""
        most = self._num_batches * self._step_groups
        if self._in_a_row > most:
            raise AsyncrlError(
                f"each of the last {self._in_a_row} groups had equal rewards (the last one: {self.rewards[-1]:g}), more than "
                f"algorithm.max_num_gen_batches = {self._num_batches} times R = {self._step_groups}: nothing is left to train",
                hint="choose prompts that the model solves now and then (too easy and too hard ones give equal rewards), or raise "
                "rollout.n or algorithm.max_num_gen_batches",
            )

    def take_rewards(self) -> tuple[float, ...]:
        """Return `rewards` and clear them."""
        taken, self.rewards = tuple(self.rewards), []
        return taken
