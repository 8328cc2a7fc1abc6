"""What a run's figures mean, in words: who idled and why, whether the data was too stale, what to change.

Every sentence names its figures. Nothing here is simulated: `asyncrl tune RUN` searches for the best
setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl_cli.base.errors import counted
from asyncrl_cli.contracts.prompt_group import MIXED
from asyncrl_cli.measure.bands import SIGNALS
from asyncrl_cli.observe.format import clock, number, scored, share, small
from asyncrl_cli.observe.run_lines import EventLine, Totals
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.report.side_by_side import change_of, change_text

Weight = Literal["good", "note", "bad"]
MOST_WARNINGS = 5
MOST_PROMPTS = 100_000
"""More eval prompts than this are not suggested: no change of practical size needs as many."""
IDLE = 0.15
"""A side that idled more than this is worth a change. Less comes from the edges of steps and syncs."""
SIMILAR_IDLE = 0.2
"""If the idle ratios differ by no more than this, neither side is said to limit the run."""
FEW_SLOTS = 0.6
"""If fewer slots are used while workers are busy, decoding runs with small batches, at nearly the cost of
full ones."""
COSTLY = 0.05
"""A part of a step (a checkpoint, gathering) above this share of the time is worth a change."""
OVER_TARGET = 1.25
"""KL above the governor's target by this much is more than the scatter of its windows."""
CLIPPED = 0.2
"""Share of clipped tokens above which much of a batch teaches nothing."""
WITHOUT_REFERENCE = 0.2
"""Share of rewarded responses without the reference answer above which they are worth a look."""
CLEAR_ERRORS = 3.0
"""A selection is biased if it is more standard errors than this from all: those of few groups are a bit too
small."""
BIASED = 0.1
"""Standard deviations between what was trained and all above which it is worth a change."""
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
OTHER_PARTS = {
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


def learned(evals: Sequence[EventLine], totals: Totals, begin: str) -> Remark:
    """`evals`: those of the held-out split, in order. `begin`: a text before the sentences. Only a rise whose
    interval leaves out 0 is good news."""
    if len(evals) < 2:
        first, last = totals.first.get("reward/mean"), totals.last.get("reward/mean")
        begin += f"Training reward went from {number(first, 3)} to {number(last, 3)}; "
        begin += "there are no two evals to compare."
        if first == last == 0 and not any(event.get("reward_mean") for event in evals):
            begin += " A reward of 0 everywhere teaches nothing: `asyncrl samples` shows the answers."
        return Remark("learning", "note", begin)
    begin += f"Held-out reward went from {scored(evals[0])} to {scored(evals[-1])}"
    change = change_of(evals[0], evals[-1])
    if change is None:
        unknown = "An older version recorded no intervals, so it may be chance."
        return Remark("learning", "note", f"{begin}. {unknown}")
    over = f"{'the same ' if change.paired else ''}{counted(change.num_prompts, 'prompt')}"
    text = f"{begin}, a change of {change_text(change)} over {over}"
    if change.is_clear:
        return Remark("learning", "good" if change.mean > 0 else "bad", f"{text}.")
    enough, more = change.enough_prompts, ""
    if enough and enough <= MOST_PROMPTS:
        more = f"A change of this size would show with about eval.prompts = {enough}."
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


def verdict_of(totals: Totals, settings: LoopSettings, *, is_divisible: bool) -> list[Remark]:
    """The findings, in the order in which a page shows them. `is_divisible`: a side has more than one
    process, so that resources could be divided differently."""
    idle = _idle(totals, settings.schedule.mode, is_divisible)
    data = [*_data(totals, settings), *_selection(totals, settings)]
    return [*([idle] if idle else []), *_costs(totals), *data, *_losses(totals)]


def _idle(totals: Totals, mode: str, is_divisible: bool) -> Remark | None:
    """Which side waited for the other, and what would let it work."""
    trainer, rollout = totals.mean("trainer/idle_ratio"), totals.mean("rollouter/idle_ratio")
    if trainer is None or rollout is None:
        return None
    evals = totals.share("eval")
    trainer = max(trainer - evals, 0.0)  # generating more at a time does not make evals shorter
    besides = f", and {share(evals)} more during evals;" if evals > COSTLY else ","
    figures = f"the trainer idled {share(trainer)} of the time{besides} the rollout workers {share(rollout)}."
    waits = f"the trainer waited for groups {share(totals.share('wait_data'))} of the time."
    or_partial = "" if mode == "partial-rollout" else ", or async_training.partial_rollout = true"

    def more(side: str, key: str) -> str:
        if is_divisible:
            return f"Give {side} a larger share of the resources (placement.ratio or {key})"
        return f"If there are free cores or GPUs, give {side} a second process ({key} = 2)"

    if mode == "colocate":
        text = f"Each side while the other used their shared resources: {figures}"
        compare = "Compare with an asynchronous mode: asyncrl bench --compare colocate."
        return Remark("who idled", "note", text, compare)
    if max(trainer, rollout) <= IDLE:
        return Remark("who idled", "good", f"Hardly anyone: {figures}")
    if min(trainer, rollout) > IDLE and abs(trainer - rollout) <= SIMILAR_IDLE:
        ahead = f"Allow more to be generated ahead (async_training.staleness_threshold){or_partial}."
        if mode in ("on-policy-pipeline", "stream-off-policy"):
            ahead = "Allow staleness (async_training.staleness_threshold = 0.5 or 1), so that both can work "
            ahead += "at the same time."
        return Remark("who idled", "bad", f"Both: {figures} They wait for each other: {waits}", ahead)
    if trainer <= rollout:
        text = f"Mostly the rollout workers: {figures} Training limits the run; "
        text += "workers stand still because no group may start yet."
        why = "More staleness would not help: groups that are generated earlier only wait longer."
        return Remark("who idled", "bad", text, f"{more('the trainer', 'placement.trainer_workers')}. {why}")
    text = f"Mostly the trainer: {figures} Generation limits the run; {waits}"
    slots = totals.mean("rollouter/slot_utilization")
    if slots is not None and slots < FEW_SLOTS:
        text += f" Only {share(slots)} of the slots were used: "
        text += "the longest responses keep workers busy with small batches."
        longer = "Let more groups run at once: a larger async_training.staleness_threshold"
        return Remark("who idled", "bad", text, f"{longer}{or_partial}.")
    if slots is not None:
        text += f" {share(slots)} of the slots were used, so the workers themselves are the limit."
    shorter = "ask for shorter responses (rollout.max_response_tokens)"
    return Remark("who idled", "bad", text, f"{more('rollout', 'rollout.workers')}, or {shorter}.")


def _costs(totals: Totals) -> Iterator[Remark]:
    """What takes time besides training and generation."""
    for part, (about, text, change) in OTHER_PARTS.items():
        if (spent := totals.share(part)) > COSTLY:
            yield Remark(about, "note", f"{text} {share(spent)} of the time.", change)
    tools = totals.mean("rollouter/tool_idle_ratio") or 0.0
    if tools > COSTLY:
        text = f"Workers ran nothing {share(tools)} of the time because all their trajectories waited for "
        text += "tools."
        change = "rollout.hold_slots = false lets other trajectories use their slots."
        yield Remark("tools", "note", text, change)


def _data(totals: Totals, settings: LoopSettings) -> Iterator[Remark]:
    """Whether the data was too old: its age, the figures of training that should stay within a band (and the
    loop's advice if their mean does not), and whether workers computed with the trainer's weights."""
    training, algorithm = settings.profile.async_training, settings.profile.algorithm
    mean, most = totals.mean("staleness/mean"), totals.most("staleness/max")
    if mean is not None and most is not None:
        bound = settings.schedule.max_staleness
        ages = f"Tokens were {number(mean)} versions old on average, {most:.0f} at most"
        if training.on_stale == "accept":
            yield Remark("staleness", "note", f'{ages}; on_stale = "accept" sets no strict bound.')
        elif bound == most == 0:
            text = "None: every token was trained in the window of the version that sampled it."
            yield Remark("staleness", "good", text)
        else:
            held = "held" if most <= bound else "was broken: please report it"
            text = f"{ages}: the bound of {bound} {held}."
            yield Remark("staleness", "good" if most <= bound else "bad", text)
    for name, key, side, advice in SIGNALS:
        figure, limit = totals.mean(name), getattr(algorithm, key)
        if figure is None:
            continue
        about, text = SIGNS[name]
        is_outside = figure < limit if side == "below" else figure > limit
        fresh, stale = (totals.mean(f"{name}/stale_{age}") for age in (0, 1))
        by_age = ""
        if fresh is not None and stale is not None:
            by_age = f" ({number(fresh, 4)} for fresh tokens, {number(stale, 4)} for those one version old)"
        place = f"{side if is_outside else 'within'} the limit of {limit:g}"
        change = f"{advice[:1].upper()}{advice[1:]}." if is_outside else ""
        text = f"{text.format(number(figure, 4))}{by_age}: {place}."
        yield Remark(about, "bad" if is_outside else "good", text, change)
    kl, eta = totals.mean("correction/kl"), totals.mean("governor/eta")
    if training.target_kl is not None and kl is not None and eta is not None:
        is_missed = kl > OVER_TARGET * training.target_kl
        text = f"Generation ran at most {number(eta)} windows ahead on average (staleness_threshold "
        text += f"{training.staleness_threshold:g}): KL {number(kl, 4)}, target {training.target_kl:g}."
        change = "What is left with nothing ahead is no staleness: a smaller trainer.lr or "
        change += "trigger_parameter_sync_step, or a target_kl that this run can reach."
        yield Remark("governor", "bad" if is_missed else "good", text, change if is_missed else "")
    if (lent_s := totals.mean("placement/lent_s")) is not None:
        tokens = round(totals.amount("placement/lent_tokens"))
        text = f"The trainer's devices were lent for {number(lent_s)} s per step "
        text += f"and sampled {tokens:,} tokens in all."
        change = "The trainer hardly waited for slots: placement.lend only takes memory."
        yield Remark("lending", "good" if tokens else "bad", text, "" if tokens else change)
    if (clipped := totals.mean("correction/clipped_ratio") or 0.0) > CLIPPED:
        text = f"The loss clipped {share(clipped)} of the tokens, which then teach nothing."
        change = "A smaller trainer.lr, wider clip_ratio_low and clip_ratio_high, or less staleness."
        yield Remark("clipping", "bad", text, change)
    if (apart := totals.most("sync/logprob_abs_diff_median")) is not None:
        most_apart = settings.max_logprob_diff
        average = small(totals.most("sync/logprob_abs_diff"))
        text = (
            f"Logprobs of workers and trainer differed by {average} on average, and by {small(apart)} in the "
        )
        text += f"median of the probes of a load, at most; the limit of the median is {small(most_apart)}."
        doubt = "See docs/weights.md: a worker may be computing with other weights than it was sent."
        is_close = apart <= most_apart
        yield Remark("weight syncs", "good" if is_close else "bad", text, "" if is_close else doubt)


def _selection(totals: Totals, settings: LoopSettings) -> Iterator[Remark]:
    """Whether what was trained is a biased selection of what was admitted."""
    names = {"dropped": "dropped or failed", "filtered": "filtered", "aborted": "aborted"}
    fates = [fate for fate in names if totals.most(f"bias/tokens/{fate}") is not None]
    left_out = ", ".join(names[fate] for fate in fates)
    words = {
        "length": ("Trained responses were", "shorter", "longer", "than all that ended"),
        "difficulty": ("Trained prompts were", "harder", "easier", "than all that came"),
    }
    for name, (what, below, above, others) in words.items():
        apart, error = totals.last.get(f"bias/run/{name}"), totals.last.get(f"bias/run/{name}_error")
        if apart is None or error is None or (fates and abs(apart) + error < 0.005):
            continue
        if not fates:
            if name == "length":
                yield Remark(
                    "selection", "good", "Every group that ended was trained, with all its responses."
                )
            continue
        figure = f"{abs(apart):.2f} standard deviations {below if apart < 0 else above}"
        text = f"{what} {figure} {others} (standard error {error:.2f}; left out: {left_out})"
        if abs(apart) <= CLEAR_ERRORS * error:
            yield Remark("selection", "good", f"{text}: within noise.")
            continue
        if name == "length" and "aborted" in fates:
            text += "; aborted ones, which would have become longer, count with the tokens that they had"
        training, changes = settings.profile.async_training, []
        if "filtered" in fates:
            changes.append("algorithm.filter_groups leaves prompts out by intention")
        if training.on_stale in ("drop", "requeue"):
            changes.append('async_training.on_stale = "wait" leaves out none for its age')
        if training.mixed_versions != "train":
            changes.append('async_training.mixed_versions = "train" leaves out none for its versions')
        weight: Weight = "bad" if abs(apart) > BIASED else "note"
        yield Remark("selection", weight, f"{text}.", f"{'; '.join(changes)}." if changes else "")


def _losses(totals: Totals) -> Iterator[Remark]:
    """Rewards that may be fooled, what was lost, and what failed."""
    if (without := totals.mean("reward/without_reference_ratio") or 0.0) > WITHOUT_REFERENCE:
        text = f"In {share(without)} of the rewarded responses the reference answer does not stand, "
        text += "in any usual form."
        look = "Unless many answers are right, the reward may be fooled: look at `asyncrl samples RUN`, "
        look += "and at the rehearsal in `plan`."
        yield Remark("reward", "note", text, look)
    discarded, trained = totals.last.get("waste/tokens_discarded", 0), totals.last.get("tokens_trained", 0)
    wasted = discarded / max(discarded + trained, 1)
    if wasted > COSTLY:
        text = f"{share(wasted)} of the sampled tokens were discarded and never trained."
        yield Remark("waste", "note", text)
    if restarts := totals.last.get("rollouter/restarts", 0):
        text = f"Rollout workers were restarted {restarts:.0f} times."
        yield Remark("restarts", "note", text, "`asyncrl logs RUN` shows their last output.")
    if skipped := round(sum(totals.amount(f"{model}/skipped_steps") for model in ("train", "critic"))):
        text = f"Skipped because the gradient was not finite: {counted(skipped, 'optimizer step')} "
        text += f"in {counted(totals.steps, 'train step')}."
        yield Remark("gradients", "bad", text, 'A smaller trainer.lr, or model.dtype = "float32".')
    if (failed_calls := totals.mean("env/failed_calls") or 0.0) > FAILED_CALLS:
        text = f"On average {number(failed_calls)} tool calls per trajectory raised, named no tool, "
        text += "or could not be read."
        look = "`asyncrl samples RUN` shows the calls, and what the model was told."
        yield Remark("tool calls", "note", text, look)
    failed = "env/failed/"
    kinds = {key.removeprefix(failed): n for key, n in totals.last.items() if key.startswith(failed)}
    if mixed := kinds.pop(MIXED, 0):
        text = f"Given up because new weights were loaded meanwhile: {counted(round(mixed), 'response')}."
        yield Remark("mixed versions", "note", text)
    if failures := [f"{kind} {count:.0f}" for kind, count in kinds.items()]:
        yield Remark("failed trajectories", "note", f"Without a reward: {', '.join(failures)}.")
