"""The metrics of one train step as typed values: the formulas of docs/metrics.md.

From trajectories: rewards, lengths, staleness, partial rollouts. From executors: how they spent their time,
by their cumulative integrals; only the overlap of both sides is computed from spans. What was not measured
has the value None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from statistics import median, stdev

from asyncrl_cli.contracts.environment import NAMES_ANSWER
from asyncrl_cli.contracts.events import EvalSummary, StepRecord
from asyncrl_cli.contracts.prompt_group import GroupResult, TrajectoryMeta
from asyncrl_cli.measure.machines import GENERATE, LOGP, PARAM_UPDATE, REF_LOGP
from asyncrl_cli.measure.states import ExecutorReport, Span, State
from asyncrl_cli.measure.values import Histogram, Last, Max, Overlap, Quantiles, Ratio, Spread, Sum, Value

NAMES_REFERENCE = f"reward/{NAMES_ANSWER}"
"""The fact of a trajectory that says whether it names the reference answer."""
PARTIAL = "fully_async/partial/"
BIAS = "bias/"
STALE = "fully_async/count/"
TRAINER, ROLLOUT, SCORER = "trainer", "rollout", "scorer"
FLOW = ("feed", GENERATE, ROLLOUT, "reward", SCORER, LOGP, REF_LOGP, TRAINER, PARAM_UPDATE)
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
    roles = {name: report.role for name, report in record.reports.items()}
    values: dict[str, Value] = {
        "step": Last(record.step),
        "version": Last(record.version),
        "window": Last(record.window),
        "time_s": Last(None),
        "groups_trained": Last(record.ledger["trained"]),
        "tokens_trained": Last(record.tokens_trained),
        **reward_values(trajectories),
    }
    for summary in record.evals:  # of a set, the last eval that ended since the previous line counts
        values |= eval_values(summary)
    values |= {f"timing/{part}_s": Sum(seconds) for part, seconds in record.timing_s.items()}
    measured = stretches(before, record.reports)
    values |= utilization(measured, record.lent) | data_values(measured)
    values |= {name: Sum(amount) for name, amount in record.lending.items()}
    values["overlap_ratio"] = overlap(record.spans, roles)
    values |= staleness_values(record, window_steps)
    values |= {f"sync/{name}": Last(figure) for name, figure in record.sync.items()}
    values["rollouter/restarts"] = Last(record.restarts)
    values |= episode_values(trajectories)
    values["data/orphans"] = Last(record.orphans)
    values |= {f"env/failed/{kind}": Last(number) for kind, number in record.failures.items()}
    values["waste/tokens_discarded"] = Last(record.tokens_discarded)
    values |= filter_values(record.groups, record.filtered)
    values |= {name: Last(figure) for name, figure in {**record.feed, **record.governor}.items()}
    values |= record.bias
    values |= record.train.metrics
    return values | {f"ledger/{account}": Last(number) for account, number in record.ledger.items()}


def eval_values(summary: EvalSummary) -> dict[str, Value]:
    """The figures of one eval set, under `eval/` (the held-out split) or `eval/<set>/`."""
    figures: dict[str, int | float] = {
        "version": summary.version,
        "reward_mean": summary.reward_mean,
        "num_prompts": summary.num_prompts,
        "num_failed": summary.num_failed,
        "response_tokens_median": summary.response_tokens_median,
        "truncated_ratio": summary.truncated_ratio,
    }
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
        "reward/mean": _mean(rewards),
        "reward/std": Spread(len(rewards), sum(rewards), sum(reward * reward for reward in rewards)),
        "response_tokens/mean": _mean(lengths),
        "response_tokens/max": Max(lengths[-1] if lengths else None),
    }
    # Of those that earned at least half of the step's highest reward: which do not name the reference?
    least = max(rewards, default=0.0) / 2
    rewarded = [dict(trajectory.facts) for trajectory in trajectories if trajectory.reward >= least > 0]
    if without := [not facts[NAMES_REFERENCE] for facts in rewarded if NAMES_REFERENCE in facts]:
        values["reward/without_reference_ratio"] = _mean(without)
    if scores := [one.model_score for one in trajectories if one.model_score is not None]:
        values["reward/model_mean"] = _mean(scores)
    if lengths:
        values["response_tokens/median"] = Last(float(median(lengths)))
        values["response_tokens/quantiles"] = Quantiles.of(lengths)
    return values


def filter_values(groups: Sequence[GroupResult], filtered: Sequence[float] | None) -> dict[str, Value]:
    """Dynamic sampling: the share of groups left out for equal rewards, and the mean reward with them,
    unweighted."""
    if filtered is None:
        return {}
    means = [sum(meta.reward for meta in group.trajectories) / len(group.trajectories) for group in groups]
    return {
        "trainer/filtered_ratio": Ratio(len(filtered), len(groups) + len(filtered)),
        "reward/unfiltered_mean": _mean([*means, *filtered]),
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
    if not facts and all(one.num_turns == 1 and not one.num_forks for one in trajectories):
        return {**parts}
    turns = [trajectory.num_turns for trajectory in trajectories]
    return {
        "env/turns_mean": _mean(turns),
        "env/turns_max": Max(max(turns)),
        "env/tool_s": _mean([trajectory.tool_s for trajectory in trajectories]),
        "env/forks": Sum(sum(trajectory.num_forks for trajectory in trajectories)),
        **facts,
        **parts,
    }


def staleness_values(record: StepRecord, window_steps: int) -> dict[str, Value]:
    """Staleness in versions, and in train steps: a token of version v that is trained in window w, after s of
    its steps, is (w - v) * K + s steps old. Trajectories sampled by more than one version (lines show the
    window's figures so far). And verl's counts: a trajectory is stale if its newest token is (verl's
    `param_version_end`), a group if all of its tokens are (lines show the run's totals so far).

    `mean` and `steps_mean` are over all sampled tokens of the step; `oldest_mean` and `newest_mean` over its
    trajectories.
    """
    window = record.window
    groups = [[one for one in group.trajectories if one.version_tokens] for group in record.groups]
    sampled = [trajectory for group in groups for trajectory in group]
    ages = [(window - version, count) for one in sampled for version, count in one.version_tokens]
    in_steps = [(age * window_steps + record.step_in_window, count) for age, count in ages]
    oldest = [window - trajectory.oldest for trajectory in sampled]
    newest = [window - trajectory.newest for trajectory in sampled]
    spans = [trajectory.span for trajectory in sampled]
    num_partial = sum(span > 0 for span in spans)
    num_trajectories = sum(len(group.trajectories) for group in record.groups)
    num_stale_groups = sum(bool(group) and all(one.newest < window for one in group) for group in groups)
    return {
        "staleness/mean": _weighted_mean(ages),
        "staleness/max": Max(max(oldest, default=None)),
        "staleness/oldest_mean": _mean(oldest),
        "staleness/newest_mean": _mean(newest),
        "staleness/histogram": _histogram(oldest),
        "staleness/span_histogram": _histogram(spans),
        "staleness/steps_mean": _weighted_mean(in_steps),
        "staleness/steps_max": Max(max((age for age, _ in in_steps), default=None)),
        f"{STALE}stale_samples_processed": Sum(num_stale_groups),
        f"{STALE}stale_trajectory_processed": Sum(sum(age > 0 for age in newest)),
        f"{PARTIAL}total_partial_num": Sum(num_partial),
        f"{PARTIAL}partial_ratio": Ratio(num_partial, num_trajectories),
        f"{PARTIAL}max_partial_span": Max(max(spans, default=None)),
    }


def _mean(figures: Sequence[float]) -> Ratio:
    return Ratio(sum(figures), len(figures))


def _weighted_mean(figures: Sequence[tuple[int, int]]) -> Ratio:
    return Ratio(sum(figure * count for figure, count in figures), sum(count for _, count in figures))


def _histogram(values: Sequence[int]) -> Histogram:
    return Histogram(tuple(values.count(value) for value in range(max(values, default=-1) + 1)))


def stretches(
    before: Mapping[str, ExecutorReport], now: Mapping[str, ExecutorReport]
) -> list[ExecutorReport]:
    """The report of every executor that has reported since `before`, with times and sums since then. A new
    executor (or one of a resumed run) counts from its start."""
    found = []
    for name, report in now.items():
        earlier = before.get(name)
        # One that was restarted counts from its start, too: its integrals began at 0 again.
        if earlier is not None and _elapsed_s(report) >= _elapsed_s(earlier):
            state_s = {state: s - earlier.state_s.get(state, 0.0) for state, s in report.state_s.items()}
            sums = {key: amount - earlier.sums.get(key, 0) for key, amount in report.sums.items()}
            report = replace(report, state_s=state_s, sums=sums)
        if _elapsed_s(report) > 0:
            found.append(report)
    return found


def _elapsed_s(stretch: ExecutorReport) -> float:
    """The time that a report covers, in all states."""
    return sum(stretch.state_s.values())


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


def utilization(measured: Sequence[ExecutorReport], lent: Collection[str] = ()) -> dict[str, Value]:
    """Idle ratios, slot utilization and tokens/s, as in docs/metrics.md, and times in states. Workers on lent
    devices count for tokens, and not as idle while they sleep.

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
        idle_s = [sum(one.state_s.get(state, 0.0) for state in TRAINER_IDLE) for one in trainers]
        values["trainer/idle_ratio"] = _mean_share(idle_s, trainers)
        values["trainer/tokens_per_s"] = _rate("trained_tokens", trainers)
    if own := [one for one in rollouts if one.name not in lent]:
        idle_s = [one.sums.get("idle_s", 0.0) for one in own]
        values["rollouter/idle_ratio"] = _mean_share(idle_s, own)
        slots_s = sum(stretch.gauges.get("slots", 0.0) * _elapsed_s(stretch) for stretch in own)
        values["rollouter/slot_utilization"] = Ratio(sum(_reported("running_sequence_s", own)), slots_s)
        if waited_s := _reported("waiting_trajectory_s", own):  # something has waited for a tool
            idle_s = [one.state_s.get(State.WAITING, 0.0) for one in own]
            values["rollouter/tool_idle_ratio"] = _mean_share(idle_s, own)
            values["rollouter/tool_waiting_ratio"] = Ratio(sum(waited_s), slots_s)
        if evals_s := _reported("eval_s", own):
            values["rollouter/eval_s"] = Sum(sum(evals_s) / len(own))
    if rollouts:
        values["rollouter/tokens_per_s"] = _rate("sampled_tokens", rollouts)
        if len(decode_steps := _reported("decode_steps", rollouts)) == len(rollouts):
            tokens = sum(_reported("sampled_tokens", rollouts))
            values["rollouter/decode_batch_mean"] = Ratio(tokens, sum(decode_steps))
        for name, join in ENGINE_FIGURES.items():
            if reported := _reported(name, rollouts):
                values[f"rollouter/{name}"] = join(reported)
    for scorer in [stretch for stretch in measured if stretch.role == SCORER]:
        idle = _elapsed_s(scorer) - scorer.state_s.get(State.BUSY, 0.0)
        values[f"{scorer.name}/idle_ratio"] = _mean_share([idle], [scorer])
        values[f"{scorer.name}/tokens_per_s"] = _rate("scored_tokens", [scorer])
        if queue := _reported("waiting_groups", [scorer]):
            values[f"{scorer.name}/waiting_groups"] = Last(queue[0])
    return values


def data_values(measured: Sequence[ExecutorReport]) -> dict[str, Value]:
    """What went through the data store. Without anything that no process has reported."""
    names = ("bytes_put", "bytes_fetched", "bytes_copied", "fetch_s")
    sums = {name: sum(found) for name in names if (found := _reported(f"data_{name}", measured))}
    copied = sums.pop("bytes_copied", None)
    values: dict[str, Value] = {f"data/{name}": Sum(amount) for name, amount in sums.items()}
    return values if copied is None else values | {"data/copies": Ratio(copied, sums["bytes_fetched"])}


def _reported(name: str, measured: Sequence[ExecutorReport]) -> list[float]:
    """The sum or gauge of that name, from the executors that report it."""
    both = ({**stretch.gauges, **stretch.sums} for stretch in measured)
    return [figures[name] for figures in both if name in figures]


def overlap(spans: Mapping[str, Sequence[Span]], roles: Mapping[str, str]) -> Overlap:
    """Busy time of trainer and rollout, and of both at once. A side is busy while any of its executors is.
    `spans` use the driver's clock."""
    changes = sorted(
        (time_s, change, roles[name])
        for name, its_spans in spans.items()
        for span in its_spans
        if span.state in (State.BUSY, State.SCORING) and roles.get(name) in (TRAINER, ROLLOUT)
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


def _mean_share(parts_s: Sequence[float], measured: Sequence[ExecutorReport]) -> Ratio:
    """The mean of part / elapsed over executors. Their mean elapsed time is its weight when steps are
    merged."""
    elapsed_s = [_elapsed_s(stretch) for stretch in measured]
    mean_share = sum(part / whole for part, whole in zip(parts_s, elapsed_s, strict=True)) / len(measured)
    mean_elapsed_s = sum(elapsed_s) / len(measured)
    return Ratio(mean_share * mean_elapsed_s, mean_elapsed_s)


def _rate(name: str, measured: Sequence[ExecutorReport]) -> Ratio:
    """A side's total amount per second. Its executors work at the same time, so the mean of their times is
    the side's time."""
    return Ratio(sum(_reported(name, measured)), sum(map(_elapsed_s, measured)) / len(measured))
