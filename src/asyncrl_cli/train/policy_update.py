"""One train step on one rank: microbatches -> [prox logp] -> per optimizer step: forward, loss, backward, clip, AdamW.

A token's loss (losses/) is multiplied by its importance weight (corrections.py); an optimizer step's loss is a mean over the
sampled tokens, or the trajectories, of all ranks (`algorithm.loss_agg_mode`). Ranks may need different numbers of microbatches;
those with fewer add empty ones, because every rank must take part in every FSDP collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch

from asyncrl_cli.loop.ports import TrainReport
from asyncrl_cli.loop.values import Last, Max, Ratio, Sum, Value
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.samples import GroupPayload
from asyncrl_cli.train.balance import OptimizerStepPlan, RankPlan
from asyncrl_cli.train.batch import Microbatch
from asyncrl_cli.train.corrections import WEIGHT_SQUARES, WEIGHTS, correct, importance_weights, loglinear_prox, signals
from asyncrl_cli.train.losses import LossBatch, Metric, find_loss, sum_of
from asyncrl_cli.train.policy_model import PolicyModel
from asyncrl_cli.train.ranks import PolicyOptimizer, Ranks
from asyncrl_cli.train.scores import PROX, Scores, fill, step_microbatches


class PolicyUpdate:
    """Runs train steps. `window_first`: a host copy of this rank's shards at the window's start, kept only if prox needs it."""

    def __init__(self, profile: Profile, ranks: Ranks, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        self.window_first: dict[str, torch.Tensor] | None = None
        self._loss = find_loss(profile.algorithm.loss_mode)
        self._algorithm = profile.algorithm
        self._profile = profile
        self._ranks = ranks
        self._model = model
        self._optimizer = optimizer

    @property
    def needs_window_first(self) -> bool:
        """Whether later steps of a window need its first weights for prox."""
        return self._algorithm.old_logprobs == "recompute" and self._profile.async_training.trigger_parameter_sync_step > 1

    def run(
        self, step_in_window: int, plan: RankPlan, payloads: Mapping[int, GroupPayload], scores: Scores | None = None
    ) -> TrainReport:
        """Make the train step's optimizer steps. A collective."""
        started_s, steps = time.monotonic(), plan.optimizer_steps
        max_tokens = self._profile.trainer.max_tokens_per_microbatch
        work = step_microbatches(steps, payloads, scores, window=plan.window, max_tokens=max_tokens, ranks=self._ranks)
        steps_done = step_in_window * len(steps)
        prox_started_s = time.monotonic()
        num_scored = self._prox(work, step_in_window)
        self._ranks.synchronize()
        prox_s = time.monotonic() - prox_started_s
        seen: list[dict[str, Metric]] = []
        made_steps = [
            self._optimizer_step(step, parts, steps_done + index, seen)
            for index, (step, parts) in enumerate(zip(steps, work, strict=True))
        ]
        norms, rates = zip(*made_steps, strict=True)
        made = [norm for norm in norms if math.isfinite(norm)]
        metrics = reduced(self._ranks, seen)
        tokens = sum(step.num_loss_tokens for step in steps)
        if WEIGHTS in metrics:
            metrics["correction/effective_ratio"] = _effective_ratio(metrics.pop(WEIGHTS), metrics.pop(WEIGHT_SQUARES), tokens)
        metrics |= {
            "train/loss": Ratio(metrics["train/loss"].value, len(steps)),
            "train/grad_norm": Ratio(sum(made), len(made)),
            "train/lr": Last(rates[-1]),
            "train/skipped_steps": Sum(float(len(norms) - len(made))),
        }
        if self._algorithm.old_logprobs == "recompute":
            scored = sum(step.num_loss_tokens for step in steps[len(steps) - num_scored :])
            metrics["train/old_logprob_tokens"] = Sum(float(scored))
        self._ranks.synchronize()
        return TrainReport(
            train_s=time.monotonic() - started_s - prox_s,
            old_logprob_s=prox_s,
            tokens=tokens,
            metrics={name: value for name, value in metrics.items() if value.value is not None and math.isfinite(value.value)},
            skipped_steps=len(norms) - len(made),
            skipped_in_a_row=self._optimizer.skipped_in_a_row,
        )

    def _prox(self, work: list[list[Microbatch]], step_in_window: int) -> int:
        """Proximal logprobs as a column. Returns how many optimizer steps, of the last ones, it took a forward pass for. Where the
        column is missing, theta's logprobs, detached, have the same value, or it is estimated when theta's are there."""
        if self._algorithm.old_logprobs == "rollout":
            for part in chain.from_iterable(work):
                part.columns[PROX] = part.logp_mu_N
        if self._algorithm.old_logprobs != "recompute" or PROX in work[0][0].columns:
            return 0
        if step_in_window > 0:
            with self._window_first_weights():
                fill(PROX, self._model.logprobs_N, chain.from_iterable(work))
            return len(work)
        if self.needs_window_first:
            self.window_first = {n: torch.empty_like(t, device="cpu").copy_(t) for n, t in self._model.locals().items()}
        # The first optimizer step starts from the weights that define prox, so its own forward pass yields both.
        skipped = 0 if self._algorithm.rollout_is_batch_normalize else 1
        fill(PROX, self._model.logprobs_N, chain.from_iterable(work[skipped:]))
        return len(work) - skipped

    @contextmanager
    def _window_first_weights(self) -> Iterator[None]:
        assert self.window_first is not None, "the window's first train step was not seen"
        live = self._model.locals()
        current = {name: local.clone() for name, local in live.items()}
        try:
            _copy_into(live, self.window_first)
            yield
        finally:
            _copy_into(live, current)

    def _optimizer_step(
        self,
        plan: OptimizerStepPlan,
        microbatches: list[Microbatch],
        steps_done: int,
        seen: list[dict[str, Metric]],
    ) -> tuple[float, float]:
        """`steps_done`: optimizer steps of the window before this one. Adds the metrics of each microbatch to `seen`. Returns the
        gradient's norm and the learning rate."""
        normalizer = self._weight_normalizer(microbatches)
        for microbatch in microbatches:
            self._model.before_backward(is_last=microbatch is microbatches[-1])
            scored = self._model.scored(microbatch)
            batch = self._loss_batch(microbatch, scored.logprobs_N, steps_done)
            loss_N, metrics = self._loss(batch, self._algorithm)
            factors_N, corrections = correct(batch, self._algorithm)
            loss = self._aggregated(loss_N * (factors_N * normalizer), microbatch, plan)
            # FSDP averages gradients over ranks, but the loss is a mean over what all ranks have: hence `world_size`.
            (loss * self._ranks.world_size).backward()
            entropy = Metric(kind="mean", amount=scored.entropy_N.sum(), weight=len(scored.entropy_N))
            metrics |= corrections | signals(batch, microbatch.staleness_N)
            seen.append({"train/loss": sum_of(loss), "train/entropy": entropy, **metrics})
        return self._optimizer.step()

    def _loss_batch(self, microbatch: Microbatch, logp_theta_N: torch.Tensor, steps_done: int) -> LossBatch:
        prox_N = microbatch.columns.get(PROX)
        if self._algorithm.old_logprobs == "loglinear":
            prox_N = loglinear_prox(
                logp_theta_N,
                microbatch.logp_mu_N,
                microbatch.staleness_N,
                steps_done=steps_done,
                window_steps=self._profile.async_training.trigger_parameter_sync_step
                * self._profile.async_training.require_batches,
            )
        return LossBatch(
            logp_theta_N=logp_theta_N,
            logp_prox_N=logp_theta_N.detach() if prox_N is None else prox_N,
            logp_mu_N=microbatch.logp_mu_N,
            advantages_N=microbatch.advantages_N,
            rows_N=microbatch.rows_N,
            num_rows=len(microbatch.inputs_BT),
        )

    def _aggregated(self, loss_N: torch.Tensor, microbatch: Microbatch, plan: OptimizerStepPlan) -> torch.Tensor:
        """The microbatch's part of the optimizer step's loss, as `loss_agg_mode` adds it up."""
        match self._algorithm.loss_agg_mode:
            case "token-mean":
                return loss_N.sum() / max(plan.num_loss_tokens, 1)
            case "seq-mean-token-mean":
                total = (loss_N / microbatch.trajectory_tokens_N).sum()
            case "seq-mean-token-sum":
                total = loss_N.sum()
            case "seq-mean-token-sum-norm":
                total = loss_N.sum() / self._profile.rollout.max_response_tokens
        return total / max(plan.num_trajectories, 1)

    def _weight_normalizer(self, microbatches: list[Microbatch]) -> float:
        """`rollout_is_batch_normalize`: 1 / the mean of all ranks' importance weights in this optimizer step."""
        if not self._algorithm.rollout_is_batch_normalize:
            return 1.0
        total = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        for microbatch in microbatches:  # prox is there before the first loss: see `_prox`
            weights_N, _ = importance_weights(self._loss_batch(microbatch, microbatch.columns[PROX], 0), self._algorithm)
            total += torch.stack([weights_N.double().sum(), total.new_tensor(len(weights_N))])
        weights, tokens = self._ranks.sum(total).tolist()
        return tokens / weights if weights else 1.0


def _effective_ratio(weights: Sum, squares: Sum, tokens: int) -> Ratio:
    """The effective sample size of importance weights, as a share of the tokens: (sum w)^2 / sum w^2 / tokens."""
    return Ratio(weights.value * weights.value / max(tokens, 1), squares.value)


def _copy_into(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])


def reduced(ranks: Ranks, seen: Sequence[Mapping[str, Metric]]) -> dict[str, Value]:
    """The metrics of a train step over all ranks, from those of each microbatch. A collective: all must have the same names."""
    kinds = {name: metric.kind for name, metric in sorted(seen[0].items())}
    amounts = {name: torch.stack([metrics[name].amount.double() for metrics in seen]) for name in kinds}
    maxima, sums = ([name for name in kinds if (kinds[name] == "max") is is_max] for is_max in (True, False))
    weights = amounts[sums[0]].new_tensor([sum(metrics[name].weight for metrics in seen) for name in sums])
    totals = ranks.sum(torch.stack([*(amounts[name].sum() for name in sums), *weights])).view(2, -1).tolist()
    values: dict[str, Value] = {}
    for name, amount, weight in zip(sums, *totals, strict=True):
        values[name] = Ratio(amount, weight) if kinds[name] == "mean" else Sum(amount)
    if maxima:
        largest = ranks.max(torch.stack([amounts[name].max() for name in maxima])).tolist()
        values |= {name: Max(amount) for name, amount in zip(maxima, largest, strict=True)}
    return values
