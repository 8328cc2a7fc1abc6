"""The types of the lines in metrics.jsonl, events.jsonl, timeline.jsonl and samples, for reading them back.
Numbers are bounded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, cast

from annotated_types import Interval
from pydantic import AfterValidator, JsonValue
from typing_extensions import (
    TypedDict,  # pydantic reads typing's own from Python 3.12 on; mypy knows no extra_items
)

from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.contracts.status import Figure, Seconds
from asyncrl_cli.observe.format import MOST_SHOWN

Line: TypeAlias = Mapping[str, Any]
"""A line of one of these files as JSON."""
Reward = Annotated[float, Interval(ge=-MOST_SHOWN, le=MOST_SHOWN)]


def _finite(value: JsonValue) -> JsonValue:
    """Refuse numbers that are not finite, however deep they are."""
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _finite(entry)
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise ValueError("it is not a finite number")
    return value


Detail = Annotated[JsonValue, AfterValidator(_finite)]
Counts = dict[str, list[tuple[Seconds, Count]]]


def _in_order(span: tuple[str, float, float]) -> tuple[str, float, float]:
    if span[2] < span[1]:
        raise ValueError("it ends before it begins")
    return span


RecordedSpan = Annotated[tuple[str, Seconds, Seconds], AfterValidator(_in_order)]
"""State, start_s, end_s."""
Spans = dict[str, list[RecordedSpan]]


class MetricsLine(TypedDict, extra_items=Figure | list[Figure]):  # type: ignore[call-arg]
    """What every line of metrics.jsonl has. All its other keys are figures."""

    step: Count
    time_s: Seconds
    groups_trained: Count


class EventLine(TypedDict, extra_items=Detail):  # type: ignore[call-arg]
    """The keys of a line of events.jsonl that are read back. Others are only shown."""

    event: str
    time_s: NotRequired[Seconds]
    step: NotRequired[Count]
    from_step: NotRequired[Count]
    version: NotRequired[Count]
    group: NotRequired[str]
    workers: NotRequired[dict[str, Count]]
    worker: NotRequired[str]
    reason: NotRequired[str]
    tokens: NotRequired[Count]
    num_bytes: NotRequired[Count]
    reward_mean: NotRequired[Reward | None]
    reward_low: NotRequired[Reward]
    reward_high: NotRequired[Reward]
    num_prompts: NotRequired[Count]
    eval_set: NotRequired[str]
    prompts: NotRequired[str]
    rewards: NotRequired[list[Reward | None]]
    publish_s: NotRequired[Seconds]
    send_s: NotRequired[Seconds]
    load_s: NotRequired[Seconds]
    pause_s: NotRequired[Seconds]
    failures: NotRequired[dict[str, Count]]


def _with_what_it_needs(event: EventLine) -> EventLine:
    """Keys of an eval that mean nothing alone."""
    for key, needed in (("rewards", "prompts"), ("reward_low", "num_prompts")):
        if key in event and needed not in event:
            raise ValueError(f"it has {key}, but no {needed}")
    return event


EVENT = cast("type[EventLine]", Annotated[EventLine, AfterValidator(_with_what_it_needs)])


class TimelineLine(TypedDict):
    """The keys of a line of timeline.jsonl that are read back."""

    step: NotRequired[Count]
    spans: Spans
    running: NotRequired[Counts]
    waits: NotRequired[dict[str, list[tuple[Seconds, str]]]]
    slots: NotRequired[dict[str, list[tuple[Count, str, Seconds, Seconds]]]]


class SampledSpan(TypedDict):
    text: str


class SampleLine(TypedDict, extra_items=Any):  # type: ignore[call-arg]
    """The keys of a dumped trajectory (samples.py) that are read back. Numbers of a run that diverges may be
    NaN or infinite."""

    step: Count
    window: Count
    group: str
    trajectory: Count
    reward: float
    advantage: NotRequired[float | None]
    answer: NotRequired[str | None]
    finish_reason: NotRequired[str]
    turn_rewards: NotRequired[list[float]]
    segment_lengths: list[Count]
    versions: list[Annotated[int, Interval(ge=-1, le=2**53)]]
    logprobs: list[float]
    trainer_logprobs: NotRequired[list[float] | None]
    mask: list[Literal[0, 1]]
    pieces: NotRequired[list[str]]
    spans: NotRequired[list[SampledSpan]]


def _with_equal_lengths(line: SampleLine) -> SampleLine:
    """All arrays cover the tokens of all segments. Dumps of older versions have no `pieces`."""
    arrays: list[list[Any] | None] = [
        line["versions"],
        line["logprobs"],
        line["mask"],
        line.get("pieces"),
        line.get("trainer_logprobs"),
    ]
    lengths = {sum(line["segment_lengths"]), *(len(array) for array in arrays if array is not None)}
    if len(lengths) > 1:
        raise ValueError(f"the arrays differ in length: {sorted(lengths)}")
    return line


SAMPLE = cast("type[SampleLine]", Annotated[SampleLine, AfterValidator(_with_equal_lengths)])
