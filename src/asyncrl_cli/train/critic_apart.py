"""The critic with processes of its own: one object per process. All of them make the same calls in the same order.

    score(...)                  values of finished groups, by the weights that the last `learn` has left
    learn(...)                  its optimizer steps of one train step, on the values that the trainer has, too
    snapshot / write / restore  its part of a checkpoint

It learns what the trainer's own critic would: from the same plan, the same columns, the same returns (credit.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl_cli.loop.ports import TrainReport
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Place, Profile
from asyncrl_cli.samples import GroupPayload
from asyncrl_cli.train.balance import RankPlan
from asyncrl_cli.train.credit import credited
from asyncrl_cli.train.critic import Critic
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.reduction import finite
from asyncrl_cli.train.scores import VALUES, Scores, score, step_microbatches
from asyncrl_cli.train.trainer_state import HostState, SavedState, restore, to_host, write_critic


class CriticApart:
    """`score`, `learn`, `snapshot` and `restore` belong to one thread, `write` to any. OSError or ValueError, from transformers, if
    the critic's directory holds no model."""

    def __init__(self, profile: Profile, place: Place, ranks: Ranks) -> None:
        self._profile, self._ranks = profile, ranks
        total = Schedule.of(profile).optimizer_steps
        self._critic = Critic(profile, place.critic_dir or place.model_dir, ranks, total_optimizer_steps=total)
        max_tokens, are_packed = profile.trainer.max_tokens_per_microbatch, self._critic.is_packed
        self._cut: dict[str, Any] = {"max_tokens": max_tokens, "ranks": ranks, "are_packed": are_packed}
        self._snapshots: dict[int, tuple[HostState, int]] = {}

    def score(self, groups: Sequence[GroupPayload], items: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Each group's column. A collective; every process may have groups of its own, or none."""
        payloads = dict(enumerate(groups))
        column = score(VALUES, self._critic.values_N, payloads, **self._cut)
        return list(column.values())

    def learn(self, plan: RankPlan, payloads: Mapping[int, GroupPayload], scores: Scores) -> TrainReport:
        """The optimizer steps of a train step. A collective. `scores`: values, and what the returns need besides."""
        began_s, steps = time.monotonic(), plan.optimizer_steps
        work = step_microbatches(steps, payloads, scores, window=plan.window, **self._cut)
        credited(steps, work, payloads, algorithm=self._profile.algorithm, ranks=self._ranks)
        metrics, skipped = self._critic.learn(steps, work)
        self._ranks.synchronize()
        return TrainReport(
            train_s=time.monotonic() - began_s,
            tokens=sum(step.num_loss_tokens for step in steps),
            metrics=finite(metrics),
            skipped_steps=skipped,
            skipped_in_a_row=self._critic.optimizer.skipped_in_a_row,
        )

    def snapshot(self, step: int) -> None:
        """Copy this process's shards to the host under the name `step`."""
        state = to_host(self._critic.state_parameters(), self._critic.state_tensors())
        self._snapshots[step] = (state, self._critic.optimizer.steps_made)

    def write(self, step: int, directory: Path) -> None:
        """Write the snapshot of `step` beside the trainer's files, and forget it."""
        state, critic_steps = self._snapshots.pop(step)
        write_critic(self._ranks, state, critic_steps, directory)

    def restore(self, directory: Path) -> None:
        """Restore weights, moments and counter, whoever has written them. RefusedError if the directory has none of this critic."""
        saved = SavedState(directory)
        restore(self._critic.state_parameters(), self._critic.state_tensors(), saved)
        self._critic.optimizer.restore_steps(saved.critic_steps)
