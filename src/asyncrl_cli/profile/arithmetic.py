"""The numbers that follow from a profile: groups, windows, the admission budget, the staleness bound, the
mode, processes, nodes and GPUs, time limits.

    R = require_batches * B        groups per train step
    W = K * R                      groups per window, that is, between two weight syncs
    budget = floor((1 + eta) * W)  groups admitted per window, including running and finished ones
    bound = max_staleness, by default ceil(eta)

The arithmetic is exact: eta is a decimal, so (1 + 0.15) * 100 is 115 and not 114.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.profile.rollout_sections import RolloutSection
from asyncrl_cli.profile.schema import Interrupt, Profile, TrainerSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The schedule of one run. All sizes are in groups. B, R and K are the symbols of docs/admission.md."""

    mini_batch_groups: int
    """B"""
    step_groups: int
    """R"""
    window_steps: int
    """K"""
    window_groups: int
    """W"""
    eta: Decimal
    budget_groups: int
    """The most groups admitted per window."""
    max_staleness: int
    """Strict bound in versions, if `on_stale` is `wait`."""
    train_steps: int
    optimizer_steps: int
    groups: int
    """Groups trained by the whole run."""
    syncs: int
    """Number of weight syncs: one at the end of each window. The last one is for the final eval."""
    last_window_groups: int
    mode: str

    @classmethod
    def of(cls, profile: Profile) -> Schedule:
        """Raises ConfigError if the length of the run is missing, contradictory or not a whole number of
        train steps."""
        training, mini_batch = profile.async_training, profile.trainer.ppo_mini_batch_size
        step_groups = training.require_batches * mini_batch
        window_steps = training.trigger_parameter_sync_step
        steps = train_steps_of(profile)
        syncs = -(-steps // window_steps)
        return cls(
            mini_batch_groups=mini_batch,
            step_groups=step_groups,
            window_steps=window_steps,
            window_groups=window_groups_of(profile),
            eta=training.staleness_threshold,
            budget_groups=window_groups_of(profile) + groups_ahead(profile),
            max_staleness=staleness_bound(profile),
            train_steps=steps,
            optimizer_steps=steps * step_optimizer_steps(profile),
            groups=steps * step_groups,
            syncs=syncs,
            last_window_groups=(steps - (syncs - 1) * window_steps) * step_groups,
            mode=mode_of(profile),
        )


def step_optimizer_steps(profile: Profile) -> int:
    """Optimizer steps of one train step, in all epochs."""
    return profile.async_training.require_batches * profile.trainer.ppo_epochs


def window_groups_of(profile: Profile) -> int:
    """W"""
    training = profile.async_training
    step_groups = training.require_batches * profile.trainer.ppo_mini_batch_size
    return training.trigger_parameter_sync_step * step_groups


def groups_ahead(profile: Profile) -> int:
    """How many groups may be generated ahead of a window's own W groups: eta * W, rounded down."""
    return math.floor(Fraction(profile.async_training.staleness_threshold) * window_groups_of(profile))


def staleness_bound(profile: Profile) -> int:
    """`max_staleness`, or ceil(eta) if it is not given."""
    given = profile.async_training.max_staleness
    return math.ceil(profile.async_training.staleness_threshold) if given is None else given


def least_trajectories(profile: Profile) -> int:
    """How many trajectories of a group need a reward before it can be trained: two, to be compared, or one if
    `rollout.n` is 1."""
    return min(2, profile.rollout.n)


def mode_of(profile: Profile) -> str:
    """The mode's name. It follows from (colocate, K, eta, partial_rollout); no key declares it."""
    training = profile.async_training
    if profile.placement.colocate:
        return "colocate"
    if training.staleness_threshold == 0:
        return "on-policy-pipeline" if training.trigger_parameter_sync_step == 1 else "stream-off-policy"
    if training.partial_rollout:
        return "partial-rollout"
    if training.staleness_threshold == 1 and training.trigger_parameter_sync_step == 1:
        return "one-step-off"
    return "stale-samples"


def train_steps_of(profile: Profile) -> int:
    """The run's length in train steps, whichever key gives it."""
    steps, groups = profile.run.train_steps, profile.run.total_rollout_steps
    step_groups = profile.async_training.require_batches * profile.trainer.ppo_mini_batch_size
    if groups is None:
        if steps is None:
            hint = "set run.train_steps (or run.total_rollout_steps, in groups)"
            raise ConfigError("the run has no length", hint=hint)
        return steps
    if groups % step_groups:
        below = groups - groups % step_groups
        ways = f"{below} or {below + step_groups}" if below else f"{step_groups} or more"
        why = f"is not a multiple of R = {step_groups} groups per train step"
        hint = f"--set run.total_rollout_steps={ways}"
        raise ConfigError(f"run.total_rollout_steps = {groups} {why}", hint=hint)
    if steps is not None and steps != groups // step_groups:
        raise ConfigError(
            f"run.train_steps = {steps} and run.total_rollout_steps = {groups} disagree: {groups} groups are "
            f"{groups // step_groups} train steps of R = {step_groups} groups",
            hint="give one of the two",
        )
    return groups // step_groups


def tensor_parallel_size(profile: Profile, device: str) -> int:
    """The number of processes that share one model: one per GPU of a worker; on CPUs, as many as the profile
    asks for, or 1.

    Raises ConfigError if the profile asks for a number that differs from the worker's number of GPUs.
    """
    asked, gpus = profile.rollout.tensor_parallel_size, profile.placement.gpus_per_rollout_worker
    if device == "cpu":
        return asked or 1
    if asked not in (None, gpus):
        both = f"rollout.tensor_parallel_size = {asked}, but placement.gpus_per_rollout_worker = {gpus}"
        ways = f"placement.gpus_per_rollout_worker={asked}, or leave rollout.tensor_parallel_size out"
        raise ConfigError(f"{both}: a worker's model is shared by all of its GPUs", hint=f"--set {ways}")
    return gpus


def max_context_tokens(profile: Profile) -> int:
    """The longest token sequence that an engine or the trainer can receive."""
    return (
        profile.env.max_context_tokens
        or profile.rollout.max_prompt_tokens + profile.rollout.max_response_tokens
    )


TRAIN, PROX, REF, TEACHER, CRITIC = "train", "prox", "ref", "teacher", "critic"
REWARD, ROLLOUT, OLD_LOGPROB = "reward", "rollout", "old_logprob"
SCORERS = (REF, TEACHER, PROX, REWARD, CRITIC)
"""Tasks that can have their own processes, which score finished groups while others are trained."""


class NodeShape(NamedTuple):
    """A role uses `gpus` GPUs on each of `nodes` nodes."""

    nodes: int
    gpus: int


def node_shape_of(section: TrainerSection | RolloutSection) -> NodeShape | None:
    """The nodes and GPUs that the section names. None if it names none: the role's processes may then be on
    any nodes."""
    gpus = section.n_gpus_per_node
    return None if gpus is None else NodeShape(section.nnodes or 1, gpus)


def asked_ranks(profile: Profile) -> int | None:
    """The number of trainer ranks; None if no key gives it."""
    shape = node_shape_of(profile.trainer)
    return profile.placement.trainer_workers if shape is None else shape.nodes * shape.gpus


def asked_workers(profile: Profile) -> int | None:
    """The number of rollout workers; None if no key gives it."""
    if profile.rollout.urls is not None:
        return len(profile.rollout.urls)
    shape = node_shape_of(profile.rollout)
    if shape is None:
        return profile.rollout.workers
    return shape.nodes * (shape.gpus // profile.placement.gpus_per_rollout_worker)


def gpus_per_worker(profile: Profile) -> int:
    """The GPUs that the job reserves for a rollout worker: none for servers that others have started."""
    return 0 if profile.rollout.urls is not None else profile.placement.gpus_per_rollout_worker


def tasks_apart(profile: Profile) -> tuple[str, ...]:
    """The scorers with their own processes. The reward model and scorers of the user's always have their
    own."""
    alone = [sharing[0] for sharing in profile.placement.tasks or () if len(sharing) == 1]
    implied = [REWARD] if profile.reward_model.path is not None else []
    chosen = (task for task in (*alone, *implied) if task in SCORERS)
    return tuple(dict.fromkeys([*chosen, *profile.task.scorers]))


def is_apart(profile: Profile, task: str) -> bool:
    """Whether the task has resources of its own."""
    return task in tasks_apart(profile)


def trainer_columns(profile: Profile) -> list[str]:
    """What the trainer itself computes of a step's tokens before it trains on them, by its name in `timing/`:
    the columns of tasks without resources of their own, and prox as `old_logprob`."""
    algorithm = profile.algorithm
    wanted = {
        REF: (REF, algorithm.has_reference),
        TEACHER: (TEACHER, bool(profile.teacher.paths)),
        CRITIC: (CRITIC, algorithm.has_critic),
        OLD_LOGPROB: (PROX, algorithm.old_logprobs == "recompute"),
    }
    return [name for name, (task, is_on) in wanted.items() if is_on and not is_apart(profile, task)]


def share_of(profile: Profile, task: str) -> int | None:
    """The share that `placement.ratios` gives to the task's list. None without ratios, or if no list names
    the task."""
    tasks, ratios = profile.placement.tasks, profile.placement.ratios
    if tasks is None or ratios is None:
        return None
    return next((ratio for sharing, ratio in zip(tasks, ratios, strict=True) if task in sharing), None)


STALL_MARGIN_S = 60.0
MAX_LOGPROB_DIFF = {"float32": 1e-3, "bfloat16": 0.1}
"""Of the median difference, by `model.dtype`. In bfloat16, trainer and worker round in every layer, and
logits between 8 and 16 to sixteenths: docs/weights.md has measured differences."""


def mixes(profile: Profile) -> bool:
    """Whether a trajectory may be trained that several versions have sampled."""
    return profile.async_training.mixed_versions == "train" and profile.rollout.interrupt != "restart"


def mixed_requeues(profile: Profile) -> int:
    """How often a trajectory is sampled again because several versions have sampled it."""
    if profile.rollout.interrupt == "restart":
        return sys.maxsize
    training = profile.async_training
    return training.max_requeues if training.mixed_versions == "requeue" else 0


def sends_rows(profile: Profile) -> bool:
    """Whether each trainer rank sends its own rows of the weights. Otherwise rank 0 sends them all: it writes
    whole files, or the bytes leave from its GPU."""
    return profile.weights.transport == "object-store" and not profile.weights.keep_versions


def sends_deltas(profile: Profile) -> bool:
    """Whether weights travel as differences (`weights.encoding`)."""
    weights = profile.weights
    can = weights.transport in ("object-store", "directory") and profile.rollout.urls is None
    pays = can and profile.model.dtype == "bfloat16"
    return weights.encoding == "delta" or (weights.encoding == "auto" and pays)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """A profile, with the settings that the loop derives from it. `load_timeout_s`: how long a worker may
    take to receive and load a version, without draining."""

    profile: Profile
    schedule: Schedule
    load_timeout_s: float

    @classmethod
    def of(cls, profile: Profile, load_timeout_s: float | None = None) -> LoopSettings:
        """`load_timeout_s` is `weights.timeout_s`, unless the transport makes loads wait for each other."""
        limit_s = profile.weights.timeout_s if load_timeout_s is None else load_timeout_s
        return cls(profile=profile, schedule=Schedule.of(profile), load_timeout_s=limit_s)

    @property
    def interrupt(self) -> Interrupt:
        """What a load does to a worker's running rollouts. Without partial rollouts, they finish first; in a
        deterministic run, those that have not ended hold before the load."""
        is_partial = self.profile.async_training.partial_rollout and not self.profile.run.deterministic
        return (self.profile.rollout.interrupt or "keep-kv") if is_partial else "drain"

    @property
    def mixes(self) -> bool:
        """Whether a trajectory with tokens of several versions may be trained."""
        return self.interrupt != "drain" and mixes(self.profile)

    @property
    def sync_timeout_s(self) -> float:
        """Seconds without any progress after which the trainer gives up waiting for loads."""
        return self.load_timeout_s + (self._silence_s if self.interrupt == "drain" else 0.0)

    @property
    def _silence_s(self) -> float:
        """How long a healthy worker may produce no token: its engine is busy, or all of its trajectories wait
        for tools."""
        return max(self.profile.rollout.call_timeout_s, self.profile.env.tool_timeout_s)

    @property
    def stall_timeout_s(self) -> float:
        """The watchdog's limit. It is longer than the limit of any single call or load, whose own error says
        more."""
        profile = self.profile
        if profile.run.stall_timeout_s is not None:
            return profile.run.stall_timeout_s
        bounded = (
            self._silence_s,
            profile.eval.timeout_s,
            self.sync_timeout_s,
            profile.trainer.step_timeout_s,
            profile.checkpoint.timeout_s,
        )
        return max(bounded) + STALL_MARGIN_S

    @property
    def max_logprob_diff(self) -> float:
        return self.profile.weights.max_logprob_diff or MAX_LOGPROB_DIFF[self.profile.model.dtype]
