"""Training alone, in a child process: a trainer rank that makes train steps on one batch after another.

The learning rate is zero: the work is the same, and however often a batch is trained, its numbers stay in range.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl_cli.bench.phase_processes import Barrier, CpuTime
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import Profile

if TYPE_CHECKING:
    from asyncrl_cli.loop.ports import GroupResult
    from asyncrl_cli.samples.trajectory import GroupPayload
    from asyncrl_cli.train.balance import RankPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOrder:
    """What the ranks train: `batches`, each the groups of one train step of `num_minibatches` optimizer steps."""

    profile: Profile
    place: Place
    init_method: str
    batches: Sequence[Sequence[GroupPayload]]
    num_minibatches: int
    normalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Sampled tokens trained by all ranks together (`TrainReport.tokens`) in `seconds`; `cpu_s` are this rank's (`CpuTime`)."""

    tokens: int
    seconds: float
    cpu_s: float


def make_training(index: int, argument: tuple[TrainingOrder, Barrier]) -> TrainingPhase:
    """Called in the child; the ranks meet here."""
    return TrainingPhase(index, argument[0])


class TrainingPhase:
    """One rank. All ranks are asked for the same number of steps."""

    def __init__(self, rank: int, order: TrainingOrder) -> None:
        from asyncrl_cli.train.balance import plan_train_step
        from asyncrl_cli.train.policy_trainer import PolicyTrainer

        self._order = order
        self._plans: list[RankPlan] = [
            plan_train_step(
                [_result_of(group) for group in batch],
                ranks=order.place.workers,
                num_minibatches=order.num_minibatches,
                normalize=order.normalize,
            )[rank]
            for batch in order.batches
        ]
        self._trainer = PolicyTrainer(order.profile, order.place, rank=rank, init_method=order.init_method, total_optimizer_steps=1)
        self._step = 0

    def measure(self, num_steps: int) -> Trained:
        """Make `num_steps` train steps; seconds until the slowest rank has ended the last one."""
        from asyncrl_cli.train.policy_trainer import RankBatch

        window_steps = self._order.profile.async_training.trigger_parameter_sync_step
        began_s, cpu, tokens = time.perf_counter(), CpuTime(self._order.place.threads), 0
        for _ in range(num_steps):
            index = self._step % len(self._plans)
            plan, groups = self._plans[index], self._order.batches[index]
            payloads = {group: groups[group] for group in plan.groups}
            step_in_window = self._step % window_steps
            self._step += 1
            report = self._trainer.train(RankBatch(step=self._step, step_in_window=step_in_window, plan=plan, payloads=payloads))
            tokens += report.tokens
        return Trained(tokens=tokens, seconds=time.perf_counter() - began_s, cpu_s=cpu.spent_s())

    def close(self) -> None:
        self._trainer.close()


def _result_of(payload: GroupPayload) -> GroupResult:
    """The metadata that a rollout worker would have sent along."""
    from asyncrl_cli.loop.ports import AttemptKey, GroupResult, TrajectoryMeta

    metas = []
    for trajectory in payload.trajectories:
        num_tokens = sum(len(segment.tokens_T) for segment in trajectory.segments)
        num_sampled = sum(int(segment.mask_T.sum()) for segment in trajectory.segments)
        metas.append(
            TrajectoryMeta(
                prompt_tokens=num_tokens - num_sampled,
                response_tokens=num_sampled,
                reward=trajectory.reward,
                finish_reason=trajectory.finish_reason,
                version_tokens=((0, num_sampled),),
            )
        )
    key = AttemptKey(payload.uid, payload.epoch, payload.attempt)
    return GroupResult(key=key, trajectories=tuple(metas), failures=(), failed_tokens=0, payload=None)
