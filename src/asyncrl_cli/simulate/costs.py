"""What a workload's work costs: seconds of train steps, decoding and weight syncs, for a given number of devices.

    optimizer step     fixed_step_s + (step_s + tokens * s_per_token) * (gpus / reference_gpus) ** -scaling_exponent
    old logprobs       old_logprob_fixed_step_s + tokens * old_logprob_s_per_token * (likewise), per mini-batch

Tokens are prompt and response. With `algorithm.old_logprobs = "recompute"` the proximal logprobs of all mini-batches but the
window's first are computed before training (as `train/policy_update.py` does: the first mini-batch's own forward yields both).

And the least time that some work can take: what each side does alone, at full batch efficiency, with nothing in its way.

    apart       ideal = max(generation work / rollout capacity, train work / trainer capacity)
    colocated   ideal = generation work / rollout capacity + train work / trainer capacity

A colocated job's capacities are those of all its resources, in either phase. Weight syncs, the long tail of a batch, rewards
and waits are no part of the ideal: they are what a schedule can lose. bound_ratio = ideal / measured, over the same windows.

Where both sides share a machine (CPU cores, their caches and memory), the ideal is out of reach: at once, each side is slower than
alone. `at_once_s` is the same maximum with what each side does while the other works, too: what is lost beyond that is the job's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl_cli.loop.attempts import GroupResult
from asyncrl_cli.loop.meters import DEBOUNCE_S, POLL_S
from asyncrl_cli.loop.ports import TrainBatch
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.responses import ResponseLengths, WorkerTimes, mean_tokens
from asyncrl_cli.simulate.simulated_trainer import TrainerTimes
from asyncrl_cli.simulate.workload import Decoding, Training, Workload

_PROGRESS_RATIO = 0.5
"""Workers report at most once in this share of a mean response's time. Finer only takes longer to simulate: from 0.2 to 0.5, the
published case's mean times change by at most 0.2% over 40 windows."""


class Spent(NamedTuple):
    """What a trainer has done so far, on a machine of its own."""

    seconds: float = 0.0
    response_tokens: int = 0
    trajectories: int = 0


@dataclass(slots=True, kw_only=True)
class Costs:
    """What one run of `profile` by so many trainer ranks and rollout workers costs.

    The run notes here how fast its workers are (`speeds`, as drawn), and what its trainer has done: `spent` has a place for the
    beginning, and one for each step done since.
    """

    workload: Workload
    profile: Profile
    ranks: int
    workers: int
    speeds: Sequence[float] = ()
    spent: list[Spent] = field(default_factory=lambda: [Spent()])

    def trainer_times(self) -> TrainerTimes:
        syncing = self.workload.syncing
        gather_s = syncing.parameter_bytes / syncing.gather_bytes_per_s
        return TrainerTimes(
            train_s=self._train_s,
            old_logprob_s=self._old_logprob_s,
            old_logprob_tokens=self._old_logprob_tokens if self._recomputes else None,
            overhead_s=self.workload.training.step_overhead_s,
            gather_s=syncing.colocated_s if self._is_colocated else gather_s,
        )

    def worker_times(self) -> WorkerTimes:
        """Colocate has its weights where they are needed: sending and loading cost nothing (`colocated_s` is in the gather).

        Its workers fill the machine: see `_slowdown`. `weights.overlap` changes nothing here: what it saves of a send is part of
        the workload's `send_bytes_per_s`.
        """
        workload, weights, max_tokens = self.workload, self.profile.weights, self.profile.rollout.max_response_tokens
        decoding, syncing, slowdown = workload.decoding, workload.syncing, self._slowdown(workload.decoding, self.workers)
        slowed = {key: getattr(decoding, key) * slowdown for key in ("step_s", "step_s_per_sequence", "prefill_s_per_token")}
        num_bytes = 0.0 if self._is_colocated else syncing.parameter_bytes
        send_s, load_s = num_bytes / syncing.send_bytes_per_s, num_bytes / syncing.load_bytes_per_s
        progress_s = max(DEBOUNCE_S, _PROGRESS_RATIO * mean_tokens(workload.lengths, max_tokens) * decoding.step_s)
        return WorkerTimes(
            decoding=decoding.model_copy(update=slowed),
            response_tokens=ResponseLengths(workload.lengths, max_tokens),
            prompt_tokens=self._prompt_tokens,
            max_response_tokens=max_tokens,
            reward_s=_spread(workload.rewarding.latency_s, workload.rewarding.latency_spread),
            prefetch_s=lambda rng: send_s if weights.dual_buffer else 0.0,
            fetch_s=0.0 if weights.dual_buffer else send_s,
            load_s=lambda rng: load_s,
            pause_s=0.0 if self._is_colocated else syncing.pause_s,
            progress_s=progress_s,
            poll_s=max(POLL_S, 3 * progress_s),
            weights_timeout_s=weights.timeout_s,
        )

    def capacities(self, begin_groups: int, end_groups: int) -> Capacities:
        """Of each phase alone over a stretch of the run, for the trajectories trained in it; both in response tokens, the unit of
        `tokens_trained`.

        rollout   a full worker makes `slots` tokens per `step_s + step_s_per_sequence * slots`; a prefill per trajectory
        trainer   train steps and old-logprob passes as they were, without overhead

        Neither is slowed by the other phase. Colocate's are those of all its resources working at once: where they share a machine,
        a phase's own workers or ranks slow each other (`_slowdown`), as in `bench/phases.py`, which measures all processes of a
        phase together.
        """
        step_groups = Schedule.of(self.profile).step_groups
        before, done = self.spent[begin_groups // step_groups], self.spent[end_groups // step_groups]
        tokens, trajectories = (max(done[i] - before[i], 1) for i in (1, 2))
        decoding = self.workload.decoding
        token_s = decoding.step_s / self.profile.rollout.slots + decoding.step_s_per_sequence
        prefill_s = trajectories * self._prompt_tokens * decoding.prefill_s_per_token
        worker_s = (tokens * token_s + prefill_s) * self._slowdown(decoding, self.workers)
        return Capacities(
            rollout_tokens_per_s=sum(tokens / (worker_s * speed) for speed in self.speeds),
            trainer_tokens_per_s=tokens / max(done.seconds - before.seconds, 1e-9),
            colocated=self._is_colocated,
        )

    @property
    def _is_colocated(self) -> bool:
        return self.profile.placement.colocate

    @property
    def _recomputes(self) -> bool:
        return self.profile.algorithm.old_logprobs == "recompute"

    @property
    def _prompt_tokens(self) -> int:
        return min(self.workload.lengths.prompt_tokens, self.profile.rollout.max_prompt_tokens)

    def _slowdown(self, side: Decoding | Training, executors: int) -> float:
        """Colocated ranks, or workers, fill a shared machine, and several slow each other: if nothing else is known, as the other
        side would slow them."""
        if not self._is_colocated or executors < 2:
            return 1.0
        return 1 + (side.interference_ratio if side.crowding_ratio is None else side.crowding_ratio)

    def _train_s(self, batch: TrainBatch) -> float:
        training, mini_batches = self.workload.training, self._mini_batches(batch.groups)
        response_tokens, tokens = _tokens(batch.groups)
        shared_s = mini_batches * training.step_s + tokens * training.s_per_token
        seconds = mini_batches * training.fixed_step_s + shared_s * self._share(training.scaling_exponent)
        before = self.spent[-1]
        spent = Spent(
            seconds=before.seconds + self._old_logprob_s(batch) + seconds,
            response_tokens=before.response_tokens + response_tokens,
            trajectories=before.trajectories + sum(len(group.trajectories) for group in batch.groups),
        )
        self.spent.append(spent)
        return seconds

    def _old_logprob_s(self, batch: TrainBatch) -> float:
        training, scored = self.workload.training, self._scored(batch)
        fixed_s = self._mini_batches(scored) * training.old_logprob_fixed_step_s
        shared_s = _tokens(scored)[1] * training.old_logprob_s_per_token
        return fixed_s + shared_s * self._share(training.old_logprob_scaling_exponent)

    def _old_logprob_tokens(self, batch: TrainBatch) -> int:
        return _tokens(self._scored(batch))[0]

    def _scored(self, batch: TrainBatch) -> Sequence[GroupResult]:
        """A window's first mini-batch is trained by the very weights that would score it."""
        if not self._recomputes:
            return ()
        return batch.groups[self.profile.trainer.ppo_mini_batch_size if batch.step_in_window == 0 else 0 :]

    def _mini_batches(self, groups: Sequence[GroupResult]) -> int:
        return len(groups) // self.profile.trainer.ppo_mini_batch_size

    def _share(self, scaling_exponent: float) -> float:
        """Of a time on the reference devices: what it is on these."""
        training = self.workload.training
        return self._slowdown(training, self.ranks) * float((self.ranks / training.reference_gpus) ** -scaling_exponent)


def _tokens(groups: Sequence[GroupResult]) -> tuple[int, int]:
    """Of responses, and of these with their prompts."""
    metas = [meta for group in groups for meta in group.trajectories]
    response_tokens = sum(meta.response_tokens for meta in metas)
    return response_tokens, response_tokens + sum(meta.prompt_tokens for meta in metas)


def _spread(mean_s: float, spread: float) -> Callable[[random.Random], float]:
    return lambda rng: mean_s * (1 + spread * (2 * rng.random() - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Sampled tokens per second that each phase alone generates and trains, with all that the profile gives it.

    Prompts cost time and count no tokens, as in `tokens_trained`. Training includes the old-logprob pass where the profile has one.
    """

    rollout_tokens_per_s: float
    trainer_tokens_per_s: float
    colocated: bool
    rollout_beside_tokens_per_s: float | None = None
    trainer_beside_tokens_per_s: float | None = None
    """While the other side works, too. None where that is the same, or is not measured."""


def ideal_times(sampled_tokens: float, trained_tokens: float, capacities: Capacities) -> dict[str, float]:
    """Seconds of each phase alone, of both (`ideal_s`), and `at_once_s` where it is known what they do beside each other.

    Of the groups that were trained: tokens as the workers made them (in that time, not ahead of it), as the trainer counts them.
    """
    generation_s = sampled_tokens / capacities.rollout_tokens_per_s
    training_s = trained_tokens / capacities.trainer_tokens_per_s
    ideal_s = generation_s + training_s if capacities.colocated else max(generation_s, training_s)
    times = {"generation_s": generation_s, "training_s": training_s, "ideal_s": ideal_s}
    rollout, trainer = capacities.rollout_beside_tokens_per_s, capacities.trainer_beside_tokens_per_s
    if rollout and trainer:
        times["at_once_s"] = max(sampled_tokens / rollout, trained_tokens / trainer)
    return times
