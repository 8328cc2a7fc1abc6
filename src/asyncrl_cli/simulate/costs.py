"""The costs of a workload: seconds of train steps, decoding and weight syncs, for a given number of devices.

    optimizer step   fixed_step_s + (step_s + tokens * imbalance * s_per_token) * share, in each of
                     `trainer.ppo_epochs`; colocated, the first of a window also colocated_s
    old logprobs     old_logprob_fixed_step_s + tokens * old_logprob_s_per_token * share, per mini-batch
    reference        tokens * ref_s_per_token * share, in the trainer or in processes of its own
    teachers         tokens * teacher_s_per_token * share, likewise
    critic           tokens * critic_s_per_token * share for values, and LEARNING times that for learning
    reward model     tokens * reward_s_per_token * share, in processes of its own

    share            (gpus / reference_gpus) ** -scaling_exponent
    imbalance        tokens of the data-parallel rank that has most, over the mean rank's (`imbalance`)

Tokens are those of prompt and response; a prompt counts once per group where the trainer shares prefixes
(`trainer.shared_prefixes`), but not for a reward model. With `algorithm.old_logprobs = "recompute"` the
proximal logprobs of all mini-batches but the window's first are computed before training (as in
`train/policy_trainer.py`: the first mini-batch's forward pass gives both).
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist, fmean, pstdev
from typing import NamedTuple

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.prompt_group import GroupResult, TrainBatch
from asyncrl_cli.engines.port import cache_bytes_left
from asyncrl_cli.measure.meters import POLL_S
from asyncrl_cli.profile.arithmetic import (
    CRITIC,
    OLD_LOGPROB,
    PROX,
    REWARD,
    SCORERS,
    Schedule,
    max_context_tokens,
    mixed_requeues,
    mixes,
    sends_rows,
    trainer_columns,
)
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.responses import Episodes, ResponseLengths, WorkerTimes
from asyncrl_cli.simulate.sequences import UNLIMITED, CacheSize, prefix_tokens
from asyncrl_cli.simulate.simulated_trainer import ScorerTimes, TrainerTimes
from asyncrl_cli.simulate.sync_costs import SyncTimes, sync_times
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.train.step_plan import unique_tokens

GIB = 2**30
LEARNING = 3.0
"""Learning from a group takes the critic this many times as long as its values: forward and backward against
forward."""
_POLL_RATIO = 1.5
"""How often a worker reports without a change, as a share of a mean response's time: such reports only cost
simulation time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Sampled tokens per second that each phase generates or trains alone, with all the devices that the
    profile gives it.

    Prompts take time but their tokens are not counted, as in `tokens_trained`. Training includes the
    old-logprob pass, if any.
    """

    rollout_tokens_per_s: float
    trainer_tokens_per_s: float
    colocated: bool
    lent_share: float = 0.0
    """Of the speed of all workers, that of those on the trainer's devices, which the rate above lacks."""


class Spent(NamedTuple):
    """Work a trainer has done so far. `seconds`: as if it had cores of its own."""

    seconds: float = 0.0
    response_tokens: int = 0
    trajectories: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Costs:
    """The costs of one run of `profile` with `ranks` trainer ranks, `workers` rollout workers and, by task,
    the number of `scorers` (separate processes).

    The run records here how fast its workers are (`speeds`, drawn at random, lent ones last) and what its
    trainer has done:
    `spent[i]` is the total after i train steps. `scale`: how many times more devices and prompts the run has
    of which this is a miniature.
    """

    workload: Workload
    profile: Profile
    ranks: int
    workers: int
    scorers: Mapping[str, int] = field(default_factory=dict)
    speeds: Sequence[float] = ()
    spent: list[Spent] = field(default_factory=lambda: [Spent()])
    scale: int = 1

    @property
    def places(self) -> float:
        """Processes that can compute at once without slowing each other."""
        return (self.workload.cores or math.inf) / self.scale / self.profile.placement.cpus_per_worker

    def trainer_times(self) -> TrainerTimes:
        sync = self._sync_times()
        return TrainerTimes(
            train_s=self._train_s,
            old_logprob_tokens=lambda batch: _tokens(self._scored(batch))[0],
            column_s={name: partial(self._column_s, name) for name in trainer_columns(self.profile)},
            overhead_s=self.workload.training.step_overhead_s,
            gather_s=self.workload.syncing.colocated_s if self._is_colocated else sync.gather_s,
            publish_s=0.0 if self._is_colocated else sync.publish_s,
            kl=self.workload.drift.kl if self.profile.async_training.target_kl is not None else None,
            processes=self.ranks,
        )

    def scorer_times(self, task: str) -> ScorerTimes:
        """Times of a scorer in processes of its own."""
        processes, sync = self.scorers[task], self._sync_times()
        return ScorerTimes(
            score_s=lambda groups: self._scoring_s(task, groups, processes),
            learn_s=lambda groups: (
                LEARNING * self.profile.trainer.ppo_epochs * self._scoring_s(task, groups, processes)
            ),
            call_tokens=processes * self.profile.trainer.max_tokens_per_microbatch,
            load_s=sync.send_s + sync.load_s,
            processes=processes,
        )

    def worker_times(self) -> WorkerTimes:
        """Times of rollout workers. When colocated, sending and loading cost nothing: `colocated_s` is part
        of the gather instead.

        `weights.overlap` has no effect without `[links]`, because the workload's `send_bytes_per_s` already
        includes what it saves.
        """
        workload, weights, rollout = self.workload, self.profile.weights, self.profile.rollout
        decoding, syncing, turns = workload.decoding, workload.syncing, workload.turns
        latency_s, spread = workload.rewarding.latency_s, workload.rewarding.latency_spread
        _, _, send_s, load_s = SyncTimes(0, 0, 0, 0) if self._is_colocated else self._sync_times()
        in_turns = workload.links is not None and weights.transport == "nccl"
        lengths = ResponseLengths(workload.lengths, rollout.max_response_tokens)
        tool_calls = None if turns is None else Episodes(turns, lengths, self.profile, self._prompt_tokens)
        return WorkerTimes(
            decoding=decoding,
            response_tokens=lengths,
            tool_calls=tool_calls,
            hold_slots=rollout.hold_slots,
            trace_sequences=self.profile.logging.trace_sequences,
            prompt_tokens=self._prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            cache=self._cache_size(),
            reward_s=lambda rng: latency_s * (1 + spread * (2 * rng.random() - 1)),
            equal_ratio=workload.rewarding.equal_ratio,
            mixes=mixes(self.profile),
            mixed_requeues=mixed_requeues(self.profile),
            prefetch_s=lambda rng: send_s if weights.dual_buffer else 0.0,
            fetch_s=0.0 if weights.dual_buffer else send_s,
            load_s=lambda rng: load_s,
            pause_s=0.0 if self._is_colocated else syncing.pause_s,
            wake_s=syncing.wake_s,
            sleep_s=syncing.sleep_s,
            poll_s=max(POLL_S, _POLL_RATIO * lengths.mean * decoding.batch_step_s(rollout.slots)),
            weights_timeout_s=weights.timeout_s,
            turns=asyncio.Lock() if in_turns else None,
        )

    def capacities(self, begin_groups: int, end_groups: int) -> Capacities:
        """Capacity of each phase alone, for the trajectories trained between these two counts of groups; in
        response tokens per second, the unit of `tokens_trained`.

        rollout   a full worker makes `slots` tokens per decode step, whose contexts are at least those of
                  responses of equal lengths, and computes a group's prompt and its tools' results once;
                  waits for tools, and a cache that holds fewer than `slots`, are ignored
        trainer   train steps and old-logprob passes as they were, without overhead

        Neither is slowed by the other phase. All workers or all ranks of a phase work at once, and share what
        cores there are.
        """
        step_groups = Schedule.of(self.profile).step_groups
        before, after = self.spent[begin_groups // step_groups], self.spent[end_groups // step_groups]
        done = Spent(*map(operator.sub, after, before))
        # at least one: a stretch may hold empty responses alone
        tokens, trajectories = max(done.response_tokens, 1), max(done.trajectories, 1)
        result_tokens = done.prompt_tokens - trajectories * self._prompt_tokens
        decoding = self.workload.decoding
        slots = self.profile.rollout.slots
        context_tokens = self._prompt_tokens + tokens / trajectories / 2
        token_s = decoding.batch_step_s(slots) / slots + decoding.step_s_per_context_token * context_tokens
        # of a group's prompt, the full blocks are computed once and the rest by each response
        prefix = prefix_tokens(self._prompt_tokens, self._cache_size().block_tokens)
        prefilled = self._prompt_tokens - prefix + prefix / self.profile.rollout.n
        prefill_s = (trajectories * prefilled + max(result_tokens, 0)) * decoding.prefill_s_per_token
        worker_s = (tokens * token_s + prefill_s) * max(1.0, self.workers / self.places)
        each = [tokens / (worker_s * speed) for speed in self.speeds]
        rollout_tokens_per_s = sum(each[: self.workers])
        return Capacities(
            rollout_tokens_per_s=rollout_tokens_per_s,
            lent_share=1 - rollout_tokens_per_s / sum(each),
            trainer_tokens_per_s=tokens / max(done.seconds * max(1.0, self.ranks / self.places), 1e-9),
            colocated=self._is_colocated,
        )

    def _sync_times(self) -> SyncTimes:
        workload, syncing = self.workload, self.workload.syncing
        if workload.links is not None:
            gpus = workload.worker_gpus(self.profile.placement)
            shape = {"ranks": self.ranks, "workers": self.workers, "worker_gpus": gpus}
            return sync_times(syncing, workload.links, self.profile, **shape)
        size = syncing.parameter_bytes
        gather_s = size / syncing.gather_bytes_per_s
        if syncing.gathers_rows:
            senders = self.ranks if sends_rows(self.profile) else 1
            gather_s *= workload.training.reference_gpus / senders
        return SyncTimes(gather_s, 0.0, size / syncing.send_bytes_per_s, size / syncing.load_bytes_per_s)

    @property
    def _is_colocated(self) -> bool:
        return self.profile.placement.colocate

    @property
    def _prompt_tokens(self) -> int:
        return min(self.workload.lengths.prompt_tokens, self.profile.rollout.max_prompt_tokens)

    def _cache_size(self) -> CacheSize:
        """Blocks of one worker's cache. Raises ConfigError if they cannot hold the longest sequence."""
        memory = self.workload.memory
        if memory is None:
            return UNLIMITED
        gpus = self.workload.worker_gpus(self.profile.placement)
        longest = self._prompt_tokens + self.profile.rollout.max_response_tokens
        if self.workload.turns is not None:
            longest = max(longest, max_context_tokens(self.profile))
        num_bytes = cache_bytes_left(
            int(gpus * memory.gpu_memory_gib * GIB),
            memory.gpu_memory_utilization,
            int(self.workload.syncing.parameter_bytes),
        )
        size = CacheSize(num_bytes // (memory.kv_bytes_per_token * memory.block_tokens), memory.block_tokens)
        if not size.holds(longest):
            left = f"the weights leave {num_bytes / GIB:.3g} GiB of a rollout worker's memory"
            little = f"for its KV cache, too little for one sequence of {longest} tokens"
            what = f"workload {self.workload.name}: {left} {little}"
            keys = "memory.gpu_memory_gib, placement.gpus_per_rollout_worker or rollout.max_response_tokens"
            raise ConfigError(what, hint=keys)
        return size

    def _train_s(self, batch: TrainBatch) -> float:
        training, mini_batches = self.workload.training, self._mini_batches(batch.groups)
        response_tokens, tokens = _tokens(batch.groups)
        tokens_s = self._computed(batch.groups) * training.s_per_token * self._imbalance(batch.groups)
        shared_s = mini_batches * training.step_s + tokens_s
        seconds = mini_batches * training.fixed_step_s + shared_s * self._share(training.scaling_exponent)
        columns_s = {name: self._column_s(name, batch) for name in trainer_columns(self.profile)}
        # in the trainer, the critic learns within the train step
        seconds += LEARNING * columns_s.get(CRITIC, 0.0)
        seconds *= self.profile.trainer.ppo_epochs
        if self._is_colocated and batch.step_in_window == 0:
            seconds += training.colocated_s
        before = self.spent[-1]
        spent = Spent(
            seconds=before.seconds + sum(columns_s.values()) + seconds,
            response_tokens=before.response_tokens + response_tokens,
            trajectories=before.trajectories + sum(len(group.trajectories) for group in batch.groups),
            prompt_tokens=before.prompt_tokens + tokens - response_tokens,
        )
        self.spent.append(spent)
        return seconds

    def _old_logprob_s(self, batch: TrainBatch) -> float:
        training, scored = self.workload.training, self._scored(batch)
        fixed_s = self._mini_batches(scored) * training.old_logprob_fixed_step_s
        shared_s = self._computed(scored) * training.old_logprob_s_per_token
        return fixed_s + shared_s * self._share(training.old_logprob_scaling_exponent)

    def _column_s(self, name: str, batch: TrainBatch) -> float:
        """The time of a column in the trainer."""
        if name == OLD_LOGPROB:
            return self._old_logprob_s(batch)
        return self._scoring_s(name, batch.groups, self.ranks)

    def _scoring_s(self, task: str, groups: Sequence[GroupResult], devices: int) -> float:
        """A scorer's time for these groups on that many devices; for the critic, the time of its values."""
        training = self.workload.training
        figure = f"{OLD_LOGPROB if task == PROX else task}_s_per_token"
        known = getattr(training, figure) if task in SCORERS else None  # one of the user's has no figure
        each_s = training.s_per_token / 3 if known is None else known
        tokens = _tokens(groups)[1] if task == REWARD else self._computed(groups)
        return tokens * each_s * self._share(training.old_logprob_scaling_exponent, devices)

    def _imbalance(self, groups: Sequence[GroupResult]) -> float:
        per_rank = self.workload.training.gpus_per_rank
        if per_rank is None:
            return 1.0
        lengths = [meta.prompt_tokens + meta.response_tokens for one in groups for meta in one.trajectories]
        ranks = max(1, self.scale * self.ranks // per_rank)
        return imbalance(lengths, self.scale * len(lengths) / self._mini_batches(groups), ranks)

    def _computed(self, groups: Sequence[GroupResult]) -> int:
        return unique_tokens(groups, self.profile.trainer.shared_prefixes)

    def _scored(self, batch: TrainBatch) -> Sequence[GroupResult]:
        """Groups that the trainer's old-logprob pass scores, if it has one: all but a window's first
        mini-batch, whose own forward pass gives its old logprobs."""
        if self.profile.algorithm.old_logprobs != "recompute" or PROX in self.scorers:
            return ()
        return batch.groups[self.profile.trainer.ppo_mini_batch_size if batch.step_in_window == 0 else 0 :]

    def _mini_batches(self, groups: Sequence[GroupResult]) -> int:
        return len(groups) // self.profile.trainer.ppo_mini_batch_size

    def _share(self, scaling_exponent: float, devices: int | None = None) -> float:
        """Factor from a time on the workload's reference devices to the time on this run's ranks, or on
        `devices`."""
        devices = devices or self.ranks
        return float((devices / self.workload.training.reference_gpus) ** -scaling_exponent)


def imbalance(lengths: Sequence[int], sequences: float, ranks: int) -> float:
    """Expected tokens of the data-parallel rank that has most, over the mean rank's, if `sequences` with such
    lengths are dealt to `ranks` ranks.

    The largest of N values lies at the quantile (N - 3/8) / (N + 1/4) (Blom, Statistical Estimates and
    Transformed Beta-Variables, 1958), which of a sum of skewed lengths is z + skewness / 6 * (z^2 - 1)
    standard deviations (Cornish and Fisher, 1937).
    """
    mean, deviation, each = fmean(lengths), pstdev(lengths), max(1.0, sequences / ranks)
    if ranks < 2 or not deviation:
        return 1.0
    z = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    skewness = fmean([((length - mean) / deviation) ** 3 for length in lengths]) / math.sqrt(each)
    return min(1 + (z + skewness / 6 * (z * z - 1)) * deviation / mean / math.sqrt(each), float(ranks))


def _tokens(groups: Sequence[GroupResult]) -> tuple[int, int]:
    """(response tokens, response and prompt tokens)."""
    metas = [meta for group in groups for meta in group.trajectories]
    response_tokens = sum(meta.response_tokens for meta in metas)
    return response_tokens, response_tokens + sum(meta.prompt_tokens for meta in metas)
