"""The critic, and the advantages that need its values or a KL penalty per token.

The critic is a transformer with a linear head, which predicts for each sampled token the reward that is
still to come. For the sampled tokens t = 1 .. T of a trajectory, all its segments end to end, with mu the
sampler, V the critic's values at the train step's start and V_new those of the critic in training:

    penalty_t    kl_coef * KL estimate of log ref - log mu at t, if `use_kl_in_reward`, else 0 (kl_coef may
                 change: kl_coefficient.py)
    gae          r_t = - penalty_t, plus the trajectory's reward at t = T
                 delta_t = r_t + gamma V_t+1 - V_t  with V_T+1 = 0
                 A_t = delta_t + gamma lambda A_t+1,  return R_t = A_t + V_t
                 normalized: (A - mean) / sqrt(variance + 1e-8), over the sampled tokens of the optimizer step
    extended gae the same for responses that a limit has cut off, with `bootstrap_truncated`: without the
                 reward, and with V_T+1 = V_T. They are left out of the critic's loss
    others       step_plan.py, on the reward minus the sum of the trajectory's penalties
    loss         max((V_new - R)^2, (clip(V_new, V - c, V + c) - R)^2) / 2  with c = critic.cliprange_value

The loss is aggregated like the policy's (`algorithm.loss_agg_mode`). The head starts at zero, so the first
advantages are the returns.

Sources: Schulman et al. 2016 (arXiv:1506.02438), equations 11 and 16, for GAE; Ouyang et al. 2022
(arXiv:2203.02155), section 3.5, for the penalty; Fan et al. 2025, T-PPO (arXiv:2506.15050), section 3, for
the extended GAE; Schulman et al. 2017 (arXiv:1707.06347), section 5, for the loss, whose clip is that of
OpenAI's baselines, as in verl.

What it is not: the critic shares no layer with the policy, and the value of a state depends only on the
tokens before a sampled token. Without `bootstrap_truncated`, responses that a limit has cut off count as
ended: no reward is expected after them. Values and advantages step from one sampled token to the next, and
skip the tokens of tools between them.

Legend: F = sampled tokens of a rank's share of an optimizer step, trajectory by trajectory; P = its
trajectories.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl_cli.contracts.prompt_group import TrainReport
from asyncrl_cli.data.trajectories import GroupPayload
from asyncrl_cli.measure.values import Ratio, Value
from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.train.batch import (
    ADVANTAGES,
    FINISHED,
    PENALTIES,
    REF,
    RETURNS,
    VALUES,
    Microbatch,
    StepBatch,
)
from asyncrl_cli.train.kl_coefficient import KlCoefficient
from asyncrl_cli.train.losses import Metric, mean_of, sum_of
from asyncrl_cli.train.optimizer import (
    PolicyOptimizer,
    StepResult,
    aggregated,
    finite,
    reduced,
    step_metrics,
    take_sum,
)
from asyncrl_cli.train.packed_rows import Divide
from asyncrl_cli.train.policy_loss import kl_of
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.sharded_model import ShardedModel
from asyncrl_cli.train.step_plan import RankPlan, advantages_of
from asyncrl_cli.train.trainer_state import (
    CRITIC,
    CriticCounters,
    HostState,
    SavedState,
    restore,
    to_host,
    write_state,
)

VARIANCE_EPSILON = 1e-8
RETURN_SUMS = ("tokens", "returns", "squared returns", "errors", "squared errors")
"""`critic/explained_variance` is computed from these sums; they are not metrics themselves."""
Floats = NDArray[np.float64]


class ValueModel(torch.nn.Module):
    """A language model's transformer with a value head instead of the language model's head."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: PreTrainedModel = getattr(model, model.base_model_prefix)
        self.head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, microbatch: Microbatch, divide: Divide) -> torch.Tensor:
        share = divide(microbatch)
        hidden_BTH = self.model(**share.inputs, use_cache=False).last_hidden_state
        hidden_NH = hidden_BTH.flatten(0, 1).index_select(0, share.select_n)
        return share.joined(self.head(hidden_NH).sum(-1).float(), len(microbatch.targets_N))


class Critic(ShardedModel[ValueModel]):
    """One rank's part of the critic, with its optimizer. A token's number is the value of the state it was
    sampled in."""

    def __init__(
        self, profile: Profile, place: ProcessPlace, ranks: Ranks, *, total_optimizer_steps: int
    ) -> None:
        super().__init__(profile, place.critic_dir or place.model_dir, ranks)
        keys = {"lr": profile.critic.lr or profile.trainer.lr, "grad_clip": profile.critic.grad_clip}
        section = profile.trainer.model_copy(update=keys)
        self.optimizer = PolicyOptimizer(
            section, ranks, self.parameters, total_optimizer_steps=total_optimizer_steps
        )

    def make_content(self, model: PreTrainedModel) -> ValueModel:
        return ValueModel(model)

    def traced_N(self, microbatch: Microbatch) -> torch.Tensor:
        return self.gathered(lambda: self.content.forward(microbatch, self.divide))

    def state_parameters(self) -> dict[str, DTensor]:
        """Its parameters by their names in the trainer's state."""
        return {f"{CRITIC}{name}": parameter for name, parameter in self.parameters.items()}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's live shards of weights and moments, by `<kind>/<parameter>`."""
        weights = {f"weight/{name}": local for name, local in self.locals().items()}
        tensors = weights | self.optimizer.moments()
        return {key.replace("/", f"/{CRITIC}", 1): local for key, local in tensors.items()}

    def update(self, batches: Sequence[StepBatch]) -> tuple[dict[str, Value], int]:
        """Run a train step's optimizer steps, on microbatches with the columns of values and returns. A
        collective. Returns its metrics, and how many steps were skipped because their gradient was not
        finite."""
        seen, results = list[dict[str, Metric]](), list[StepResult]()
        for batch in [*batches] * self.profile.trainer.ppo_epochs:
            for microbatch in batch.microbatches:
                self.gathered.before_backward(is_last=microbatch is batch.microbatches[-1])
                old_N, returns_N = microbatch.columns[VALUES], microbatch.columns[RETURNS]
                values_N = self.traced_N(microbatch)
                clip = self.profile.critic.cliprange_value
                loss_N, is_clipped_N = value_loss(values_N, old_N, returns_N, clip)
                finished_N = microbatch.columns.get(FINISHED, torch.ones_like(old_N))
                loss = aggregated(loss_N * finished_N, microbatch, batch.plan, self.profile)
                (loss * self.ranks.world_size).backward()  # as in policy_trainer.py
                errors_N = returns_N - old_N
                sums = (torch.ones_like(old_N), returns_N, returns_N.square(), errors_N, errors_N.square())
                sums = tuple(sum_N * finished_N for sum_N in sums)
                seen.append(
                    {
                        "critic/loss": sum_of(loss),
                        "critic/clipped_ratio": mean_of(is_clipped_N),
                        "critic/value_mean": mean_of(old_N),
                        "critic/return_mean": mean_of(returns_N),
                        **{n: sum_of(sum_N.double()) for n, sum_N in zip(RETURN_SUMS, sums, strict=True)},
                    }
                )
            results.append(self.optimizer.step())
        metrics = step_metrics("critic", self.ranks, seen, results)
        num_tokens, total, squares, error, squared_error = (take_sum(metrics, name) for name in RETURN_SUMS)
        # each n times a variance: of the returns, and of what the values leave unexplained
        spread = squares - total * total / max(num_tokens, 1.0)
        unexplained = squared_error - error * error / max(num_tokens, 1.0)
        metrics["critic/explained_variance"] = Ratio(spread - unexplained, spread)
        return metrics, sum(result.is_skipped for result in results)


class CriticApart(Critic):
    """A critic with processes of its own: one object per process. All of them make the same calls in the same
    order.

        score(...)                  values of finished groups, from the weights after the last `learn`
        learn(...)                  the critic's optimizer steps of one train step, on the trainer's values
        snapshot / write / restore  the critic's part of a checkpoint

    It learns what a critic inside the trainer would: the plan, the columns and the returns are the same.
    `write` may run in any thread; the other calls belong to one thread.
    """

    def __init__(self, profile: Profile, place: ProcessPlace, ranks: Ranks) -> None:
        super().__init__(profile, place, ranks, total_optimizer_steps=Schedule.of(profile).optimizer_steps)
        self._kl = KlCoefficient(profile.algorithm)
        self._snapshots: dict[int, tuple[HostState, CriticCounters]] = {}

    def learn(
        self, plan: RankPlan, payloads: Mapping[int, GroupPayload], columns: Sequence[str]
    ) -> TrainReport:
        """Run a train step's optimizer steps. A collective. `columns`: the values, and whatever else the
        returns need."""
        began_s = time.monotonic()
        batches = self.step_batches(plan, payloads, columns)
        credit(batches, self.profile.algorithm, self._kl, self.ranks)
        metrics, skipped = self.update(batches)
        self.ranks.synchronize()
        return TrainReport(
            train_s=time.monotonic() - began_s,
            tokens=sum(step.num_loss_tokens for step in plan.optimizer_steps),
            metrics=finite(metrics),
            skipped_steps=skipped,
            skipped_in_a_row=self.optimizer.skipped_in_a_row,
        )

    def snapshot(self, step: int) -> None:
        """Copy this process's shards to the host under the name `step`."""
        counters = CriticCounters(
            schema_version=1, processes=self.ranks.world_size, critic_steps=self.optimizer.steps_made
        )
        self._snapshots[step] = (to_host(self.state_parameters(), self.state_tensors()), counters)

    def write(self, step: int, directory: Path) -> None:
        """Write the snapshot of `step` beside the trainer's files, and forget it."""
        write_state(self.ranks.rank, *self._snapshots.pop(step), directory, is_critics=True)

    def restore(self, directory: Path) -> None:
        """Restore weights, moments and counter, written by a critic or a trainer. RefusedError if none fit
        this critic."""
        saved = SavedState(directory)
        restore(self.state_parameters(), self.state_tensors(), saved)
        self.optimizer.restore_steps(saved.critic_steps)
        self._kl.value = saved.counters.get("kl_coef", self._kl.value)


def value_loss(
    values_N: torch.Tensor, old_N: torch.Tensor, returns_N: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's loss, and whether the clipped term was the larger one."""
    clipped_N = torch.maximum(torch.minimum(values_N, old_N + clip), old_N - clip)
    plain_N, cut_N = (values_N - returns_N).square(), (clipped_N - returns_N).square()
    return torch.maximum(plain_N, cut_N) / 2, cut_N > plain_N


def credit(
    batches: Sequence[StepBatch], algorithm: AlgorithmSection, kl: KlCoefficient, ranks: Ranks
) -> dict[str, Value]:
    """Add the column of advantages to the microbatches of a train step, and with `gae` also that of returns.
    A collective. If there is a penalty, updates `kl` and returns metrics: `reward/kl_penalty`, the mean over
    trajectories, and `reward/kl`, the mean over tokens without its weight."""
    seen = list[dict[str, Metric]]()
    for batch in batches:
        ends_P = np.cumsum(batch.counts_P, dtype=np.int64)
        penalties_F = np.zeros(sum(batch.counts_P))
        rewards, planned = batch.plan.rewards, batch.plan.trajectories
        if algorithm.use_kl_in_reward:
            for microbatch in batch.microbatches:
                kl_N = kl_of(algorithm.kl_penalty, microbatch.columns[REF] - microbatch.logp_mu_N)
                microbatch.columns[PENALTIES] = kl_N
            kl_F = _on_host(batch.column(PENALTIES))
            penalties_F = kl.value * kl_F
        # Differences of a running sum, because a rank may have no trajectory.
        sums_P = np.diff(np.concatenate([[0.0], np.cumsum(penalties_F)])[np.concatenate([[0], ends_P])])
        if algorithm.has_critic:
            rewards_F, values_F = -penalties_F, _on_host(batch.column(VALUES))
            ended = [0.0 if one.is_unfinished else rewards[one.group][one.trajectory] for one in planned]
            rewards_F[ends_P - 1] += ended
            unfinished_P = np.array([one.is_unfinished for one in planned], dtype=bool)
            advantages_F = gae(rewards_F, values_F, ends_P, algorithm.gamma, algorithm.lam, unfinished_P)
            if algorithm.bootstrap_truncated:
                batch.set_column(FINISHED, _to_device(np.repeat(~unfinished_P, batch.counts_P), ranks))
            batch.set_column(RETURNS, _to_device(advantages_F + values_F, ranks))
            if algorithm.normalize_advantages:
                number, total = _summed([len(advantages_F), advantages_F.sum()], ranks)
                advantages_F = advantages_F - total / max(number, 1.0)
                (squares,) = _summed([np.square(advantages_F).sum()], ranks)
                advantages_F = advantages_F / np.sqrt(squares / max(number - 1.0, 1.0) + VARIANCE_EPSILON)
        else:
            # From the rewards and penalties of all ranks: a group's trajectories may be on several.
            everything = [(group, index) for group, row in rewards.items() for index in range(len(row))]
            indices = {key: index for index, key in enumerate(everything)}
            mine = [indices[one.group, one.trajectory] for one in planned]
            penalties = np.zeros(len(everything))
            penalties[mine] = sums_P
            left = iter(_summed(penalties, ranks))
            penalized = [[reward - next(left) for reward in row] for row in rewards.values()]
            advantages_P = np.concatenate(advantages_of(penalized, algorithm))[mine]
            advantages_F = np.repeat(advantages_P, batch.counts_P)
        batch.set_column(ADVANTAGES, _to_device(advantages_F, ranks))
        if algorithm.use_kl_in_reward:
            means = {"reward/kl_penalty": sums_P, "reward/kl": kl_F}
            seen.append({name: mean_of(_to_device(values, ranks)) for name, values in means.items()})
    metrics = reduced(ranks, seen)
    if seen:
        kl.update(metrics, sum(batch.plan.num_trajectories for batch in batches))
    return metrics


def gae(
    rewards_F: Floats,
    values_F: Floats,
    ends_P: NDArray[np.int64],
    gamma: float,
    lam: float,
    unfinished_P: NDArray[np.bool_] | bool = False,
) -> Floats:
    """Advantages of trajectories laid end to end, of at least one token each; trajectory p ends before index
    `ends_P[p]`. After an unfinished one, the critic's last value stands for what would have followed."""
    is_last_F = np.zeros(len(rewards_F), dtype=bool)
    is_last_F[ends_P - 1] = True
    following_F = np.append(values_F[1:], 0.0)
    following_F[ends_P - 1] = np.where(unfinished_P, values_F[ends_P - 1], 0.0)
    deltas = (rewards_F + gamma * following_F - values_F)[::-1].tolist()
    decays = np.where(is_last_F, 0.0, gamma * lam)[::-1].tolist()
    backwards = accumulate(
        zip(deltas, decays, strict=True), lambda later, now: now[0] + now[1] * later, initial=0.0
    )
    return np.array(list(backwards)[:0:-1])


def _summed(values: Sequence[float] | Floats, ranks: Ranks) -> list[float]:
    sums: list[float] = ranks.sum(torch.tensor(values, dtype=torch.float64, device=ranks.device)).tolist()
    return sums


def _on_host(values_F: torch.Tensor) -> Floats:
    on_host_F: Floats = values_F.double().cpu().numpy()
    return on_host_F


def _to_device(values: Floats, ranks: Ranks) -> torch.Tensor:
    return torch.from_numpy(values).float().to(ranks.device)
