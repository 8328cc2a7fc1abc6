"""Training alone, in a child process: a trainer rank that makes train steps on one batch after another.

The batches are made up: the task's prompts, and responses of the lengths that were given. The learning rate is zero: the work is
the same, and however often a batch is trained, its numbers stay in range.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from asyncrl_cli.bench.children import CpuTime, Worked
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.loop.attempts import AttemptKey, GroupResult, TrajectoryMeta
from asyncrl_cli.samples import GroupPayload, Trajectory
from asyncrl_cli.train.balance import plan_train_step

if TYPE_CHECKING:
    from asyncrl_cli.bench.phases import Order

BATCHES = 2
"""Different ones, trained in turns."""


class TrainingAlone:
    """One rank. All ranks are asked for the same number of steps."""

    def __init__(self, rank: int, order: Order) -> None:
        from transformers import AutoTokenizer

        from asyncrl_cli.envs.rendering import render_prompts
        from asyncrl_cli.train.policy_trainer import PolicyTrainer

        side, profile = order.side, order.side.profile
        self._threads, self._window_steps = side.trainer.threads, profile.async_training.trigger_parameter_sync_step
        tokenizer = AutoTokenizer.from_pretrained(side.trainer.model_dir, trust_remote_code=profile.model.trust_remote_code)
        prompts = render_prompts(tokenizer, order.items)
        self._batches = []
        for batch in range(BATCHES):
            numbers = range(batch * side.step_groups, (batch + 1) * side.step_groups)
            groups = [made_up_group(order, number, prompts[number % len(prompts)]) for number in numbers]
            plans = plan_train_step(
                [result for result, _ in groups],
                ranks=side.trainer.workers,
                num_minibatches=profile.async_training.require_batches,
                normalize=profile.algorithm.normalize_advantages,
            )
            self._batches.append((plans[rank], [payload for _, payload in groups]))
        self._trainer = PolicyTrainer(
            profile, side.trainer, rank=rank, init_method=f"file://{order.meeting}", total_optimizer_steps=1
        )
        self._step = 0

    def measure(self, num_steps: int) -> Worked:
        """Make `num_steps` train steps; seconds until the slowest rank has ended the last one."""
        from asyncrl_cli.train.policy_trainer import RankBatch

        began_s, cpu, tokens = time.perf_counter(), CpuTime(self._threads), 0
        for _ in range(num_steps):
            plan, groups = self._batches[self._step % BATCHES]
            payloads = {group: groups[group] for group in plan.groups}
            step_in_window = self._step % self._window_steps
            self._step += 1
            report = self._trainer.train(RankBatch(step=self._step, step_in_window=step_in_window, plan=plan, payloads=payloads))
            tokens += report.tokens
        return Worked(tokens=tokens, seconds=time.perf_counter() - began_s, cpu_s=cpu.spent_s())


def made_up_group(order: Order, number: int, prompt: list[int]) -> tuple[GroupResult, GroupPayload]:
    """Responses repeat their prompt's tokens; half of them are right."""
    from asyncrl_cli.envs.episode import segment_of

    n, metas, trajectories = order.side.profile.rollout.n, [], []
    for response in range(n):
        length, reward = order.length(number * n + response), float(response % 2)
        tokens = np.resize(prompt, length).tolist()
        completion = Completion(tokens=tokens, logprobs=[-1.0] * length, versions=[0] * length, finish_reason="length")
        trajectories.append(Trajectory(segments=(segment_of(prompt, completion),), reward=reward, finish_reason="length"))
        metas.append(
            TrajectoryMeta(
                prompt_tokens=len(prompt),
                response_tokens=length,
                reward=reward,
                finish_reason="length",
                version_tokens=((0, length),),
            )
        )
    key = AttemptKey(str(number), 0, 0)
    result = GroupResult(key=key, trajectories=tuple(metas), failures=(), failed_tokens=0, payload=None)
    return result, GroupPayload(uid=key.uid, epoch=0, attempt=0, trajectories=tuple(trajectories))
