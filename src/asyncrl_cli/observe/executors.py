"""How the executors spent a stretch of time: by their own cumulative integrals, and by spans for the overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl_cli.loop.states import ExecutorReport, Span, State
from asyncrl_cli.loop.values import Last, Max, Overlap, Ratio, Sum, Value

TRAINER, ROLLOUT = "trainer", "rollout"
STATES = "state_s/"
"""Of keys `state_s/<executor>/<state>`: seconds. They are joined over periods and are in no line."""
TRAINER_IDLE = (State.STARVED, State.BLOCKED, State.SYNCING, State.PAUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One executor between two of its reports. `elapsed_s` is its own time: the sum of its time in states."""

    name: str
    role: str
    elapsed_s: float
    state_s: Mapping[State, float]
    sums: Mapping[str, float]
    gauges: Mapping[str, float]


def stretches(before: Mapping[str, ExecutorReport], now: Mapping[str, ExecutorReport]) -> list[Stretch]:
    """One per executor that has reported since `before`; one that is new (or of a resumed run) counts from its start."""
    made = (_stretch(before.get(name), report) for name, report in now.items())
    return [stretch for stretch in made if stretch.elapsed_s > 0]


def _stretch(before: ExecutorReport | None, now: ExecutorReport) -> Stretch:
    if before is not None and sum(now.state_s.values()) < sum(before.state_s.values()):
        before = None  # its integrals started anew
    old_state_s = before.state_s if before else {}
    old_sums = before.sums if before else {}
    state_s = {state: amount - old_state_s.get(state, 0.0) for state, amount in now.state_s.items()}
    return Stretch(
        name=now.name,
        role=now.role,
        elapsed_s=sum(state_s.values()),
        state_s=state_s,
        sums={key: amount - old_sums.get(key, 0.0) for key, amount in now.sums.items()},
        gauges=now.gauges,
    )


def utilization(measured: Sequence[Stretch]) -> dict[str, Value]:
    """Idle ratios, slot utilization and tokens/s, as in docs/metrics.md, and times in states. Who did not report is absent."""
    trainers = [stretch for stretch in measured if stretch.role == TRAINER]
    rollouts = [stretch for stretch in measured if stretch.role == ROLLOUT]
    values: dict[str, Value] = {
        f"{STATES}{stretch.name}/{state}": Sum(seconds) for stretch in measured for state, seconds in stretch.state_s.items()
    }
    if trainers:
        values["trainer/idle_ratio"] = _mean_share(
            (sum(stretch.state_s.get(state, 0.0) for state in TRAINER_IDLE), stretch.elapsed_s) for stretch in trainers
        )
        values["trainer/tokens_per_s"] = _rate("trained_tokens", trainers)
    if rollouts:
        values["rollouter/idle_ratio"] = _mean_share((stretch.sums.get("idle_s", 0.0), stretch.elapsed_s) for stretch in rollouts)
        values["rollouter/slot_utilization"] = Ratio(
            sum(stretch.sums.get("running_sequence_s", 0.0) for stretch in rollouts),
            sum(stretch.gauges.get("slots", 0.0) * stretch.elapsed_s for stretch in rollouts),
        )
        values["rollouter/tokens_per_s"] = _rate("sampled_tokens", rollouts)
        if all("decode_steps" in stretch.sums for stretch in rollouts):
            values["rollouter/decode_batch_mean"] = Ratio(
                sum(stretch.sums["sampled_tokens"] for stretch in rollouts),
                sum(stretch.sums["decode_steps"] for stretch in rollouts),
            )
        values |= _engine_counters(rollouts)
        evals_s = [stretch.sums["eval_s"] for stretch in rollouts if "eval_s" in stretch.sums]
        if evals_s:
            values["rollouter/eval_s"] = Sum(sum(evals_s) / len(rollouts))
    return values


def _engine_counters(rollouts: Sequence[Stretch]) -> dict[str, Value]:
    """What engines tell of themselves beyond tokens; absent where none does."""
    values: dict[str, Value] = {}
    if preempted := [stretch.sums["preemptions"] for stretch in rollouts if "preemptions" in stretch.sums]:
        values["rollouter/preemptions"] = Sum(sum(preempted))
    if usages := [stretch.gauges["kv_cache_usage"] for stretch in rollouts if "kv_cache_usage" in stretch.gauges]:
        values["rollouter/kv_cache_usage"] = Max(max(usages))
    for name in ("engine_running", "engine_waiting"):
        if amounts := [stretch.gauges[name] for stretch in rollouts if name in stretch.gauges]:
            values[f"rollouter/{name}"] = Last(sum(amounts))
    return values


def overlap(spans: Mapping[str, Sequence[Span]], roles: Mapping[str, str]) -> Overlap:
    """Busy time of both sides; a side is busy while any of its executors is. `spans` are on the driver's clock."""
    busy = {
        role: union(
            (span.start_s, span.end_s)
            for name, stays in spans.items()
            if roles.get(name) == role
            for span in stays
            if span.state == State.BUSY
        )
        for role in (TRAINER, ROLLOUT)
    }
    return Overlap(length_of(intersection(busy[TRAINER], busy[ROLLOUT])), length_of(busy[TRAINER]), length_of(busy[ROLLOUT]))


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals, ascending, that cover the same time."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > start:
            joined.append((start, end))
    return joined


def intersection(left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The time that two lists of disjoint, ascending intervals share."""
    shared, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            shared.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length_of(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _mean_share(parts: Iterable[tuple[float, float]]) -> Ratio:
    """The mean of part / elapsed over executors; its mean elapsed time is its weight in longer stretches."""
    pairs = list(parts)
    mean_share = sum(part / elapsed for part, elapsed in pairs) / len(pairs)
    mean_elapsed_s = sum(elapsed for _, elapsed in pairs) / len(pairs)
    return Ratio(mean_share * mean_elapsed_s, mean_elapsed_s)


def _rate(name: str, measured: Sequence[Stretch]) -> Ratio:
    """Amount per second of a side: its executors work at the same time, so their mean time is the side's."""
    elapsed_s = sum(stretch.elapsed_s for stretch in measured) / len(measured)
    return Ratio(sum(stretch.sums.get(name, 0.0) for stretch in measured), elapsed_s)
