"""The lines of metrics.jsonl, events.jsonl, timeline.jsonl and samples: their types, for reading them back
(numbers are bounded); what each figure of a train step means (meanings.toml, as docs/metrics.md and reports
show it), and how the figures add up over steps."""

from __future__ import annotations

import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import cache
from importlib.resources import files
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
PER_SECOND = "trainer/", "rollouter/", "overlap_ratio"
PER_STEP = "placement/", "train/skipped_steps", "critic/skipped_steps"
"""Figures that are weighted by their step's seconds, and amounts, of which each step counts once; all others
are weighted by the step's sampled tokens."""


def _finite(value: JsonValue) -> JsonValue:
    """Refuse numbers that are not finite, however deep they are."""
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _finite(entry)
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise ValueError("it is not a finite number")
    return value


def _as_floats(value: Any) -> Any:
    """Refuse integers that no float holds, however deep they are."""
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _as_floats(entry)
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError("it is too large")
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


class EvalSample(TypedDict):
    """An answer to a held-out prompt, which the event of an eval has for reports."""

    uid: str
    prompt: str
    text: str
    reward: Reward
    answer: NotRequired[str]


class EventLine(TypedDict, extra_items=Detail):  # type: ignore[call-arg]
    """The keys of a line of events.jsonl that are read back. Others are only shown."""

    event: str
    time_s: NotRequired[Seconds]
    step: NotRequired[Count]
    from_step: NotRequired[Count]
    from_time_s: NotRequired[Seconds]
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
    samples: NotRequired[list[EvalSample]]
    publish_s: NotRequired[Seconds]
    send_s: NotRequired[Seconds]
    load_s: NotRequired[Seconds]
    pause_s: NotRequired[Seconds]
    fingerprint: NotRequired[str]
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


class SampledField(TypedDict):
    """A declared field of a dumped trajectory. `values`: one for every token, None where it was not sampled;
    or what the trajectory has."""

    per: Literal["token", "sampled", "segment", "trajectory", "group"]
    shown: Literal["colour", "number", ""]
    doc: NotRequired[str]
    values: Annotated[Any, AfterValidator(_as_floats)]


class SampleLine(TypedDict, extra_items=Any):  # type: ignore[call-arg]
    """The keys of a dumped trajectory (train/sample_dump.py) that are read back. Numbers of a
    run that diverges may be NaN or infinite."""

    step: Count
    window: Count
    group: str
    trajectory: Count
    reward: float
    reward_parts: NotRequired[dict[str, float]]
    advantage: float | None
    answer: str | None
    finish_reason: str
    turn_rewards: list[float]
    segment_lengths: list[Count]
    versions: list[Annotated[int, Interval(ge=-1, le=2**53)]]
    logprobs: list[float]
    trainer_logprobs: NotRequired[list[float]]
    mask: list[Literal[0, 1]]
    pieces: list[str]
    fields: dict[str, SampledField]


def _with_equal_lengths(line: SampleLine) -> SampleLine:
    """All arrays cover the tokens of all segments."""
    arrays: list[Sized] = [line["versions"], line["logprobs"], line["mask"], line["pieces"]]
    arrays += [line["trainer_logprobs"]] if "trainer_logprobs" in line else []
    for name, one in line["fields"].items():
        if one["per"] in ("token", "sampled"):
            if not isinstance(one["values"], list):
                raise ValueError(f"fields.{name}.values is no list")
            arrays.append(one["values"])
    lengths = {sum(line["segment_lengths"]), *map(len, arrays)}
    if len(lengths) > 1:
        raise ValueError(f"the arrays differ in length: {sorted(lengths)}")
    return line


SAMPLE = cast("type[SampleLine]", Annotated[SampleLine, AfterValidator(_with_equal_lengths)])


@cache
def meanings() -> Mapping[str, str]:
    """Names of metrics (several with blanks between them, patterns as in the file) -> what they mean, in the
    file's order."""
    return tomllib.loads(files("asyncrl_cli.observe").joinpath("meanings.toml").read_text(encoding="utf-8"))


@cache
def meaning_of(metric: str) -> str | None:
    """None for an unknown metric."""
    for names, meaning in meanings().items():
        # `{a,b}` in a name stands for each of them, `<name>` for anything but a slash.
        pattern = "|".join(names.split())
        pattern = re.sub(r"\{(.*?)\}", lambda found: f"(?:{found[1].replace(',', '|')})", pattern)
        if re.fullmatch(re.sub(r"<\w+>", "[^/]+", pattern), metric):
            return meaning
    return None


def spent_s(line: Line, part: str) -> float:
    """Seconds of `timing/<part>_s`, 0 where the line has no such part."""
    return float(line.get(f"timing/{part}_s", 0.0))


def trajectories(line: Line) -> int:
    """Trajectories that the step trained: the staleness histogram counts each once."""
    return sum(line.get("staleness/histogram", ()))


def sampled_tokens(line: Line) -> float:
    """Sampled tokens that the step trained: mean response length times trajectories."""
    return float(line.get("response_tokens/mean", 0.0) * trajectories(line))


class Totals:
    """Means (weighted as in docs/metrics.md), maxima, first and last values of `lines` of metrics and of
    those that `counting` passes on. `parts_s`: seconds of each `timing/<part>_s`."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.steps = 0
        self.first: Line = {}
        self.last: Line = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._weights: dict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}
        self.parts_s: dict[str, float] = defaultdict(float)
        for line in lines:
            self._add(line)

    def counting(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yield the lines unchanged, and add them up on the way."""
        for line in lines:
            self._add(line)
            yield line

    def _add(self, line: Line) -> None:
        self.steps, self.first, self.last = self.steps + 1, self.first or line, line
        step_s, tokens = spent_s(line, "step"), sampled_tokens(line)
        for key, value in line.items():
            if key.startswith("timing/"):
                self.parts_s[key.removeprefix("timing/").removesuffix("_s")] += value
            elif not isinstance(value, list):
                weight = step_s if key.startswith(PER_SECOND) else 1.0 if key.startswith(PER_STEP) else tokens
                self._sums[key] += weight * value
                self._weights[key] += weight
                self._maxima[key] = max(value, self._maxima.get(key, value))

    def mean(self, key: str) -> float | None:
        """None if it was never measured."""
        return self._sums[key] / self._weights[key] if self._weights.get(key) else None

    def amount(self, key: str) -> float:
        """The sum over all steps of one of `PER_STEP`; 0 if it was never measured."""
        assert key.startswith(PER_STEP)
        return self._sums.get(key, 0.0)

    def most(self, key: str) -> float | None:
        return self._maxima.get(key)

    def seconds(self, *parts: str) -> float | None:
        """The time of these parts; None if none was measured."""
        known = [self.parts_s[part] for part in parts if part in self.parts_s]
        return sum(known) if known else None

    def share(self, *parts: str) -> float:
        """The share of these parts in the time of all steps."""
        return (self.seconds(*parts) or 0.0) / max(self.parts_s["step"], 1e-9)
