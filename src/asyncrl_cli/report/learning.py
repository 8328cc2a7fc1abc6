"""The verdict's first findings: what was learned, and what the run itself warned of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncrl_cli.base.errors import counted
from asyncrl_cli.observe.eval_changes import change_of, change_text
from asyncrl_cli.observe.format import clock, number, scored
from asyncrl_cli.observe.line_types import EventLine
from asyncrl_cli.observe.lines import Totals
from asyncrl_cli.report.verdict import Remark

MOST_WARNINGS = 5
MOST_PROMPTS = 100_000
"""More eval prompts than this are not suggested: no change of practical size needs as many."""


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
