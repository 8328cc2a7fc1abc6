"""A small hand-made run: reports, groups and records whose metrics can be worked out on paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from asyncrl_cli.contracts.events import EvalSummary, Overview, StepRecord
from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult, TrainReport, TrajectoryMeta
from asyncrl_cli.contracts.status import DataStatus, RunFacts, Status
from asyncrl_cli.measure.states import ExecutorReport, Span, State
from asyncrl_cli.measure.values import Max, Ratio
from tests.statuses import FACTS, status_of

PARTS = ("wait_data", "old_logprob", "train", "gather", "checkpoint", "eval", "other")


def trajectory(reward: float, *version_tokens: tuple[int, int]) -> TrajectoryMeta:
    return TrajectoryMeta(
        prompt_tokens=5,
        response_tokens=sum(tokens for _, tokens in version_tokens),
        reward=reward,
        finish_reason="stop",
        version_tokens=version_tokens,
    )


def group(uid: str, *trajectories: TrajectoryMeta) -> GroupResult:
    key = AttemptKey(uid, 0, 0)
    return GroupResult(key=key, trajectories=trajectories, failures=(), failed_tokens=0, payload=None)


def report(name: str, role: str, state_s: Mapping[State, float], **fields: Any) -> ExecutorReport:
    """Of an executor that is busy now, but for what `fields` say."""
    usual = {"state": State.BUSY, "waiting_for": "", "spans": (), "sums": {}, "gauges": {}}
    now_s = sum(state_s.values())
    return ExecutorReport(name=name, role=role, now_s=now_s, state_s=dict(state_s), **(usual | fields))


def record(
    step: int,
    window: int,
    groups: Sequence[GroupResult],
    reports: Sequence[ExecutorReport] = (),
    *,
    ended_s: float = 0.0,
    spans: Mapping[str, tuple[Span, ...]] | None = None,
    **changed: Any,
) -> StepRecord:
    timing_s = {part: 0.1 for part in PARTS} | {"step": 0.7}
    fields: dict[str, Any] = {
        "step": step,
        "version": window,
        "window": window,
        "step_in_window": 0,
        "ended_s": ended_s,
        "groups": tuple(groups),
        "timing_s": timing_s,
        "train": TrainReport(train_s=0.1, tokens=9, metrics={}),
        "reports": {made.name: made for made in reports},
        "spans": spans or {},
        "sync": {},
        "evals": (),
        "ledger": {"admitted_total": 7, "running": 2, "finished": 1, "trained": 2 * step},
        "tokens_discarded": 0,
        "tokens_trained": 100 * step,
    }
    return StepRecord(**(fields | changed))


@pytest.fixture(scope="session")
def facts() -> RunFacts:
    return FACTS


def full_record(step: int) -> StepRecord:
    """A step of a partial-rollout run in which everything was measured."""
    grown = float(step)
    groups = [
        group(
            f"p{step}-{i}",
            *(trajectory(0.2 + 0.002 * step, (step - 1, 4), (step, 12)) for _ in range(3)),
            *(trajectory(0.3 + 0.001 * step, (step, 9)) for _ in range(5)),
        )
        for i in range(16)
    ]
    trainer = report(
        "trainer",
        "trainer",
        {State.BUSY: 0.6 * grown, State.STARVED: 0.3 * grown, State.SYNCING: 0.1 * grown},
        state=State.STARVED,
        waiting_for="16 takeable groups: 12 finished, 9 running",
        sums={"trained_tokens": 1500 * grown, "data_bytes_fetched": 500_000 * step, "data_bytes_copied": 0},
    )
    sums = {"running_sequence_s": 52 * grown, "idle_s": 0.03 * grown, "sampled_tokens": 1600 * grown}
    sums |= {"eval_s": 0.0, "data_bytes_put": 2_000_000 * step, "data_fetch_s": 0.01 * step}
    sums |= {"data_bytes_fetched": 1_500_000 * step, "data_bytes_copied": 300_000 * step}
    rollouts = [
        report(
            f"rollout-{i}",
            "rollout",
            {State.BUSY: 0.93 * grown, State.LOADING: 0.05 * grown, State.BLOCKED: 0.02 * grown},
            sums=sums,
            gauges={"slots": 64, "running_sequences": 57, "version": step - i},
        )
        for i in range(2)
    ]
    feed = report(
        "feed",
        "feed",
        {State.BLOCKED: 0.99 * grown, State.BUSY: 0.01 * grown},
        state=State.BLOCKED,
        waiting_for="free slots",
    )
    base = step - 1.0
    times = {
        "trainer": [(State.STARVED, 0.0, 0.4), (State.BUSY, 0.4, 1.0)],
        "rollout-0": [(State.BUSY, 0.0, 0.95), (State.LOADING, 0.95, 1.0)],
    }
    spans = {
        name: tuple(Span(state=state, start_s=base + start, end_s=base + end) for state, start, end in listed)
        for name, listed in times.items()
    }
    sync = dict(
        version=step, gather_s=0.012, send_s=0.031, load_s=0.014, pause_s=0.022, logprob_abs_diff=2.1e-7
    )
    figures = {"num_prompts": 512, "response_tokens_median": 12, "eval_s": 3, "num_failed": 0}
    ended = EvalSummary(version=step, reward_mean=0.3 + step / 1000, **figures)
    ledger = {"admitted_total": 16 * step + 24, "running": 17, "finished": 7, "training": 0}
    ledger |= {"trained": 16 * step, "dropped": 0, "requeued": 0}
    metrics = {
        "correction/ratio_mean": Ratio(1000.0, 1000),
        "correction/ratio_max": Max(1.3),
        "correction/clipped_ratio": Ratio(10, 1000),
        "correction/masked_ratio": Ratio(0, 1000),
    }
    train = TrainReport(train_s=0.5, tokens=1500, metrics=metrics)
    timing_s = dict.fromkeys(PARTS, 0.0)
    timing_s |= {"step": 1.0, "wait_data": 0.38, "train": 0.6, "gather": 0.012, "other": 0.008}
    return record(
        step,
        step,
        groups,
        [feed, *rollouts, trainer],
        ended_s=grown,
        spans=spans,
        sync=sync,
        evals=() if step % 50 else (ended,),
        ledger=ledger,
        train=train,
        timing_s=timing_s,
        tokens_trained=1500 * step,
        tokens_discarded=310,
    )


def full_overview(made: StepRecord) -> Overview:
    return Overview(
        phase="running",
        time_s=made.ended_s,
        step=made.step,
        version=made.version,
        admission="window",
        admission_cause="all 24 groups of the window have started, version 119 opens the next",
        window_taken=12,
        window_groups=16,
        window_budget=24,
        ledger=made.ledger,
        reports=made.reports,
        worker_versions={"rollout-0": made.version, "rollout-1": made.version - 1},
        eval_running="",
        checkpoint="step-000100",
        data=DataStatus(keys=24, bytes=1_500_000_000, orphans=0),
    )


@pytest.fixture(scope="session")
def done() -> Status:
    """The status of a run that is done."""
    return status_of(phase="done")


@pytest.fixture(scope="session")
def make() -> dict[str, Callable[..., Any]]:
    """The builders by name, so that test modules need not import one another."""
    return {
        "trajectory": trajectory,
        "group": group,
        "report": report,
        "record": record,
        "full_record": full_record,
        "full_overview": full_overview,
    }
