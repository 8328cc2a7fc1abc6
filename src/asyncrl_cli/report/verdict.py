"""What a run's figures mean, in words: who idled and why, whether the data was too stale, what to change.

Every sentence names its figures. Nothing here is simulated: `asyncrl tune RUN` searches for the best
setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl_cli.base.errors import counted
from asyncrl_cli.measure.bands import SIGNALS
from asyncrl_cli.observe.format import clock, number, scored, share, small
from asyncrl_cli.observe.line_figures import Totals
from asyncrl_cli.observe.line_types import EventLine
from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.report.side_by_side import change_of, change_text

Weight = Literal["good", "note", "bad"]
MOST_WARNINGS = 5
MOST_PROMPTS = 100_000
"""More eval prompts than this are not suggested: no change of practical size needs as many."""
IDLE = 0.15
"""A side that idled more than this is worth a change. Less comes from the edges of steps and syncs."""
APART = 0.2
"""If the idle ratios differ by no more than this, neither side is said to limit the run."""
EMPTY = 0.6
"""If fewer slots are used while workers are busy, decoding runs with small batches, at nearly the cost of
full ones."""
DEAR = 0.05
"""A part of a step (a checkpoint, gathering) above this share of the time is worth a change."""
CLIPPED = 0.2
"""Share of clipped tokens above which much of a batch teaches nothing."""
WITHOUT_REFERENCE = 0.2
"""Share of rewarded responses without the reference answer above which they are worth a look."""
FAILED_CALLS = 0.2
"""Failed tool calls per trajectory above which it is worth a look: a model that learns a tool makes a few."""
SIGNS = {
    "correction/kl": (
        "too stale?",
        "The policy was {} nats per token away from the policy that had sampled the data",
    ),
    "correction/effective_ratio": (
        "importance weights",
        "The effective sample size of the weights was {} of the tokens",
    ),
    "ref/kl": ("reference", "The policy was {} nats per token away from its reference"),
}
"""For each signal that the loop warns about (measure/bands.py): its topic and its sentence."""
BESIDE = {
    "eval": (
        "evals",
        "Evals held workers while the trainer waited",
        "Fewer eval.prompts, or a larger eval.every_versions.",
    ),
    "wait_scores": (
        "scores",
        "The trainer waited for scores",
        "More resources for the scorers (placement.tasks).",
    ),
    "checkpoint": ("checkpoints", "The trainer waited for checkpoints", "A larger checkpoint.every_steps."),
    "gather": (
        "gathering",
        "The trainer gathered weights, or waited for workers to take them",
        "A larger trigger_parameter_sync_step.",
    ),
}
"""For each part of a step that is neither training nor waiting for groups: its topic, its sentence, and what
to change."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence; `change`: what to do about it, if anything."""

    about: str
    weight: Weight
    text: str
    change: str = ""


def verdict_of(totals: Totals, settings: LoopSettings, *, is_divisible: bool) -> list[Remark]:
    """The findings, in the order in which a page shows them. `is_divisible`: a side has more than one
    process, so that resources could be divided differently."""
    return [
        *_idle(totals, settings.schedule.mode, is_divisible),
        *_beside(totals),
        *_staleness(totals, settings),
        *_signals(totals, settings.profile.algorithm),
        *_syncs(totals, settings),
        *_fooled(totals),
        *_losses(totals),
    ]


def learned(evals: Sequence[EventLine], totals: Totals, begin: str) -> Remark:
    """`evals`: those of the held-out split, in order. `begin`: a text before the sentences. Only a rise whose
    interval leaves out 0 is good news."""
    if len(evals) < 2:
        first, last = totals.first.get("reward/mean"), totals.last.get("reward/mean")
        begin += (
            f"Training reward went from {number(first, 3)} to {number(last, 3)}; there are no two "
            "evals "
            "to compare."
        )
        if first == last == 0 and not any(event.get("reward_mean") for event in evals):
            begin += " A reward of 0 everywhere teaches nothing: `asyncrl samples` shows the answers."
        return Remark("learning", "note", begin)
    begin += f"Held-out reward went from {scored(evals[0])} to {scored(evals[-1])}"
    change = change_of(evals[0], evals[-1])
    if change is None:
        return Remark(
            "learning", "note", f"{begin}. An older version recorded no intervals, so it may be chance."
        )
    over = f"{'the same ' if change.paired else ''}{counted(change.num_prompts, 'prompt')}"
    text = f"{begin}, a change of {change_text(change)} over {over}"
    if change.is_clear:
        return Remark("learning", "good" if change.mean > 0 else "bad", f"{text}.")
    enough = change.enough_prompts
    more = (
        (f"A change of this size would show with about eval.prompts = {enough}.")
        if enough and enough <= MOST_PROMPTS
        else ""
    )
    return Remark("learning", "note", f"{text}: too few prompts to tell it from no change.", more)


def warned(warnings: Sequence[EventLine], name: str) -> Iterator[Remark]:
    """What the run warned of, each text once, the first ones of a run with many."""
    texts: dict[str, EventLine] = {}
    for event in warnings:
        texts.setdefault(str(event.get("message", "")), event)
    for text, event in list(texts.items())[:MOST_WARNINGS]:
        yield Remark("warning", "bad", f"At {clock(event.get('time_s'))}: {text}")
    if (more := len(texts) - MOST_WARNINGS) > 0:
        yield Remark("warning", "note", f"And {counted(more, 'further warning')}.", f"asyncrl logs {name}")


def _idle(totals: Totals, mode: str, is_divisible: bool) -> Iterator[Remark]:
    trainer, rollout = totals.mean("trainer/idle_ratio"), totals.mean("rollouter/idle_ratio")
    if trainer is None or rollout is None:
        return
    slots, evals = totals.mean("rollouter/slot_utilization"), totals.share("eval")
    trainer = max(trainer - evals, 0.0)  # generating more at a time does not make evals shorter
    besides = f", and {share(evals)} more during evals;" if evals > DEAR else ","
    figures = f"the trainer idled {share(trainer)} of the time{besides} the rollout workers {share(rollout)}."
    if mode == "colocate":
        text = f"Each side while the other used their shared resources: {figures}"
        yield Remark(
            "who idled", "note", text, "Compare with an asynchronous mode: asyncrl bench --compare colocate."
        )
    elif max(trainer, rollout) <= IDLE:
        yield Remark("who idled", "good", f"Hardly anyone: {figures}")
    elif min(trainer, rollout) > IDLE and abs(trainer - rollout) <= APART:
        text = f"Both: {figures} They wait for each other: {_waits(totals)}"
        yield Remark("who idled", "bad", text, _looser(mode))
    elif trainer > rollout:
        yield _generation_limits(figures, slots, totals, mode, is_divisible)
    else:
        text = (
            f"Mostly the rollout workers: {figures} Training limits the run; workers stand still because "
            "no group may start yet."
        )
        change = _more("the trainer", "placement.trainer_workers", is_divisible)
        why = "More staleness would not help: groups that are generated earlier only wait longer."
        yield Remark("who idled", "bad", text, f"{change}. {why}")


def _more(side: str, key: str, is_divisible: bool) -> str:
    if is_divisible:
        return f"Give {side} a larger share of the resources (placement.ratio or {key})"
    return f"If there are free cores or GPUs, give {side} a second process ({key} = 2)"


def _generation_limits(
    figures: str, slots: float | None, totals: Totals, mode: str, is_divisible: bool
) -> Remark:
    text = f"Mostly the trainer: {figures} Generation limits the run; {_waits(totals)}"
    if slots is not None and slots < EMPTY:
        text += (
            f" Only {share(slots)} of the slots were used: the longest responses keep workers busy with "
            "small batches."
        )
        longer = "Let more groups run at once: a larger async_training.staleness_threshold"
        return Remark("who idled", "bad", text, f"{longer}{_or_partial(mode)}.")
    used = (
        ""
        if slots is None
        else (f" {share(slots)} of the slots were used, so the workers themselves are the limit.")
    )
    shorter = "ask for shorter responses (rollout.max_response_tokens)"
    change = f"{_more('rollout', 'rollout.workers', is_divisible)}, or {shorter}."
    return Remark("who idled", "bad", text + used, change)


def _waits(totals: Totals) -> str:
    return f"the trainer waited for groups {share(totals.share('wait_data'))} of the time."


def _looser(mode: str) -> str:
    if mode in ("on-policy-pipeline", "stream-off-policy"):
        return (
            "Allow staleness (async_training.staleness_threshold = 0.5 or 1), so that both can work at "
            "the same time."
        )
    return f"Allow more to be generated ahead (async_training.staleness_threshold){_or_partial(mode)}."


def _or_partial(mode: str) -> str:
    return "" if mode == "partial-rollout" else ", or async_training.partial_rollout = true"


def _beside(totals: Totals) -> Iterator[Remark]:
    """What takes time besides training and generation."""
    for part, (about, text, change) in BESIDE.items():
        if (spent := totals.share(part)) > DEAR:
            yield Remark(about, "note", f"{text} {share(spent)} of the time.", change)
    tools = totals.mean("rollouter/tool_idle_ratio") or 0.0
    if tools > DEAR:
        text = (
            f"Workers ran nothing {share(tools)} of the time because all their trajectories waited for tools."
        )
        yield Remark(
            "tools", "note", text, "rollout.hold_slots = false lets other trajectories use their slots."
        )


def _staleness(totals: Totals, settings: LoopSettings) -> Iterator[Remark]:
    mean, most, bound = (
        totals.mean("staleness/mean"),
        totals.most("staleness/max"),
        settings.schedule.max_staleness,
    )
    if mean is None or most is None:
        return
    if settings.profile.async_training.on_stale != "wait":
        limit = f'on_stale = "{settings.profile.async_training.on_stale}" sets no strict bound'
        yield Remark(
            "staleness",
            "note",
            f"Tokens were {number(mean)} versions old on average, {most:.0f} at most; {limit}.",
        )
    elif bound == 0 and most == 0:
        yield Remark(
            "staleness", "good", "None: every token was trained in the window of the version that sampled it."
        )
    else:
        held = "held" if most <= bound else "was broken: please report it"
        text = (
            f"Tokens were {number(mean)} versions old on average, {most:.0f} at most: the bound of "
            f"{bound} {held}."
        )
        yield Remark("staleness", "good" if most <= bound else "bad", text)


def _signals(totals: Totals, algorithm: AlgorithmSection) -> Iterator[Remark]:
    """The figures of training that should stay within a band, and the loop's advice if their mean does
    not."""
    for name, key, side, advice in SIGNALS:
        figure, limit = totals.mean(name), getattr(algorithm, key)
        if figure is None:
            continue
        about, text = SIGNS[name]
        is_outside = figure < limit if side == "below" else figure > limit
        told = f"{text.format(number(figure, 4))}{_by_age(totals, name)}"
        text = f"{told}: {side if is_outside else 'within'} the limit of {limit:g}."
        yield Remark(
            about,
            "bad" if is_outside else "good",
            text,
            f"{advice[:1].upper()}{advice[1:]}." if is_outside else "",
        )
    if (clipped := totals.mean("correction/clipped_ratio") or 0.0) > CLIPPED:
        text = f"The loss clipped {share(clipped)} of the tokens, which then teach nothing."
        yield Remark(
            "clipping",
            "bad",
            text,
            "A smaller trainer.lr, wider clip_ratio_low and clip_ratio_high, or less staleness.",
        )


def _by_age(totals: Totals, name: str) -> str:
    fresh, stale = (totals.mean(f"{name}/stale_{age}") for age in (0, 1))
    if fresh is None or stale is None:
        return ""
    return f" ({number(fresh, 4)} for fresh tokens, {number(stale, 4)} for those one version old)"


def _syncs(totals: Totals, settings: LoopSettings) -> Iterator[Remark]:
    most, limit = totals.most("sync/logprob_abs_diff_median"), settings.max_logprob_diff
    if most is None:
        return
    text = (
        f"Trainer and workers had a median absolute logprob difference of at most {small(most)}; the "
        f"limit is {small(limit)}."
    )
    doubt = "See docs/weights.md: a worker may be computing with other weights than it was sent."
    yield (
        Remark("weight syncs", "good", text) if most <= limit else Remark("weight syncs", "bad", text, doubt)
    )


def _fooled(totals: Totals) -> Iterator[Remark]:
    """Rewarded responses that do not contain the reference answer."""
    without = totals.mean("reward/without_reference_ratio")
    if without is None or without <= WITHOUT_REFERENCE:
        return
    text = (
        f"In {share(without)} of the rewarded responses the reference answer does not stand, in any "
        "usual "
        "form."
    )
    look = (
        "Unless many answers are right, the reward may be fooled: look at `asyncrl samples RUN`, and at "
        "the rehearsal in `plan`."
    )
    yield Remark("reward", "note", text, look)


def _losses(totals: Totals) -> Iterator[Remark]:
    """What was lost, and what failed."""
    discarded, trained = totals.last.get("waste/tokens_discarded", 0), totals.last.get("tokens_trained", 0)
    wasted = discarded / max(discarded + trained, 1)
    if wasted > DEAR:
        yield Remark(
            "waste", "note", f"{share(wasted)} of the sampled tokens were discarded and never trained."
        )
    if restarts := totals.last.get("rollouter/restarts", 0):
        text = f"Rollout workers were restarted {restarts:.0f} times."
        yield Remark("restarts", "note", text, "`asyncrl logs RUN` shows their last output.")
    if skipped := totals.mean("train/skipped_steps"):
        text = (
            f"On average {number(skipped, 3)} optimizer steps per train step were skipped: their "
            "gradient "
            "was not finite."
        )
        yield Remark("gradients", "bad", text, 'A smaller trainer.lr, or model.dtype = "float32".')
    if (failed_calls := totals.mean("env/failed_calls") or 0.0) > FAILED_CALLS:
        text = (
            f"On average {number(failed_calls)} tool calls per trajectory raised, named no tool, or "
            "could "
            "not be read."
        )
        yield Remark(
            "tool calls", "note", text, "`asyncrl samples RUN` shows the calls, and what the model was told."
        )
    failed = {
        key.removeprefix("env/failed/"): value
        for key, value in totals.last.items()
        if key.startswith("env/failed/")
    }
    if failed:
        kinds = ", ".join(f"{kind} {value:.0f}" for kind, value in failed.items())
        yield Remark("failed trajectories", "note", f"Without a reward: {kinds}.")
