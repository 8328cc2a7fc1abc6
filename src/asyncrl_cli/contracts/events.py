"""What the loop tells its observers: events as they happen, a record per train step, an overview per
second."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.contracts.ports import Json
from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult, TrainReport
from asyncrl_cli.contracts.status import DataStatus
from asyncrl_cli.measure.intervals import Interval, mean_interval
from asyncrl_cli.measure.states import ExecutorReport, SlotInterval, Span
from asyncrl_cli.measure.values import Value

ENDED = ("done", "failed", "stopped")
"""The phases of a run that is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of events.jsonl. `name` is a ledger stage or one of: replaced (responses that were lost or
    resumed are placed again; in a deterministic run also their first place), scored, published, loaded,
    checkpointed, failed, resumed, warning, eval, lost, away, restarted, tools_again, lent (the trainer's
    devices, to these workers), recalled. `fields` are further
    JSON values."""

    time_s: float
    name: str
    key: AttemptKey | None = None
    version: int | None = None
    step: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSummary:
    """The result of one eval on one set ("" is the held-out split). Checkpoints hold it unchanged.

    `reward_mean`: mean over prompts of the mean of their scored samples, verl's `mean@n`; `best`: (N, mean
    over prompts of the best of N samples) for N = 2, 4, ... `num_prompts`: those with a scored sample.
    `num_failed`: samples without a score, which no mean includes. `truncated_ratio`: share of the scored
    samples that did not end by themselves. `eval_s`: for all sets together. `rewards`: the mean reward of
    each prompt of the set in the order of uids, None for one without a scored sample; `prompts`: a digest of
    the uids. Results with the same digest can be compared prompt by prompt.
    """

    version: Count
    reward_mean: float
    num_prompts: Count
    response_tokens_median: float
    eval_s: float
    num_failed: Count
    eval_set: str = ""
    samples_per_prompt: Count = 1
    truncated_ratio: float = 0.0
    best: tuple[tuple[Count, float], ...] = ()
    rewards: tuple[float | None, ...] = ()
    prompts: str = ""

    @property
    def interval(self) -> Interval | None:
        """The 95% interval of `reward_mean`; None in a checkpoint of a version that did not keep
        `rewards`."""
        known = [reward for reward in self.rewards if reward is not None]
        return mean_interval(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """All facts of one train step, from which observers make metrics (docs/metrics.md).

    `window`: the version that the window began with; `step_in_window`: how many train steps it had before
    this one. `timing_s`: keys step, wait_data, old_logprob, train, gather, checkpoint, eval, other; also, if
    they took time, wait_scores, and ref and critic (columns that the trainer computed). `reports`: the newest
    report of each executor, by name; `covered_s`: up to when, on the driver's clock. `spans`: those of *all*
    reports since the previous step, by executor, already mapped to the driver's clock; the same for
    `slot_intervals`, if they are recorded. `ended_s` is on the driver's clock. `sync`: `WeightSync.summary`.
    `filtered`: the reward of each group dropped for equal rewards since the previous step; None if the filter
    is off. `restarts`, `failures` (of trajectories, by kind) and `orphans` (keys of the data store) count
    from the beginning of the run. `feed`: the feed's figures. `bias`: what was trained of what has ended
    since the previous step (loop/bias.py). `governor`: its levers (loop/governor.py), if there is one.
    `lending`: what the trainer's devices generated (loop/lending.py); `lent`: the workers on them.
    """

    step: int
    version: int
    window: int
    step_in_window: int
    ended_s: float
    groups: tuple[GroupResult, ...]
    timing_s: Mapping[str, float]
    train: TrainReport
    reports: Mapping[str, ExecutorReport]
    spans: Mapping[str, tuple[Span, ...]]
    sync: Mapping[str, float | int | None]
    evals: tuple[EvalSummary, ...]
    ledger: Mapping[str, int]
    tokens_discarded: int
    tokens_trained: int
    filtered: tuple[float, ...] | None = None
    restarts: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    orphans: int = 0
    feed: Mapping[str, float] = field(default_factory=dict)
    bias: Mapping[str, Value] = field(default_factory=dict)
    governor: Mapping[str, float] = field(default_factory=dict)
    lending: Mapping[str, float] = field(default_factory=dict)
    lent: Collection[str] = ()
    slot_intervals: Mapping[str, tuple[SlotInterval, ...]] = field(default_factory=dict)
    covered_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The run right now, made once a second: all that `status.json` and the screen need beside the last
    metrics line.

    `phase`: starting, running, evaluating, stopping, done, stopped, failed. `admission`: why nothing more is
    admitted ("" if open): slots, window, in flight, deadlines (loop/admission.py), stopping, end (all groups
    of the run have started), loading (colocate: until all have loaded; else all are loading), restart (no
    worker has a process); `admission_cause`: the cause, in words. `window_taken`: groups taken in this
    window, of `window_groups` (W); `window_budget`: how many may be running, finished or taken in it.
    `governor`: its levers, in words, "" without one. `lending`: which workers have the trainer's devices, in
    words, "" if none has. `reports`: states and waits as the loop knows them now
    (causes.py). `worker_versions`: by worker name, -1 for none yet. `restarting`: workers that have no
    process at the moment, by name, with "1 of 3" (the first of `rollout.max_restarts = 3`) or with the reason
    why the run continues without it.
    """

    phase: str
    time_s: float
    step: int
    version: int
    admission: str
    admission_cause: str
    window_taken: int
    window_groups: int
    window_budget: int
    ledger: Mapping[str, int]
    reports: Mapping[str, ExecutorReport]
    worker_versions: Mapping[str, int]
    eval_running: str
    checkpoint: str
    restarting: Mapping[str, str] = field(default_factory=dict)
    governor: str = ""
    lending: str = ""
    data: DataStatus | None = None


class Observer:
    """Watches the run. Its methods run in the event loop, so they must return at once. Subclasses override
    what they need."""

    def event(self, event: Event) -> None:
        """Something has happened."""

    def step(self, record: StepRecord) -> None:
        """A train step has ended."""

    def tick(self, overview: Overview) -> None:
        """Another second has passed."""

    def state(self, record: StepRecord | None = None) -> Json:
        """State for the checkpoint, as JSON. `restore` continues from it. `record`: what is known of a step
        whose record comes later; the state should count it."""
        return {}

    def restore(self, state: Json) -> None:
        """Called before anything happens in a resumed run."""
