"""What a workload's work costs: seconds of train steps, decoding and weight syncs, for a given number of devices.

    optimizer step     fixed_step_s + (step_s + tokens * s_per_token) * (gpus / reference_gpus) ** -scaling_exponent
    old logprobs       old_logprob_fixed_step_s + tokens * old_logprob_s_per_token * (likewise), per mini-batch

Tokens are prompt and response. With `algorithm.old_logprobs = "recompute"` the proximal logprobs of all mini-batches but the
window's first are computed before training (as `train/policy_update.py` does: the first mini-batch's own forward yields both).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl_cli.loop.attempts import GroupResult
from asyncrl_cli.loop.meters import DEBOUNCE_S, POLL_S
from asyncrl_cli.loop.ports import TrainBatch
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.bound import Capacities
from asyncrl_cli.simulate.lengths import ResponseLengths, mean_tokens
from asyncrl_cli.simulate.simulated_trainer import TrainerTimes
from asyncrl_cli.simulate.simulated_worker import WorkerTimes
from asyncrl_cli.simulate.workload import Decoding, Training, Workload

_PROGRESS_RATIO = 0.5
"""Workers report at most once in this share of a mean response's time. Finer only takes longer to simulate: from 0.2 to 0.5, the
published case's mean times change by at most 0.2% over 40 windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a trainer has done so far, on a machine of its own."""

    seconds: float = 0.0
    response_tokens: int = 0
    trajectories: int = 0


class TrainCosts:
    """Seconds of train steps on `ranks` devices. `spent` has a place for the beginning, and one for each step done since."""

    def __init__(self, training: Training, profile: Profile, ranks: int) -> None:
        self.spent = [Spent()]
        self.recomputes = profile.algorithm.old_logprobs == "recompute"
        self._training = training
        self._mini_batch_groups = profile.trainer.ppo_mini_batch_size
        slowdown, devices = _slowdown(training, ranks, profile), ranks / training.reference_gpus
        self._train_shrink = slowdown * float(devices**-training.scaling_exponent)
        self._old_shrink = slowdown * float(devices**-training.old_logprob_scaling_exponent)

    def train_s(self, batch: TrainBatch) -> float:
        training, mini_batches = self._training, len(batch.groups) // self._mini_batch_groups
        response_tokens, tokens = _tokens(batch.groups)
        shared_s = mini_batches * training.step_s + tokens * training.s_per_token
        seconds = mini_batches * training.fixed_step_s + shared_s * self._train_shrink
        before = self.spent[-1]
        spent = Spent(
            seconds=before.seconds + self.old_logprob_s(batch) + seconds,
            response_tokens=before.response_tokens + response_tokens,
            trajectories=before.trajectories + sum(len(group.trajectories) for group in batch.groups),
        )
        self.spent.append(spent)
        return seconds

    def old_logprob_s(self, batch: TrainBatch) -> float:
        training, scored = self._training, self._scored(batch)
        _, tokens = _tokens(scored)
        fixed_s = len(scored) // self._mini_batch_groups * training.old_logprob_fixed_step_s
        return fixed_s + tokens * training.old_logprob_s_per_token * self._old_shrink

    def old_logprob_tokens(self, batch: TrainBatch) -> int:
        """Sampled tokens of the scored mini-batches."""
        return _tokens(self._scored(batch))[0]

    def _scored(self, batch: TrainBatch) -> Sequence[GroupResult]:
        """A window's first mini-batch is trained by the very weights that would score it."""
        if not self.recomputes:
            return ()
        return batch.groups[self._mini_batch_groups if batch.step_in_window == 0 else 0 :]


def _tokens(groups: Sequence[GroupResult]) -> tuple[int, int]:
    """Of responses, and of these with their prompts."""
    metas = [meta for group in groups for meta in group.trajectories]
    response_tokens = sum(meta.response_tokens for meta in metas)
    return response_tokens, response_tokens + sum(meta.prompt_tokens for meta in metas)


def _slowdown(side: Decoding | Training, executors: int, profile: Profile) -> float:
    """Colocated ranks, or workers, fill a shared machine, and several slow each other: if nothing else is known, as the other
    side would slow them."""
    if not profile.placement.colocate or executors < 2:
        return 1.0
    return 1 + (side.interference_ratio if side.crowding_ratio is None else side.crowding_ratio)


def trainer_times(workload: Workload, profile: Profile, costs: TrainCosts) -> TrainerTimes:
    syncing = workload.syncing
    gather_s = syncing.parameter_bytes / syncing.gather_bytes_per_s
    return TrainerTimes(
        train_s=costs.train_s,
        old_logprob_s=costs.old_logprob_s,
        old_logprob_tokens=costs.old_logprob_tokens if costs.recomputes else None,
        overhead_s=workload.training.step_overhead_s,
        gather_s=syncing.colocated_s if profile.placement.colocate else gather_s,
    )


def worker_times(workload: Workload, profile: Profile, workers: int) -> WorkerTimes:
    """Colocate has its weights where they are needed: sending and loading cost nothing (`colocated_s` is in the gather).

    Its workers fill the machine: see `_slowdown`. `weights.overlap` changes nothing here: what it saves of a send is part of the
    workload's `send_bytes_per_s`.
    """
    colocate, syncing, decoding = profile.placement.colocate, workload.syncing, workload.decoding
    send_s, load_s, pause_s = 0.0, 0.0, 0.0
    if not colocate:
        send_s, load_s = (syncing.parameter_bytes / rate for rate in (syncing.send_bytes_per_s, syncing.load_bytes_per_s))
        pause_s = syncing.pause_s
    slowdown, max_tokens = _slowdown(decoding, workers, profile), profile.rollout.max_response_tokens
    slowed = {key: getattr(decoding, key) * slowdown for key in ("step_s", "step_s_per_sequence", "prefill_s_per_token")}
    progress_s = max(DEBOUNCE_S, _PROGRESS_RATIO * mean_tokens(workload.lengths, max_tokens) * decoding.step_s)
    return WorkerTimes(
        decoding=decoding.model_copy(update=slowed),
        response_tokens=ResponseLengths(workload.lengths, max_tokens),
        prompt_tokens=_prompt_tokens(workload, profile),
        max_response_tokens=max_tokens,
        reward_s=_spread(workload.rewarding.latency_s, workload.rewarding.latency_spread),
        prefetch_s=_constant(send_s if profile.weights.dual_buffer else 0.0),
        fetch_s=0.0 if profile.weights.dual_buffer else send_s,
        load_s=_constant(load_s),
        pause_s=pause_s,
        progress_s=progress_s,
        poll_s=max(POLL_S, 3 * progress_s),
        weights_timeout_s=profile.weights.timeout_s,
    )


def _prompt_tokens(workload: Workload, profile: Profile) -> int:
    return min(workload.lengths.prompt_tokens, profile.rollout.max_prompt_tokens)


def _spread(mean_s: float, spread: float) -> Callable[[random.Random], float]:
    return lambda rng: mean_s * (1 + spread * (2 * rng.random() - 1))


def _constant(seconds: float) -> Callable[[random.Random], float]:
    return lambda rng: seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The phases of a run, each by itself. `speeds`: of its workers, as drawn; `spent`: as in `TrainCosts`."""

    workload: Workload
    profile: Profile
    speeds: tuple[float, ...]
    spent: Sequence[Spent]

    def capacities(self, begin_groups: int, end_groups: int) -> Capacities:
        """Over a stretch of the run, for the trajectories trained in it; both in response tokens, the unit of `tokens_trained`.

        rollout   a full worker makes `slots` tokens per `step_s + step_s_per_sequence * slots`; a prefill per trajectory
        trainer   train steps and old-logprob passes as they were, without overhead

        Neither is slowed by the other phase. Colocate's are those of all its resources working at once: where they share a machine,
        a phase's own workers or ranks slow each other (`_slowdown`), as in `bench/phases.py`, which measures all processes of a
        phase together.
        """
        step_groups = Schedule.of(self.profile).step_groups
        before, done = self.spent[begin_groups // step_groups], self.spent[end_groups // step_groups]
        tokens, trajectories = done.response_tokens - before.response_tokens, done.trajectories - before.trajectories
        worker_s = self._worker_s(max(tokens, 1), max(trajectories, 1))
        return Capacities(
            rollout_tokens_per_s=sum(max(tokens, 1) / (worker_s * speed) for speed in self.speeds),
            trainer_tokens_per_s=max(tokens, 1) / max(done.seconds - before.seconds, 1e-9),
            colocated=self.profile.placement.colocate,
        )

    def _worker_s(self, tokens: int, trajectories: int) -> float:
        """Of one worker of speed 1 with its slots full."""
        decoding = self.workload.decoding
        token_s = decoding.step_s / self.profile.rollout.slots + decoding.step_s_per_sequence
        prefill_s = trajectories * _prompt_tokens(self.workload, self.profile) * decoding.prefill_s_per_token
        return (tokens * token_s + prefill_s) * _slowdown(decoding, len(self.speeds), self.profile)
