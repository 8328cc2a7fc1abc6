"""What a workload's work costs: seconds of train steps, decoding and weight syncs, for a given number of devices.

    optimizer step     fixed_step_s + (step_s + tokens * s_per_token) * (gpus / reference_gpus) ** -scaling_exponent
    old logprobs       old_logprob_fixed_step_s + tokens * old_logprob_s_per_token * (likewise), per mini-batch

Tokens are prompt and response. With `algorithm.old_logprobs = "recompute"` the proximal logprobs of all mini-batches but the
window's first are computed before training (as `train/policy_update.py` does: the first mini-batch's own forward yields both).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl_cli.loop.attempts import GroupResult
from asyncrl_cli.loop.meters import DEBOUNCE_S, POLL_S
from asyncrl_cli.loop.ports import TrainBatch
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.bound import Capacities
from asyncrl_cli.simulate.decoding import DecodeTimes
from asyncrl_cli.simulate.lengths import ResponseLengths, mean_tokens
from asyncrl_cli.simulate.simulated_trainer import TrainerTimes
from asyncrl_cli.simulate.simulated_worker import WorkerTimes
from asyncrl_cli.simulate.workload import Decoding, Training, Workload

_PROGRESS_RATIO = 0.5
"""Workers report at most once in this share of a mean response's time. Finer only takes longer to simulate: from 0.2 to 0.5, the
published case's mean times change by at most 0.2% over 40 windows."""


@dataclass(slots=True)
class Spent:
    """What a trainer has done so far, on a machine of its own."""

    seconds: float = 0.0
    response_tokens: int = 0
    trajectories: int = 0


class TrainCosts:
    """Seconds of train steps on `ranks` devices; `spent` adds them up."""

    def __init__(self, training: Training, profile: Profile, ranks: int) -> None:
        self.spent = Spent()
        self.recomputes = profile.algorithm.old_logprobs == "recompute"
        self._training = training
        self._mini_batch_groups = profile.trainer.ppo_mini_batch_size
        slowdown, devices = _slowdown(training, ranks, fills_machine=profile.placement.colocate), ranks / training.reference_gpus
        self._train_shrink = slowdown * float(devices**-training.scaling_exponent)
        self._old_shrink = slowdown * float(devices**-training.old_logprob_scaling_exponent)

    def train_s(self, batch: TrainBatch) -> float:
        training, mini_batches = self._training, self._mini_batches(batch)
        trained = [meta for group in batch.groups for meta in group.trajectories]
        response_tokens = sum(meta.response_tokens for meta in trained)
        tokens = response_tokens + sum(meta.prompt_tokens for meta in trained)
        shared_s = len(mini_batches) * training.step_s + tokens * training.s_per_token
        seconds = len(mini_batches) * training.fixed_step_s + shared_s * self._train_shrink
        self.spent.seconds += seconds
        self.spent.trajectories += len(trained)
        self.spent.response_tokens += response_tokens
        return seconds

    def old_logprob_s(self, batch: TrainBatch) -> float:
        if not self.recomputes:
            return 0.0
        training, scored = self._training, self._scored(batch)
        metas = [meta for groups in scored for group in groups for meta in group.trajectories]
        tokens = sum(meta.prompt_tokens + meta.response_tokens for meta in metas)
        seconds = len(scored) * training.old_logprob_fixed_step_s + tokens * training.old_logprob_s_per_token * self._old_shrink
        self.spent.seconds += seconds
        return seconds

    def old_logprob_tokens(self, batch: TrainBatch) -> int:
        """Sampled tokens of the scored mini-batches."""
        return sum(meta.response_tokens for groups in self._scored(batch) for group in groups for meta in group.trajectories)

    def _scored(self, batch: TrainBatch) -> list[Sequence[GroupResult]]:
        """A window's first mini-batch is trained by the very weights that would score it."""
        return self._mini_batches(batch)[1 if batch.step_in_window == 0 else 0 :]

    def _mini_batches(self, batch: TrainBatch) -> list[Sequence[GroupResult]]:
        size = self._mini_batch_groups
        return [batch.groups[first : first + size] for first in range(0, len(batch.groups), size)]


def _slowdown(side: Decoding | Training, executors: int, *, fills_machine: bool) -> float:
    """Colocated ranks, or workers, fill a shared machine, and several slow each other: if nothing else is known, as the other
    side would slow them."""
    if not fills_machine or executors < 2:
        return 1.0
    return 1 + (side.interference_ratio if side.crowding_ratio is None else side.crowding_ratio)


def trainer_times(workload: Workload, costs: TrainCosts, *, colocate: bool) -> TrainerTimes:
    syncing = workload.syncing
    return TrainerTimes(
        train_s=costs.train_s,
        old_logprob_s=costs.old_logprob_s,
        old_logprob_tokens=costs.old_logprob_tokens if costs.recomputes else None,
        overhead_s=workload.training.step_overhead_s,
        gather_s=syncing.colocated_s if colocate else syncing.parameter_bytes / syncing.gather_bytes_per_s,
    )


def worker_times(workload: Workload, profile: Profile, workers: int) -> WorkerTimes:
    """Colocate has its weights where they are needed: sending and loading cost nothing (`colocated_s` is in the gather).

    Its workers fill the machine: see `_slowdown`. `weights.overlap` changes nothing here: what it saves of a send is part of the
    workload's `send_bytes_per_s`.
    """
    colocate, syncing, decoding = profile.placement.colocate, workload.syncing, workload.decoding
    send_s = 0.0 if colocate else syncing.parameter_bytes / syncing.send_bytes_per_s
    prompt_tokens = min(workload.lengths.prompt_tokens, profile.rollout.max_prompt_tokens)
    slowdown = _slowdown(decoding, workers, fills_machine=colocate)
    max_tokens = profile.rollout.max_response_tokens
    progress_s = max(DEBOUNCE_S, _PROGRESS_RATIO * mean_tokens(workload.lengths, max_tokens) * decoding.step_s)
    return WorkerTimes(
        decoding=DecodeTimes(
            step_s=decoding.step_s * slowdown,
            step_s_per_sequence=decoding.step_s_per_sequence * slowdown,
            prefill_s_per_token=decoding.prefill_s_per_token * slowdown,
        ),
        response_tokens=ResponseLengths(workload.lengths, max_tokens),
        prompt_tokens=prompt_tokens,
        max_response_tokens=max_tokens,
        reward_s=_spread(workload.rewarding.latency_s, workload.rewarding.latency_spread),
        prefetch_s=_constant(send_s if profile.weights.dual_buffer else 0.0),
        fetch_s=0.0 if profile.weights.dual_buffer else send_s,
        load_s=_constant(0.0 if colocate else syncing.parameter_bytes / syncing.load_bytes_per_s),
        pause_s=0.0 if colocate else syncing.pause_s,
        speed_spread=decoding.speed_spread,
        progress_s=progress_s,
        poll_s=max(POLL_S, 3 * progress_s),
        weights_timeout_s=profile.weights.timeout_s,
    )


def _spread(mean_s: float, spread: float) -> Callable[[random.Random], float]:
    return lambda rng: mean_s * (1 + spread * (2 * rng.random() - 1))


def _constant(seconds: float) -> Callable[[random.Random], float]:
    return lambda rng: seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The phases of a run, each by itself. `speeds`: of its workers, as drawn; `spent`: what its trainer had done when it had
    trained so many groups."""

    workload: Workload
    profile: Profile
    speeds: tuple[float, ...]
    spent: Mapping[int, Spent]

    def capacities(self, begin_groups: int, end_groups: int) -> Capacities:
        """Over a stretch of the run, for the trajectories trained in it; both in response tokens, the unit of `tokens_trained`.

        rollout   a full worker makes `slots` tokens per `step_s + step_s_per_sequence * slots`; a prefill per trajectory
        trainer   train steps and old-logprob passes as they were, without overhead

        Neither is slowed by the other phase. Colocate's are those of all its resources working at once: where they share a machine,
        a phase's own workers or ranks slow each other (`_slowdown`), as in `bench/phases.py`, which measures all processes of a
        phase together.
        """
        done, before = self.spent[end_groups], self.spent[begin_groups] if begin_groups else Spent()
        tokens, trajectories = done.response_tokens - before.response_tokens, done.trajectories - before.trajectories
        colocate, seconds = self.profile.placement.colocate, done.seconds - before.seconds
        slowdown = _slowdown(self.workload.decoding, len(self.speeds), fills_machine=colocate)
        worker_s = self._worker_s(max(tokens, 1), max(trajectories, 1)) * slowdown
        return Capacities(
            rollout_tokens_per_s=sum(max(tokens, 1) / (worker_s * speed) for speed in self.speeds),
            trainer_tokens_per_s=max(tokens, 1) / max(seconds, 1e-9),
            colocated=colocate,
        )

    def _worker_s(self, tokens: int, trajectories: int) -> float:
        """Of one worker of speed 1 with its slots full."""
        decoding, rollout = self.workload.decoding, self.profile.rollout
        prompt_tokens = min(self.workload.lengths.prompt_tokens, rollout.max_prompt_tokens)
        token_s = decoding.step_s / rollout.slots + decoding.step_s_per_sequence
        return tokens * token_s + trajectories * prompt_tokens * decoding.prefill_s_per_token
