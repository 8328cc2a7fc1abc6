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

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl_cli.contracts.train_step import TrainReport
from asyncrl_cli.contracts.trajectories import GroupPayload
from asyncrl_cli.measure.values import Ratio, Value
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.train.balance import OptimizerStepPlan, RankPlan
from asyncrl_cli.train.batch import Microbatch
from asyncrl_cli.train.credit import RETURNS, credited
from asyncrl_cli.train.losses import Metric, mean_of, sum_of
from asyncrl_cli.train.ranks import PolicyOptimizer, Ranks
from asyncrl_cli.train.reduction import aggregated, finite, optimizer_metrics, reduced
from asyncrl_cli.train.scores import VALUES, Scores, step_microbatches
from asyncrl_cli.train.sharded_model import ShardedModel
from asyncrl_cli.train.trainer_state import (
    CRITIC,
    CriticCounters,
    HostState,
    SavedState,
    restore,
    to_host,
    write_state,
)
from asyncrl_cli.train.unpadded import Divide

RETURN_SUMS = ("returns", "squared returns", "errors", "squared errors")
"""`critic/explained_variance` is computed from these sums; they are not metrics themselves."""


class Critic(ShardedModel):
    """One rank's part of the critic, with its optimizer. A token's number is the value of the state it was
    sampled in."""

    def __init__(
        self, profile: Profile, place: ProcessPlace, ranks: Ranks, *, total_optimizer_steps: int
    ) -> None:
        super().__init__(profile, place.critic_dir or place.model_dir, ranks)
        own, trainer = profile.critic, profile.trainer
        section = trainer.model_copy(update={"lr": own.lr or trainer.lr, "grad_clip": own.grad_clip})
        self.optimizer = PolicyOptimizer(
            section, ranks, self.parameters, total_optimizer_steps=total_optimizer_steps
        )

    def _make_content(self, model: PreTrainedModel) -> _Valuer:
        return _Valuer(model)

    def traced_N(self, microbatch: Microbatch) -> torch.Tensor:
        return self._gathered(partial(self._content, microbatch, self.divide))

    def state_parameters(self) -> dict[str, DTensor]:
        """Its parameters by their names in the trainer's state."""
        return {f"{CRITIC}{name}": parameter for name, parameter in self.parameters.items()}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's live shards of weights and moments, by `<kind>/<parameter>`."""
        tensors = {
            f"weight/{name}": local for name, local in self.locals().items()
        } | self.optimizer.moments()
        return {key.replace("/", f"/{CRITIC}", 1): local for key, local in tensors.items()}

    def update(
        self, steps: Sequence[OptimizerStepPlan], work: Sequence[Sequence[Microbatch]]
    ) -> tuple[dict[str, Value], int]:
        """Run a train step's optimizer steps, on microbatches with the columns of values and returns. A
        collective. Returns its metrics, and how many steps were skipped because their gradient was not
        finite."""
        seen = list[dict[str, Metric]]()
        made = [self._step(step, parts, seen) for step, parts in zip(steps, work, strict=True)]
        return _metrics(self._ranks, seen, made), sum(not math.isfinite(norm) for norm, _ in made)

    def _step(
        self, plan: OptimizerStepPlan, parts: Sequence[Microbatch], seen: list[dict[str, Metric]]
    ) -> tuple[float, float]:
        """Adds the metrics of each microbatch to `seen`. Returns the gradient's norm and the learning
        rate."""
        for part in parts:
            self.before_backward(is_last=part is parts[-1])
            old_N, returns_N = part.columns[VALUES], part.columns[RETURNS]
            loss_N, is_clipped_N = value_loss(
                self.traced_N(part), old_N, returns_N, self._profile.critic.cliprange_value
            )
            loss = aggregated(loss_N, part, plan, self._profile)
            (loss * self._ranks.world_size).backward()  # as in policy_update.py
            errors_N = returns_N - old_N
            sums = (returns_N, returns_N.square(), errors_N, errors_N.square())
            seen.append(
                {
                    "critic/loss": sum_of(loss),
                    "critic/clipped_ratio": mean_of(is_clipped_N),
                    "critic/value_mean": mean_of(old_N),
                    "critic/return_mean": mean_of(returns_N),
                    **{
                        name: sum_of(values_N.double())
                        for name, values_N in zip(RETURN_SUMS, sums, strict=True)
                    },
                }
            )
        return self.optimizer.step()


class CriticApart(Critic):
    """A critic with processes of its own: one object per process. All of them make the same calls in the same
    order.

        score(...)                  values of finished groups, from the weights after the last `learn`
        learn(...)                  the critic's optimizer steps of one train step, on the values that the trainer has, too
        snapshot / write / restore  the critic's part of a checkpoint

    It learns what a critic inside the trainer would: the plan, the columns and the returns (credit.py) are
    the same. `write` may run in any thread; the other calls belong to one thread.
    """

    def __init__(self, profile: Profile, place: ProcessPlace, ranks: Ranks) -> None:
        super().__init__(profile, place, ranks, total_optimizer_steps=Schedule.of(profile).optimizer_steps)
        self._snapshots: dict[int, tuple[HostState, CriticCounters]] = {}

    def learn(self, plan: RankPlan, payloads: Mapping[int, GroupPayload], scores: Scores) -> TrainReport:
        """Run a train step's optimizer steps. A collective. `scores`: the values, and whatever else the
        returns need."""
        began_s, steps = time.monotonic(), plan.optimizer_steps
        max_tokens = self._profile.trainer.max_tokens_per_microbatch
        work = step_microbatches(
            steps,
            payloads,
            scores,
            window=plan.window,
            max_tokens=max_tokens,
            ranks=self._ranks,
            are_packed=self.is_packed,
        )
        credited(steps, work, payloads, algorithm=self._profile.algorithm, ranks=self._ranks)
        metrics, skipped = self.update(steps, work)
        self._ranks.synchronize()
        return TrainReport(
            train_s=time.monotonic() - began_s,
            tokens=sum(step.num_loss_tokens for step in steps),
            metrics=finite(metrics),
            skipped_steps=skipped,
            skipped_in_a_row=self.optimizer.skipped_in_a_row,
        )

    def snapshot(self, step: int) -> None:
        """Copy this process's shards to the host under the name `step`."""
        counters = CriticCounters(
            schema_version=1, processes=self._ranks.world_size, critic_steps=self.optimizer.steps_made
        )
        self._snapshots[step] = (to_host(self.state_parameters(), self.state_tensors()), counters)

    def write(self, step: int, directory: Path) -> None:
        """Write the snapshot of `step` beside the trainer's files, and forget it."""
        write_state(self._ranks.rank, *self._snapshots.pop(step), directory, is_critics=True)

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


def _metrics(
    ranks: Ranks, seen: Sequence[Mapping[str, Metric]], steps: Sequence[tuple[float, float]]
) -> dict[str, Value]:
    """Metrics of a train step, from the `seen` and the return values of `Critic._step`. A collective."""
    found = reduced(ranks, seen)
    number = found["critic/value_mean"].whole
    total, squares, error, squared_error = (found.pop(name).value for name in RETURN_SUMS)
    spread, unexplained = (
        squares - total * total / max(number, 1),
        squared_error - error * error / max(number, 1),
    )
    return (
        found
        | optimizer_metrics("critic", found["critic/loss"], steps)
        | {"critic/explained_variance": Ratio(spread - unexplained, spread)}
    )


class _Valuer(torch.nn.Module):
    """A language model's transformer with a value head instead of the language model's head."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: PreTrainedModel = getattr(model, model.base_model_prefix)
        self.head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, microbatch: Microbatch, divide: Divide) -> torch.Tensor:
        part = divide(microbatch)
        hidden_BTH = self.model(**part.inputs, use_cache=False).last_hidden_state
        hidden_NH = hidden_BTH.flatten(0, 1).index_select(0, part.select_n)
        return part.joined(self.head(hidden_NH).sum(-1).float(), len(microbatch.targets_N))
