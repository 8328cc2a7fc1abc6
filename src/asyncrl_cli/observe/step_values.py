"""The metrics of one train step as typed values: the formulas of docs/metrics.md.

From trajectories: rewards, lengths, staleness, partial rollouts. From executors: how they spent their time,
by their cumulative integrals; only the overlap of both sides is computed from spans. What was not measured
has the value None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from statistics import stdev

from asyncrl_cli.contracts.events import EvalSummary, StepRecord
from asyncrl_cli.contracts.prompt_group import GroupResult, TrajectoryMeta
from asyncrl_cli.contracts.reward_spec import NAMES_ANSWER
from asyncrl_cli.measure.states import ExecutorReport, Span, State
from asyncrl_cli.measure.values import Histogram, Last, Max, Overlap, Quantiles, Ratio, Spread, Sum, Value

NAMES_REFERENCE = f"reward/{NAMES_ANSWER}"
"""The fact of a trajectory that says whether it names the reference answer."""
PARTIAL = "fully_async/partial/"
STALE = "fully_async/count/"
TRAINER, ROLLOUT, SCORER = "trainer", "rollout", "scorer"
FLOW = ("feed", ROLLOUT, "reward", SCORER, TRAINER)
"""The roles in the order in which data flows through them; they are shown in this order."""
STATES = "state_s/"
"""Prefix of keys `state_s/<executor>/<state>`, in seconds. They are merged over periods but left out of the
lines."""
TRAINER_IDLE = (State.STARVED, State.BLOCKED, State.SYNCING, State.PAUSED)


def step_values(
    record: StepRecord, before: Mapping[str, ExecutorReport], window_steps: int
) -> dict[str, Value]:
    """All values of one step. `before`: the executors' reports when the previous step ended; `window_steps`:
    K."""
    trajectories = [trajectory for group in record.groups for trajectory in group.trajectories]
    values: dict[str, Value] = {
        "step": Last(record.step),
        "version": Last(record.version),
        "window": Last(record.window),
        "time_s": Last(None),
        "groups_trained": Last(record.ledger["trained"]),
        "tokens_trained": Last(record.tokens_trained),
    }
    values |= reward_values(trajectories)
    for summary in record.evals:  # of a set, the last eval that ended since the previous line counts
        values |= eval_values(summary)
    values |= {f"timing/{part}_s": Sum(seconds) for part, seconds in record.timing_s.items()}
    values |= utilization(stretches(before, record.reports))
    values["overlap_ratio"] = overlap(
        record.spans, {name: report.role for name, report in record.reports.items()}
    )
    values |= staleness_values(record, window_steps, trajectories)
    values |= stale_counts(record.window, record.groups) | partial_values(trajectories)
    values |= {f"sync/{name}": Last(figure) for name, figure in record.sync.items()}
    values["rollouter/restarts"] = Last(record.restarts)
    values |= episode_values(trajectories) | {
        f"env/failed/{kind}": Last(number) for kind, number in record.failures.items()
    }
    values["waste/tokens_discarded"] = Last(record.tokens_discarded)
    values |= filter_values(record.groups, record.filtered)
    values |= record.train.metrics
    values |= {f"ledger/{account}": Last(number) for account, number in record.ledger.items()}
    return values


def eval_values(summary: EvalSummary) -> dict[str, Value]:
    """The figures of one eval set, under `eval/` (the held-out split) or `eval/<set>/`."""
    names = (
        "version",
        "reward_mean",
        "num_prompts",
        "num_failed",
        "response_tokens_median",
        "truncated_ratio",
    )
    figures: dict[str, int | float] = {name: getattr(summary, name) for name in names}
    if summary.samples_per_prompt > 1:
        figures[f"reward/mean@{summary.samples_per_prompt}"] = summary.reward_mean
    if summary.interval is not None:
        figures["reward_low"], figures["reward_high"] = summary.interval
    if len(known := [reward for reward in summary.rewards if reward is not None]) > 1:
        figures["reward_std"] = stdev(known)
    figures |= {f"reward/best@{size}/mean": best for size, best in summary.best}
    prefix = f"eval/{summary.eval_set}/" if summary.eval_set else "eval/"
    return {prefix + name: Last(figure) for name, figure in figures.items()}


def reward_values(trajectories: Sequence[TrajectoryMeta]) -> dict[str, Value]:
    """Rewards and response lengths over the step's trajectories. `std` is the population's."""
    rewards = [trajectory.reward for trajectory in trajectories]
    lengths = sorted(trajectory.response_tokens for trajectory in trajectories)
    values: dict[str, Value] = {
        "reward/mean": Ratio(sum(rewards), len(rewards)),
        "reward/std": Spread(len(rewards), sum(rewards), sum(reward * reward for reward in rewards)),
        "response_tokens/mean": Ratio(sum(lengths), len(lengths)),
        "response_tokens/max": Max(lengths[-1] if lengths else None),
    }
    if without := _without_reference(trajectories):
        values["reward/without_reference_ratio"] = Ratio(sum(without), len(without))
    scores = [trajectory.model_score for trajectory in trajectories if trajectory.model_score is not None]
    if scores:
        values["reward/model_mean"] = Ratio(sum(scores), len(scores))
    if lengths:
        values["response_tokens/median"] = Last(
            (lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) / 2
        )
        values["response_tokens/quantiles"] = Quantiles.of(lengths)
    return values


def _without_reference(trajectories: Sequence[TrajectoryMeta]) -> list[bool]:
    """For each trajectory that earned at least half of the step's highest reward: whether it does not name
    the reference answer."""
    least = max((trajectory.reward for trajectory in trajectories), default=0.0) / 2
    rewarded = [dict(trajectory.facts) for trajectory in trajectories if trajectory.reward >= least > 0]
    return [not facts[NAMES_REFERENCE] for facts in rewarded if NAMES_REFERENCE in facts]


def filter_values(groups: Sequence[GroupResult], filtered: Sequence[float] | None) -> dict[str, Value]:
    """Dynamic sampling: the share of groups left out for equal rewards, and the mean reward with them,
    unweighted."""
    if filtered is None:
        return {}
    means = [sum(meta.reward for meta in group.trajectories) / len(group.trajectories) for group in groups]
    whole = len(groups) + len(filtered)
    return {
        "trainer/filtered_ratio": Ratio(len(filtered), whole),
        "reward/unfiltered_mean": Ratio(sum(means) + sum(filtered), whole),
    }


def episode_values(trajectories: Sequence[TrajectoryMeta]) -> dict[str, Value]:
    """Turns, tools and facts of the step's trajectories, and the parts of their rewards. Without turns if all
    trajectories have a single turn and no facts."""
    facts, parts = dict[str, Ratio](), dict[str, Ratio]()
    for name, figure in chain.from_iterable(trajectory.facts for trajectory in trajectories):
        if name == NAMES_REFERENCE:
            continue
        found, key = (parts, f"{name}/mean") if name.startswith("reward/") else (facts, f"env/{name}")
        found[key] = found.get(key, Ratio(0.0, 0.0)).merge(Ratio(figure, 1))
    if not facts and all(
        trajectory.num_turns == 1 and not trajectory.num_forks for trajectory in trajectories
    ):
        return {**parts}
    turns = [trajectory.num_turns for trajectory in trajectories]
    return {
        "env/turns_mean": Ratio(sum(turns), len(turns)),
        "env/turns_max": Max(max(turns)),
        "env/tool_s": Ratio(sum(trajectory.tool_s for trajectory in trajectories), len(turns)),
        "env/forks": Sum(sum(trajectory.num_forks for trajectory in trajectories)),
        **facts,
        **parts,
    }


def staleness_values(
    record: StepRecord, window_steps: int, trajectories: Sequence[TrajectoryMeta]
) -> dict[str, Value]:
    """Staleness in versions, and in train steps: a token of version v that is trained in window w, after s of
    its steps, is (w - v) * K + s steps old.

    `mean` and `steps_mean` are over all sampled tokens of the step; `oldest_mean` and `newest_mean` over its
    trajectories.
    """
    sampled = [trajectory for trajectory in trajectories if trajectory.version_tokens]
    counts = [(version, count) for trajectory in sampled for version, count in trajectory.version_tokens]
    in_versions = [(record.window - version, count) for version, count in counts]
    in_steps = [(versions * window_steps + record.step_in_window, count) for versions, count in in_versions]
    oldest = [record.window - trajectory.oldest for trajectory in sampled]
    return {
        "staleness/mean": _weighted_mean(in_versions),
        "staleness/max": Max(max(oldest, default=None)),
        "staleness/oldest_mean": Ratio(sum(oldest), len(oldest)),
        "staleness/newest_mean": Ratio(
            sum(record.window - trajectory.newest for trajectory in sampled), len(sampled)
        ),
        "staleness/histogram": _histogram(oldest),
        "staleness/span_histogram": _histogram([trajectory.span for trajectory in sampled]),
        "staleness/steps_mean": _weighted_mean(in_steps),
        "staleness/steps_max": Max(max((age for age, _ in in_steps), default=None)),
    }


def _histogram(values: Sequence[int]) -> Histogram:
    return Histogram(tuple(values.count(value) for value in range(max(values, default=-1) + 1)))


def _weighted_mean(figures: Sequence[tuple[int, int]]) -> Ratio:
    return Ratio(sum(figure * count for figure, count in figures), sum(count for _, count in figures))


def stale_counts(window: int, groups: Sequence[GroupResult]) -> dict[str, Value]:
    """verl's counts: a trajectory is stale if its newest token is (verl's `param_version_end`), a group if
    all of its tokens are. Lines show the run's totals so far."""
    newest = [[t.newest for t in group.trajectories if t.version_tokens] for group in groups]
    return {
        f"{STALE}stale_samples_processed": Sum(
            sum(max(versions, default=window) < window for versions in newest)
        ),
        f"{STALE}stale_trajectory_processed": Sum(
            sum(version < window for versions in newest for version in versions)
        ),
    }


def partial_values(trajectories: Sequence[TrajectoryMeta]) -> dict[str, Value]:
    """Trajectories sampled by more than one version. Lines show the window's figures so far."""
    spans = [trajectory.span for trajectory in trajectories if trajectory.version_tokens]
    partial = sum(1 for span in spans if span > 0)
    return {
        f"{PARTIAL}total_partial_num": Sum(partial),
        f"{PARTIAL}partial_ratio": Ratio(partial, len(trajectories)),
        f"{PARTIAL}max_partial_span": Max(max(spans, default=None)),
    }


def stretches(
    before: Mapping[str, ExecutorReport], now: Mapping[str, ExecutorReport]
) -> list[ExecutorReport]:
    """The report of every executor that has reported since `before`, with times and sums since then. A new
    executor (or one of a resumed run) counts from its start."""
    made = (_since(before.get(name), report) for name, report in now.items())
    return [stretch for stretch in made if _elapsed_s(stretch) > 0]


def _since(before: ExecutorReport | None, now: ExecutorReport) -> ExecutorReport:
    # it was restarted: its integrals began at 0 again
    if before is None or _elapsed_s(now) < _elapsed_s(before):
        return now
    state_s = {state: seconds - before.state_s.get(state, 0.0) for state, seconds in now.state_s.items()}
    return replace(
        now,
        state_s=state_s,
        sums={key: amount - before.sums.get(key, 0.0) for key, amount in now.sums.items()},
    )


def _elapsed_s(stretch: ExecutorReport) -> float:
    """The time that a report covers, in all states."""
    return sum(stretch.state_s.values())


def utilization(measured: Sequence[ExecutorReport]) -> dict[str, Value]:
    """Idle ratios, slot utilization and tokens/s, as in docs/metrics.md, and times in states.

    Executors that did not report are left out.
    """
    trainers = [stretch for stretch in measured if stretch.role == TRAINER]
    rollouts = [stretch for stretch in measured if stretch.role == ROLLOUT]
    values: dict[str, Value] = {
        f"{STATES}{stretch.name}/{state}": Sum(seconds)
        for stretch in measured
        for state, seconds in stretch.state_s.items()
    }
    if trainers:
        values["trainer/idle_ratio"] = _mean_share(
            lambda one: sum(one.state_s.get(state, 0.0) for state in TRAINER_IDLE), trainers
        )
        values["trainer/tokens_per_s"] = _rate("trained_tokens", trainers)
    if rollouts:
        values["rollouter/idle_ratio"] = _mean_share(lambda one: one.sums.get("idle_s", 0.0), rollouts)
        slots_s = sum(stretch.gauges.get("slots", 0.0) * _elapsed_s(stretch) for stretch in rollouts)
        values["rollouter/slot_utilization"] = Ratio(sum(_of("running_sequence_s", rollouts)), slots_s)
        if waited_s := _of("waiting_trajectory_s", rollouts):  # something has waited for a tool
            values["rollouter/tool_idle_ratio"] = _mean_share(
                lambda one: one.state_s.get(State.WAITING, 0.0), rollouts
            )
            values["rollouter/tool_waiting_ratio"] = Ratio(sum(waited_s), slots_s)
        values["rollouter/tokens_per_s"] = _rate("sampled_tokens", rollouts)
        if len(decode_steps := _of("decode_steps", rollouts)) == len(rollouts):
            values["rollouter/decode_batch_mean"] = Ratio(
                sum(_of("sampled_tokens", rollouts)), sum(decode_steps)
            )
        if evals_s := _of("eval_s", rollouts):
            values["rollouter/eval_s"] = Sum(sum(evals_s) / len(rollouts))
        values |= {
            f"rollouter/{name}": join(told)
            for name, join in ENGINE_FIGURES.items()
            if (told := _of(name, rollouts))
        }
    for scorer in [stretch for stretch in measured if stretch.role == SCORER]:
        idle = _mean_share(lambda one: _elapsed_s(one) - one.state_s.get(State.BUSY, 0.0), [scorer])
        values |= {
            f"{scorer.name}/idle_ratio": idle,
            f"{scorer.name}/tokens_per_s": _rate("scored_tokens", [scorer]),
        }
        if queue := _of("waiting_groups", [scorer]):
            values[f"{scorer.name}/waiting_groups"] = Last(queue[0])
    return values


ENGINE_FIGURES: Mapping[str, Callable[[Sequence[float]], Value]] = {
    "preemptions": lambda counts: Sum(sum(counts)),
    "prompt_tokens": lambda counts: Sum(sum(counts)),
    "cached_prompt_tokens": lambda counts: Sum(sum(counts)),
    "kv_cache_usage": lambda shares: Max(max(shares)),
    "engine_running": lambda counts: Last(sum(counts)),
    "engine_waiting": lambda counts: Last(sum(counts)),
}
"""Figures that only some engines report (as a sum or gauge of that name) -> how the workers' figures are
combined into one."""


def _of(name: str, measured: Sequence[ExecutorReport]) -> list[float]:
    """The sum or gauge of that name, from the executors that report it."""
    both = ({**stretch.gauges, **stretch.sums} for stretch in measured)
    return [figures[name] for figures in both if name in figures]


def overlap(spans: Mapping[str, Sequence[Span]], roles: Mapping[str, str]) -> Overlap:
    """Busy time of trainer and rollout, and of both at once. A side is busy while any of its executors is.
    `spans` use the driver's clock."""
    changes = sorted(
        (time_s, change, roles[name])
        for name, stays in spans.items()
        for span in stays
        if span.state == State.BUSY and roles.get(name) in (TRAINER, ROLLOUT)
        for time_s, change in ((span.start_s, 1), (span.end_s, -1))
    )
    num_busy = {TRAINER: 0, ROLLOUT: 0}
    busy_s = {TRAINER: 0.0, ROLLOUT: 0.0}
    both_s = 0.0
    for (time_s, change, role), (until_s, _, _) in pairwise([*changes, (math.inf, 0, "")]):
        num_busy[role] += change
        passed_s = until_s - time_s
        for side in busy_s:
            if num_busy[side]:
                busy_s[side] += passed_s
        if all(num_busy.values()):
            both_s += passed_s
    return Overlap(both_s, busy_s[TRAINER], busy_s[ROLLOUT])


def _mean_share(part_s: Callable[[ExecutorReport], float], measured: Sequence[ExecutorReport]) -> Ratio:
    """The mean of part / elapsed over executors. Their mean elapsed time is its weight when steps are
    merged."""
    mean_share = sum(part_s(stretch) / _elapsed_s(stretch) for stretch in measured) / len(measured)
    mean_elapsed_s = sum(map(_elapsed_s, measured)) / len(measured)
    return Ratio(mean_share * mean_elapsed_s, mean_elapsed_s)


def _rate(name: str, measured: Sequence[ExecutorReport]) -> Ratio:
    """A side's total amount per second. Its executors work at the same time, so the mean of their times is
    the side's time."""
    return Ratio(sum(_of(name, measured)), sum(map(_elapsed_s, measured)) / len(measured))
