"""One train step on one rank.

    microbatches -> [ref] -> [critic] -> [prox] -> [advantages] -> [the critic learns]
                 -> per optimizer step: forward, loss, backward, AdamW

A token's loss (losses/) is multiplied by its importance weight (corrections.py). The loss of an optimizer
step is a mean over the sampled tokens, or the trajectories, of all ranks (`algorithm.loss_agg_mode`). If
ranks need different numbers of microbatches, those with fewer add empty ones, because every rank must take
part in every FSDP collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch

from asyncrl_cli.contracts.train_step import TrainReport
from asyncrl_cli.contracts.trajectories import GroupPayload
from asyncrl_cli.measure.values import Ratio, Sum, Value
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.sharing import is_apart
from asyncrl_cli.train.advantages import needs_columns
from asyncrl_cli.train.balance import OptimizerStepPlan, RankPlan
from asyncrl_cli.train.batch import Microbatch
from asyncrl_cli.train.corrections import (
    WEIGHT_SQUARES,
    WEIGHTS,
    correct,
    importance_weights,
    loglinear_prox,
    signals,
)
from asyncrl_cli.train.credit import ADVANTAGES, credited
from asyncrl_cli.train.critic import Critic
from asyncrl_cli.train.kl import kl_of
from asyncrl_cli.train.losses import LossBatch, Metric, find_loss, mean_of, sum_of
from asyncrl_cli.train.policy_model import PolicyModel
from asyncrl_cli.train.ranks import PolicyOptimizer, Ranks
from asyncrl_cli.train.reduction import aggregated, finite, optimizer_metrics, reduced
from asyncrl_cli.train.scores import PROX, REF, VALUES, Scores, fill, step_microbatches


class PolicyUpdate:
    """Runs train steps. `window_first`: a host copy of this rank's shards at the window's start, kept only if
    prox needs it."""

    def __init__(
        self,
        profile: Profile,
        ranks: Ranks,
        model: PolicyModel,
        optimizer: PolicyOptimizer,
        reference: PolicyModel | None = None,
        critic: Critic | None = None,
    ) -> None:
        self._reference, self._critic = reference, critic
        self._optimizers = [optimizer] if critic is None else [optimizer, critic.optimizer]
        self.window_first: dict[str, torch.Tensor] | None = None
        self._loss = find_loss(profile.algorithm.loss_mode)
        self._algorithm = profile.algorithm
        self._profile = profile
        self._ranks = ranks
        self._model = model
        models = (model, reference, critic)  # all use the same microbatches
        self._are_packed = all(each.is_packed for each in models if each is not None)
        self._optimizer = optimizer

    @property
    def needs_window_first(self) -> bool:
        """Whether later train steps of a window need the weights of its start, to compute prox."""
        is_mine = self._algorithm.old_logprobs == "recompute" and not is_apart(self._profile, PROX)
        return is_mine and self._profile.async_training.trigger_parameter_sync_step > 1

    def run(
        self,
        step_in_window: int,
        plan: RankPlan,
        payloads: Mapping[int, GroupPayload],
        scores: Scores | None = None,
    ) -> TrainReport:
        """Run the train step's optimizer steps. A collective."""
        started_s, steps = time.monotonic(), plan.optimizer_steps
        max_tokens = self._profile.trainer.max_tokens_per_microbatch
        work = step_microbatches(
            steps,
            payloads,
            scores,
            window=plan.window,
            max_tokens=max_tokens,
            ranks=self._ranks,
            are_packed=self._are_packed,
        )
        column_s, num_scored = self._columns(work, step_in_window)
        metrics, skipped = dict[str, Value](), 0
        if needs_columns(self._algorithm):  # before the first optimizer step changes anything
            metrics |= credited(steps, work, payloads, algorithm=self._algorithm, ranks=self._ranks)
        if self._critic is not None:
            of_critic, skipped = self._critic.update(steps, work)
            metrics |= of_critic
        seen, made = list[dict[str, Metric]](), list[tuple[float, float]]()
        for index in range(plan.critic_only, len(steps)):
            made.append(
                self._optimizer_step(steps[index], work[index], step_in_window * len(steps) + index, seen)
            )
        if made:
            metrics |= self._policy_metrics(
                seen, made, sum(step.num_loss_tokens for step in steps[-len(made) :])
            )
        if num_scored:
            scored = sum(step.num_loss_tokens for step in steps[len(steps) - num_scored :])
            metrics["train/old_logprob_tokens"] = Sum(float(scored))
        self._ranks.synchronize()
        train_s = time.monotonic() - started_s - sum(column_s.values())
        return TrainReport(
            train_s=train_s,
            column_s={"old_logprob": column_s.pop(PROX), **column_s},
            tokens=sum(step.num_loss_tokens for step in steps),
            metrics=finite(metrics),
            skipped_steps=skipped + sum(not math.isfinite(norm) for norm, _ in made),
            skipped_in_a_row=max(optimizer.skipped_in_a_row for optimizer in self._optimizers),
        )

    def _policy_metrics(
        self, seen: Sequence[Mapping[str, Metric]], made: Sequence[tuple[float, float]], tokens: int
    ) -> dict[str, Value]:
        metrics = reduced(self._ranks, seen)
        # their effective sample size, as a share of the tokens: (sum w)^2 / sum w^2 / tokens
        if WEIGHTS in metrics:
            weights, squares = metrics.pop(WEIGHTS).value, metrics.pop(WEIGHT_SQUARES).value
            metrics["correction/effective_ratio"] = Ratio(weights * weights / max(tokens, 1), squares)
        return metrics | optimizer_metrics("train", metrics["train/loss"], made)

    def _columns(self, work: list[list[Microbatch]], step_in_window: int) -> tuple[dict[str, float], int]:
        """Compute all missing columns. Returns the seconds that each took, and the number that `_prox`
        returns."""
        seconds: dict[str, float] = {}
        for name, model in ((REF, self._reference), (VALUES, self._critic)):
            if model is not None:
                with self._timed(name, seconds):
                    fill(name, model.numbers_N, chain.from_iterable(work))
        with self._timed(PROX, seconds):
            num_scored = self._prox(work, step_in_window)
        return seconds, num_scored

    @contextmanager
    def _timed(self, name: str, seconds: dict[str, float]) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self._ranks.synchronize()
        seconds[name] = time.monotonic() - began_s

    def _prox(self, work: list[list[Microbatch]], step_in_window: int) -> int:
        """Add the column of prox logprobs. Returns how many optimizer steps, counted from the last, needed a
        forward pass for it. Where there is no column, theta's detached logprobs equal prox, or prox is
        estimated from theta's logprobs later."""
        if self._algorithm.old_logprobs == "rollout":
            for part in chain.from_iterable(work):
                part.columns[PROX] = part.logp_mu_N
        if self._algorithm.old_logprobs != "recompute" or PROX in work[0][0].columns:
            return 0
        if step_in_window > 0:
            with self._window_first_weights():
                fill(PROX, self._model.numbers_N, chain.from_iterable(work))
            return len(work)
        if self.needs_window_first:
            live = self._model.locals()
            if self.window_first is None:
                self.window_first = {
                    n: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for n, t in live.items()
                }
            _copy_into(self.window_first, live)
        # The first optimizer step starts from the weights that define prox, so its forward pass gives both
        # theta and prox.
        skipped = 0 if self._algorithm.rollout_is_batch_normalize else 1
        fill(PROX, self._model.numbers_N, chain.from_iterable(work[skipped:]))
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
        """`steps_done`: optimizer steps of the window before this one. Adds the metrics of each microbatch to
        `seen`. Returns the gradient's norm and the learning rate."""
        normalizer = self._weight_normalizer(microbatches)
        for microbatch in microbatches:
            self._model.before_backward(is_last=microbatch is microbatches[-1])
            scored = self._model.scored(microbatch)
            batch = self._loss_batch(microbatch, scored.logprobs_N, steps_done)
            loss_N, metrics = self._loss(batch, self._algorithm)
            factors_N, corrections = correct(batch, self._algorithm)
            loss = aggregated(loss_N * (factors_N * normalizer), microbatch, plan, self._profile)
            if REF in microbatch.columns:
                log_ratios_N = microbatch.columns[REF] - batch.logp_theta_N
                corrections["ref/kl"] = mean_of(kl_of("k3", log_ratios_N))
                if self._algorithm.use_kl_loss:
                    kl_N = kl_of(self._algorithm.kl_loss_type, log_ratios_N)
                    loss = loss + self._algorithm.kl_loss_coef * aggregated(
                        kl_N, microbatch, plan, self._profile
                    )
            # FSDP averages gradients over ranks, but the loss is already divided by the count of all ranks:
            # hence `world_size`.
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
            advantages_N=microbatch.columns.get(ADVANTAGES, microbatch.advantages_N),
            rows_N=microbatch.rows_N,
            num_rows=len(microbatch.inputs_BT),
        )

    def _weight_normalizer(self, microbatches: list[Microbatch]) -> float:
        """For `rollout_is_batch_normalize`: 1 / the mean of all ranks' importance weights in this optimizer
        step."""
        if not self._algorithm.rollout_is_batch_normalize:
            return 1.0
        total = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        for microbatch in microbatches:  # `_prox` has filled prox for all of them
            weights_N, _ = importance_weights(
                self._loss_batch(microbatch, microbatch.columns[PROX], 0), self._algorithm
            )
            total += torch.stack([weights_N.double().sum(), total.new_tensor(len(weights_N))])
        weights, tokens = self._ranks.sum(total).tolist()
        return tokens / weights if weights else 1.0


def _copy_into(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])
