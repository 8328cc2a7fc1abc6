"""The critic: a transformer with a linear head, which predicts for each sampled token the reward that is
still to come.

With V the critic in training, V_old its value at the train step's start and R the return (credit.py), per
token

    loss = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2,  c = critic.cliprange_value

aggregated like the policy's loss (`algorithm.loss_agg_mode`). The head starts at zero, so the first
advantages are the returns.

Sources: Schulman et al. 2017 (arXiv:1707.06347), section 5; the clip is that of OpenAI's baselines, as in
verl.

What it is not: it shares no layer with the policy. The value of a state depends on the tokens before a
sampled token only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl_cli.contracts.train_step import TrainReport
from asyncrl_cli.contracts.trajectories import GroupPayload
from asyncrl_cli.measure.values import Ratio, Value
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.train.batch import RETURNS, VALUES, Columns, Microbatch, StepBatch, step_batches
from asyncrl_cli.train.credit import credit
from asyncrl_cli.train.losses import Metric, mean_of, sum_of
from asyncrl_cli.train.optimizer import (
    PolicyOptimizer,
    StepResult,
    aggregated,
    finite,
    step_metrics,
    take_sum,
)
from asyncrl_cli.train.packed_rows import Divide
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.sharded_model import ShardedModel
from asyncrl_cli.train.step_plan import RankPlan
from asyncrl_cli.train.trainer_state import (
    CRITIC,
    CriticCounters,
    HostState,
    SavedState,
    restore,
    to_host,
    write_state,
)

RETURN_SUMS = ("tokens", "returns", "squared returns", "errors", "squared errors")
"""`critic/explained_variance` is computed from these sums; they are not metrics themselves."""


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
        for batch in batches:
            for microbatch in batch.microbatches:
                self.gathered.before_backward(is_last=microbatch is batch.microbatches[-1])
                old_N, returns_N = microbatch.columns[VALUES], microbatch.columns[RETURNS]
                values_N = self.traced_N(microbatch)
                clip = self.profile.critic.cliprange_value
                loss_N, is_clipped_N = value_loss(values_N, old_N, returns_N, clip)
                loss = aggregated(loss_N, microbatch, batch.plan, self.profile)
                (loss * self.ranks.world_size).backward()  # as in policy_trainer.py
                errors_N = returns_N - old_N
                sums = (torch.ones_like(old_N), returns_N, returns_N.square(), errors_N, errors_N.square())
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

    It learns what a critic inside the trainer would: the plan, the columns and the returns (credit.py) are
    the same. `write` may run in any thread; the other calls belong to one thread.
    """

    def __init__(self, profile: Profile, place: ProcessPlace, ranks: Ranks) -> None:
        super().__init__(profile, place, ranks, total_optimizer_steps=Schedule.of(profile).optimizer_steps)
        self._snapshots: dict[int, tuple[HostState, CriticCounters]] = {}

    def learn(self, plan: RankPlan, payloads: Mapping[int, GroupPayload], columns: Columns) -> TrainReport:
        """Run a train step's optimizer steps. A collective. `columns`: the values, and whatever else the
        returns need."""
        began_s = time.monotonic()
        batches = step_batches(
            plan.optimizer_steps,
            payloads,
            columns,
            window=plan.window,
            max_tokens=self.profile.trainer.max_tokens_per_microbatch,
            ranks=self.ranks,
            are_packed=self.is_packed,
        )
        credit(batches, self.profile.algorithm, self.ranks)
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


def value_loss(
    values_N: torch.Tensor, old_N: torch.Tensor, returns_N: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's loss, and whether the clipped term was the larger one."""
    clipped_N = torch.maximum(torch.minimum(values_N, old_N + clip), old_N - clip)
    plain_N, cut_N = (values_N - returns_N).square(), (clipped_N - returns_N).square()
    return torch.maximum(plain_N, cut_N) / 2, cut_N > plain_N
