"""The types of the lines in metrics.jsonl, events.jsonl, timeline.jsonl and samples, for reading them back.
Numbers are bounded."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Interval
from pydantic import AfterValidator
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.observe.format import MOST_SHOWN
from asyncrl_cli.observe.status import Detail, Figure, Seconds

Reward = Annotated[float, Interval(ge=-MOST_SHOWN, le=MOST_SHOWN)]
Counts = dict[str, list[tuple[Seconds, Count]]]


def _in_order(span: tuple[str, float, float]) -> tuple[str, float, float]:
    if span[2] < span[1]:
        raise ValueError("it ends before it begins")
    return span


RecordedSpan = Annotated[tuple[str, Seconds, Seconds], AfterValidator(_in_order)]
"""State, start_s, end_s."""
Spans = dict[str, list[RecordedSpan]]


class MetricsLine(TypedDict, extra_items=Figure | list[Figure]):
    """What every line of metrics.jsonl has. All its other keys are figures."""

    step: Count
    time_s: Seconds
    groups_trained: Count


class EventLine(TypedDict, extra_items=Detail):
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


def _with_all_it_needs(event: EventLine) -> EventLine:
    """Keys of an eval that mean nothing alone."""
    for key, needed in (("rewards", "prompts"), ("reward_low", "num_prompts")):
        if key in event and needed not in event:
            raise ValueError(f"it has {key}, but no {needed}")
    return event


Event = Annotated[EventLine, AfterValidator(_with_all_it_needs)]


class TimelineLine(TypedDict):
    """The keys of a line of timeline.jsonl that are read back."""

    step: NotRequired[Count]
    spans: Spans
    running: NotRequired[Counts]
    waits: NotRequired[dict[str, list[tuple[Seconds, str]]]]
    slots: NotRequired[dict[str, list[tuple[Count, str, Seconds, Seconds]]]]


class SampledSpan(TypedDict):
    text: str


class SampleLine(TypedDict, extra_items=Any):
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


def _of_one_length(line: SampleLine) -> SampleLine:
    """All arrays cover the tokens of all segments. Dumps of older versions have no `pieces`."""
    arrays = (line.get(key) for key in ("versions", "logprobs", "mask", "pieces", "trainer_logprobs"))
    lengths = {sum(line["segment_lengths"]), *(len(array) for array in arrays if array is not None)}
    if len(lengths) > 1:
        raise ValueError(f"the arrays differ in length: {sorted(lengths)}")
    return line


Sample = Annotated[SampleLine, AfterValidator(_of_one_length)]
