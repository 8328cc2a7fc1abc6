"""What a profile may not ask for: every refusal names the numbers in conflict and the way out.

The types and ranges of single keys are the schema's; here is what several keys say together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from asyncrl_cli.checkpoint.run_directory import check_name
from asyncrl_cli.errors import ConfigError
from asyncrl_cli.profile.arithmetic import Schedule, train_steps_of
from asyncrl_cli.profile.engine import engine_conflicts
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile

MOST_PROBLEMS = 20
"""Told in one error."""


def check(profile: Profile) -> list[str]:
    """Returns the warnings. Raises ConfigError, all conflicts in one."""
    conflicts = [conflict for rule in RULES for conflict in rule(profile)]
    if conflicts:
        raise combine(conflicts)
    return list(warnings_of(profile))


def combine(problems: Sequence[ConfigError]) -> ConfigError:
    """One error out of several: all messages, the first one's hint."""
    assert problems
    if len(problems) == 1:
        return problems[0]
    more = "\n  - ..." if len(problems) > MOST_PROBLEMS else ""
    lines = "".join(f"\n  - {problem.message}" for problem in problems[:MOST_PROBLEMS]) + more
    return ConfigError(f"{len(problems)} problems in the configuration:{lines}", hint=problems[0].hint)


def _length(profile: Profile) -> Iterator[ConfigError]:
    try:
        train_steps_of(profile.run, profile.async_training.require_batches * profile.trainer.ppo_mini_batch_size)
    except ConfigError as error:
        yield error


def _name(profile: Profile) -> Iterator[ConfigError]:
    try:
        if profile.run.name is not None:
            check_name(profile.run.name)
    except ConfigError as error:
        yield error


def _partial_rollout(profile: Profile) -> Iterator[ConfigError]:
    training = profile.async_training
    if training.partial_rollout and training.staleness_threshold == 0:
        yield ConfigError(
            "async_training.partial_rollout = true with async_training.staleness_threshold = 0: "
            "nothing is running at a weight sync, so no rollout can be partial",
            hint="--set async_training.staleness_threshold=0.5, or partial_rollout=false",
        )
    if profile.rollout.interrupt is not None and not training.partial_rollout:
        yield ConfigError(
            f'rollout.interrupt = "{profile.rollout.interrupt}" without async_training.partial_rollout: '
            "workers finish their rollouts before they load, so there is nothing to interrupt",
            hint="--set async_training.partial_rollout=true, or leave rollout.interrupt out",
        )


def _staleness(profile: Profile) -> Iterator[ConfigError]:
    training = profile.async_training
    eta, least = training.staleness_threshold, math.ceil(training.staleness_threshold)
    if training.max_staleness is not None and training.max_staleness < least:
        yield ConfigError(
            f"async_training.max_staleness = {training.max_staleness} is less than ceil(staleness_threshold) = "
            f"ceil({eta}) = {least}: groups admitted that far ahead are that old when they are trained",
            hint=f"--set async_training.max_staleness={least}, or a smaller async_training.staleness_threshold",
        )
    if training.max_staleness and eta == 0:
        yield ConfigError(
            f"async_training.max_staleness = {training.max_staleness} with async_training.staleness_threshold = 0: "
            "nothing is generated ahead, so nothing may be stale",
            hint="--set async_training.max_staleness=0, or a staleness_threshold above 0",
        )
    if training.on_stale != "wait" and eta == 0:
        yield ConfigError(
            f'async_training.on_stale = "{training.on_stale}" with async_training.staleness_threshold = 0: '
            "no group can become stale",
            hint="--set async_training.on_stale=wait, or a staleness_threshold above 0",
        )


def _colocate(profile: Profile) -> Iterator[ConfigError]:
    eta = profile.async_training.staleness_threshold
    if profile.placement.colocate and eta > 0:
        yield ConfigError(
            f"placement.colocate = true with async_training.staleness_threshold = {eta}: "
            "trainer and rollout take turns on the same resources, so nothing can be generated ahead",
            hint="--set async_training.staleness_threshold=0, or placement.colocate=false",
        )


def _slots(profile: Profile) -> Iterator[ConfigError]:
    slots, n = profile.rollout.slots, profile.rollout.n
    if slots < n:
        yield ConfigError(
            f"rollout.slots = {slots} is less than rollout.n = {n}: a group of {n} trajectories never finds room",
            hint=f"--set rollout.slots={n} or more",
        )


def _old_logprobs(profile: Profile) -> Iterator[ConfigError]:
    alias, given = profile.async_training.use_rollout_log_probs, profile.algorithm.old_logprobs
    if alias is not None and alias != (given == "rollout"):
        yield ConfigError(
            f"async_training.use_rollout_log_probs = {str(alias).lower()} and "
            f'algorithm.old_logprobs = "{given}" disagree: '
            "they are two names of one thing",
            hint='give one of the two (true is "rollout", false is "recompute")',
        )
    limit = profile.algorithm.max_importance_weight
    if limit is not None and given == "rollout":
        yield ConfigError(
            f'algorithm.max_importance_weight = {limit:g} with algorithm.old_logprobs = "rollout": '
            "the proximal policy is the sampler, so every weight is 1 and nothing would be masked",
            hint="--set algorithm.old_logprobs=recompute, or leave algorithm.max_importance_weight out",
        )


def _direct_transport(profile: Profile) -> Iterator[ConfigError]:
    """`nccl` and `ipc` end on a GPU; what arrives is verified by its effect only."""
    transport, placement = profile.weights.transport, profile.placement
    if transport not in DIRECT_TRANSPORTS:
        return
    given = f'weights.transport = "{transport}"'
    if placement.device != "cuda":
        yield ConfigError(
            f'{given} with placement.device = "{placement.device}": the bytes go from GPU memory to GPU memory',
            hint="--set placement.device=cuda, or --set weights.transport=object-store",
        )
    if transport == "nccl" and placement.colocate:
        yield ConfigError(
            f"{given} with placement.colocate = true: NCCL connects GPUs, and the trainer and its rollout worker share one",
            hint="--set weights.transport=ipc, or --set placement.colocate=false",
        )
    if transport == "ipc" and not placement.colocate:
        yield ConfigError(
            f"{given} with placement.colocate = false: the trainer's GPU memory can be mapped only by who computes on the same GPU",
            hint="--profile colocate --set placement.device=cuda, or --set weights.transport=nccl",
        )
    if not profile.weights.dual_buffer:
        yield ConfigError(
            f"weights.dual_buffer = false with {given}: the bytes come within the load, so there is no second buffer to do without",
            hint="--set weights.dual_buffer=true, or --set weights.transport=object-store",
        )
    if profile.weights.probe_sequences == 0:
        yield ConfigError(
            f"weights.probe_sequences = 0 with {given}: no fingerprint is compared on a GPU, so nothing would tell wrong weights",
            hint="--set weights.probe_sequences=4, or --set weights.transport=object-store",
        )


def _one_buffer(profile: Profile) -> Iterator[ConfigError]:
    if profile.weights.transport == "disk" and not profile.weights.dual_buffer:
        yield ConfigError(
            'weights.dual_buffer = false with weights.transport = "disk": what is read from files takes memory until it is loaded, '
            "so it is a second buffer",
            hint="--set weights.dual_buffer=true, or weights.transport=object-store",
        )


RULES: tuple[Callable[[Profile], Iterator[ConfigError]], ...] = (
    _length,
    _name,
    _partial_rollout,
    _staleness,
    _colocate,
    _slots,
    _old_logprobs,
    engine_conflicts,
    _direct_transport,
    _one_buffer,
)


def warnings_of(profile: Profile) -> Iterator[str]:
    """What is allowed and probably not meant."""
    rollout, schedule = profile.rollout, Schedule.of(profile)
    if rollout.top_p < 1:
        yield f"rollout.top_p = {rollout.top_p}: the sampled distribution is not the one that is trained"
    if rollout.top_k > 0:
        yield f"rollout.top_k = {rollout.top_k}: the sampled distribution is not the one that is trained"
    stall_s, call_s = profile.run.stall_timeout_s, rollout.call_timeout_s
    if stall_s is not None and stall_s <= call_s:
        yield (
            f"run.stall_timeout_s = {stall_s:g} is not longer than rollout.call_timeout_s = {call_s:g}: where all wait for a call "
            "that hangs, the run ends as a stall before the call's own limit names it or restarts its worker"
        )
    if profile.task.train_prompts is not None and profile.task.train_prompts < schedule.step_groups:
        yield (
            f"task.train_prompts = {profile.task.train_prompts} is less than R = {schedule.step_groups}: "
            "one train step holds the same prompt more than once"
        )
    if profile.trainer.warmup_steps >= schedule.optimizer_steps:
        yield (
            f"trainer.warmup_steps = {profile.trainer.warmup_steps} and the run has "
            f"{schedule.optimizer_steps} optimizer steps: the learning rate never reaches trainer.lr"
        )
