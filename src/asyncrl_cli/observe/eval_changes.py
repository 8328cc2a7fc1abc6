"""Compares the rewards of two evals, of one run or of two, by their events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl_cli.measure.intervals import Change, Interval, paired_change, unpaired_change
from asyncrl_cli.observe.format import number

Point = Mapping[str, Any]
"""An `eval` event. One that an older version recorded has no interval, and status.json keeps no `rewards`."""


def interval_of(point: Point) -> Interval | None:
    return (
        Interval(point["reward_low"], point["reward_high"])
        if {"reward_low", "reward_high"} <= point.keys()
        else None
    )


def change_of(before: Point, after: Point) -> Change | None:
    """The change of the mean reward: over the prompts that have a reward in both, if both evals had the same
    prompts. None if an interval is missing."""
    if "rewards" in before and "rewards" in after and before["prompts"] == after["prompts"]:
        both = zip(before["rewards"], after["rewards"], strict=False)  # as many, unless a file is damaged
        if pairs := [(old, new) for old, new in both if old is not None and new is not None]:
            return paired_change(*zip(*pairs, strict=True))
    of_old, of_new = interval_of(before), interval_of(after)
    if of_old is None or of_new is None:
        return None
    num_prompts = min(before["num_prompts"], after["num_prompts"])
    return unpaired_change((before["reward_mean"], of_old), (after["reward_mean"], of_new), num_prompts)


def change_text(change: Change) -> str:
    """`+0.075 (95%: -0.21 to 0.40)`."""
    low, high = (number(end, 3) for end in change.interval)
    return f"{change.mean:+.3f} (95%: {low} to {high})"
