"""The trajectories of a recorded run that were dumped, as people read them: text with the version that
sampled it.

Colours say how old the version of a token is; on a terminal without colours, marks in the text say the same.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from heapq import nlargest
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.paths import as_typed
from asyncrl_cli.data.sample_fields import LOGPROBS, NOT_SAMPLED, VERSIONS
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.run_lines import SampleLine

Sort = Literal["staleness", "reward", "length", "span"]
PER_TOKEN = ("token", "sampled")
MOST_CHARACTERS = 60
"""Of a field's value among the facts."""
MODEL, CALLS = "model", "calls"
CALL = re.compile(
    r"(?:<call>|<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<.tool.calls?.begin.>).*", re.DOTALL
)
"""A tool call in the text of an answer, as chat templates write it (envs/answers.py)."""
MARK, LOAD = "(v{})", "(load v{})"
"""Before the tokens of a version, and where new weights were loaded within an answer."""
AGE_COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
"""For tokens of the window's own version, of the one before, and so on; the last one is for all that are
older. Of Okabe and Ito's palette, whose colours differ for every kind of colour blindness; without those that
a dark or a light terminal would hide."""


LEVEL = "({})"
"""Before the tokens of a level of a field's scale."""
LEVEL_COLOURS = ("#5a8fd6", "#3aa6a0", "#7fae45", "#d49a2a", "#d55e00")
"""From the lowest level to the highest. Their brightness is alike, so neither a dark nor a light terminal
hides one."""


class Passage(NamedTuple):
    """Tokens of one segment that were sampled by `version` (-1: not sampled, but given). `speaker`: `model`,
    `given` (by a tool or an environment), or, at the beginning of a segment, `prompt` and `segment 2`, ...:
    the rewritten context. `is_load`: new weights were loaded just before it, within an answer."""

    segment: int
    speaker: str
    version: int
    tokens: range
    is_load: bool


class DumpedTrajectory:
    """One line of a dump, which is one trajectory."""

    def __init__(self, line: SampleLine) -> None:
        self.line = line
        self.step, self.window, self.group = line["step"], line["window"], line["group"]
        self.number, self.reward, self.answer = line["trajectory"], line["reward"], line["answer"]
        self.versions, self.logprobs = line["versions"], line["logprobs"]
        self.trainer_logprobs = line.get("trainer_logprobs")
        self.texts, self.fields = line["pieces"], line["fields"]

    @cached_property
    def columns(self) -> dict[str, Sequence[float | None]]:
        """By name, what has one number for every token (None: it has none)."""
        found: dict[str, Sequence[float | None]] = {LOGPROBS: self.logprobs}
        if self.trainer_logprobs is not None:
            found["trainer_logprobs"] = self.trainer_logprobs
        for name, one in self.fields.items():
            if one["per"] in PER_TOKEN and all(map(_is_number, one["values"])):
                found[name] = one["values"]
        return found

    def shown_of(self, token: int) -> str:
        """The token's values of fields that are shown as colours."""
        coloured = {name for name, one in self.fields.items() if one["shown"] == "colour"}
        values = ((name, column[token]) for name, column in self.columns.items() if name in coloured)
        return ", ".join(f"{name} {value:.4g}" for name, value in values if value is not None)

    @property
    def numbers(self) -> Iterator[tuple[str, str]]:
        """The parts of the reward, and the fields that are shown as a number of the trajectory: names and
        values; of those per token the mean over the sampled tokens."""
        for name, part in self.line.get("reward_parts", {}).items():
            yield f"reward {name}", f"{part:.4g}"
        for name, one in self.fields.items():
            if one["shown"] != "number":
                continue
            value, values = one["values"], self.columns.get(name)
            if values is not None:
                measured = [value for i in self.sampled_indices if (value := values[i]) is not None]
                value = sum(measured) / len(measured) if measured else math.nan
            words = f"{value:.4g}" if isinstance(value, int | float) else json.dumps(value)
            yield name, words if len(words) <= MOST_CHARACTERS else f"{words[:MOST_CHARACTERS]}..."

    @cached_property
    def sampled_indices(self) -> list[int]:
        """Of the tokens that a policy sampled."""
        return [index for index, version in enumerate(self.versions) if version != NOT_SAMPLED]

    @property
    def sampling_versions(self) -> list[int]:
        return sorted({self.versions[index] for index in self.sampled_indices}) or [self.window]

    def age(self, version: int) -> int:
        """Index of the version's colour in AGE_COLOURS."""
        return min(max(self.window - version, 0), len(AGE_COLOURS) - 1)

    @property
    def staleness(self) -> int:
        """Versions from the oldest token's to the window's."""
        return self.window - self.sampling_versions[0]

    @property
    def span(self) -> int:
        return self.sampling_versions[-1] - self.sampling_versions[0]

    @cached_property
    def passages(self) -> list[Passage]:
        found: list[Passage] = []
        lengths = self.line["segment_lengths"]
        for segment, (end, length) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
            begins, before = f"segment {segment + 1}" if segment else "prompt", NOT_SAMPLED
            for version, indices in groupby(range(end - length, end), key=self.versions.__getitem__):
                first, *rest = indices
                speaker = MODEL if version != NOT_SAMPLED else "given" if first > end - length else begins
                is_load = NOT_SAMPLED not in (version, before)
                found.append(Passage(segment, speaker, version, range(first, first + 1 + len(rest)), is_load))
                before = version
        return found

    @property
    def turns(self) -> Iterator[tuple[str, list[Passage]]]:
        """Who speaks, and the text. The speaker is `calls` where the model has written a tool call."""
        for (_, speaker), grouped in groupby(self.passages, key=lambda one: (one.segment, one.speaker)):
            passages = list(grouped)
            is_call = speaker == MODEL and any(CALL.search(self.text(passage)) for passage in passages)
            yield CALLS if is_call else speaker, passages

    def text(self, passage: Passage) -> str:
        return "".join(self.texts[index] for index in passage.tokens)

    def probability(self, logprobs: Sequence[float]) -> float | None:
        """The geometric mean of the sampled tokens' probabilities."""
        indices = self.sampled_indices
        return _exp(sum(logprobs[index] for index in indices) / len(indices)) if indices else None

    @property
    def trainer_probability(self) -> float | None:
        return None if self.trainer_logprobs is None else self.probability(self.trainer_logprobs)

    @cached_property
    def both_probabilities(self) -> dict[int, tuple[float, float]]:
        """Sampled token -> its probability by the sampler, and by the trainer's weights as the step began;
        empty if the trainer has not scored them."""
        if (trainer := self.trainer_logprobs) is None:
            return {}
        return {i: (_exp(self.logprobs[i]), _exp(trainer[i])) for i in self.sampled_indices}

    def figures(self) -> dict[str, float | None]:
        """Derived figures for `--json`, in addition to the dumped line."""
        return {
            "staleness": self.staleness,
            "span": self.span,
            "response_tokens": len(self.sampled_indices),
            "sampler_probability": self.probability(self.logprobs),
            "trainer_probability": self.trainer_probability,
        }


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**53)


def _exp(logprob: float) -> float:
    """The probability, at most 1: a run that diverges may have any logprob."""
    return math.exp(min(logprob, 0.0))


KEYS: dict[Sort, Callable[[DumpedTrajectory], float]] = {
    "staleness": lambda one: one.staleness,
    "reward": lambda one: one.reward,
    "length": lambda one: len(one.sampled_indices),
    "span": lambda one: one.span,
}


def trajectories_of(run: Recorded, step: int) -> Iterator[DumpedTrajectory]:
    """The trajectories of a dumped step, in the order of the dump."""
    return map(DumpedTrajectory, run.samples(step))


def choose(
    run: Recorded, step: int | None, group: str, sort: Sort | None, most: int
) -> list[DumpedTrajectory]:
    """At most `most` trajectories of a step (None: of the newest dumped one, or of any with that group);
    those with the largest figure first if they are sorted. `group`: the beginning of its key. Raises
    ConfigError if there are none."""
    steps = run.sampled_steps
    if not steps and not (run.files.metrics.exists() and run.num_steps()):
        hint = f"`asyncrl status {as_typed(run.files.path)}` shows how far it is"
        raise ConfigError(f"run '{run.name}' has no samples yet: no step has ended", hint=hint)
    if not steps:
        hint = "--set logging.samples_every_steps=20 dumps every 20th, the first and the last step"
        if replayed := run.replay_of:
            hint = f"it trained on those of another run: `asyncrl samples {as_typed(Path(replayed))}`"
        raise ConfigError(f"run '{run.name}' has no samples", hint=hint)
    if step is not None and step not in steps:
        near = sorted(sorted(steps, key=lambda known: abs(known - step))[:8])
        hint = f"nearest: {', '.join(map(str, near))}"
        raise ConfigError(f"step {step} of run '{run.name}' was not dumped", hint=hint)
    asked = [step] if step is not None else steps[::-1] if group else steps[-1:]
    found = (one for number in asked for one in trajectories_of(run, number) if one.group.startswith(group))
    chosen = nlargest(most, found, key=KEYS[sort]) if sort else list(islice(found, most))
    if not chosen:
        what = f"the dump of step {asked[0]} has no trajectory"
        if group:
            what = f"no dumped trajectory is of group '{group}'"
        raise ConfigError(what, hint="--step N shows the groups of a step")
    return chosen


class Scale:
    """A field's values of these trajectories as levels: each value is one if there are few, else they are
    equal parts of the range. Raises ConfigError if none of them has the field for its tokens."""

    def __init__(self, name: str, chosen: Sequence[DumpedTrajectory]) -> None:
        if not any(name in one.columns for one in chosen):
            known = ", ".join([VERSIONS, *dict.fromkeys(name for one in chosen for name in one.columns)])
            what = f"these trajectories have no field '{name}' with a number for each token"
            raise ConfigError(what, hint=f"known: {known}; a field of yours needs in_samples=True")
        self.name, most = name, len(LEVEL_COLOURS)
        doc = next((one.fields[name].get("doc") for one in chosen if name in one.fields), "")
        self._doc = f" ({doc})" if doc else ""
        values = {one.columns[name][i] for one in chosen if name in one.columns for i in one.sampled_indices}
        finite = sorted(value for value in values if value is not None and math.isfinite(value))
        few = len(finite) <= most
        low, high = (finite[0], finite[-1]) if finite else (0.0, 0.0)
        parts = [low + (high - low) * part / most for part in range(1, most)]
        self._upper = finite if few else [*parts, high]
        self._words = [f"{upper:.4g}" if few else f"to {upper:.3g}" for upper in self._upper]
        if not few:
            self._words[0] = f"{low:.3g} {self._words[0]}"

    def level(self, value: float | None) -> int | None:
        """None for a token without a finite value."""
        if value is None or not math.isfinite(value):
            return None
        return next(level for level, upper in enumerate(self._upper) if value <= upper)

    def style(self, level: int | None) -> str:
        return "dim" if level is None else LEVEL_COLOURS[level]

    @property
    def legend(self) -> Text:
        parts = [(f" {LEVEL.format(n)} {word}", self.style(n)) for n, word in enumerate(self._words)]
        return Text.assemble(f"{self.name}{self._doc}:", *parts)

    def words(self, one: DumpedTrajectory, passage: Passage) -> Text:
        """The passage's text: a mark before tokens of another level, and the level's colour."""
        values, words = one.columns.get(self.name), Text()
        if values is None:
            return Text(one.text(passage))
        for level, indices in groupby(passage.tokens, key=lambda index: self.level(values[index])):
            words.append(LEVEL.format("-" if level is None else level), f"dim {self.style(level)}")
            words.append("".join(one.texts[index] for index in indices), self.style(level))
        return words


def shown(one: DumpedTrajectory, scale: Scale | None = None) -> RenderableType:
    """One trajectory for a terminal: what it is, what its tokens were worth, and its text turn by turn. The
    scale colours the tokens, or else the version that sampled them."""
    title = Text(f"step {one.step}  {one.group}  trajectory {one.number}  reward {one.reward:.4g}", "bold")
    if (advantage := one.line["advantage"]) is not None:
        title.append(f"  advantage {advantage:+.3g}")
    turns = Table.grid(padding=(0, 1))
    turns.add_column(style="dim", no_wrap=True)
    turns.add_column(overflow="fold", ratio=1)
    for speaker, passages in one.turns:
        words = Text()
        for passage in passages:
            if passage.version == NOT_SAMPLED:
                words.append(one.text(passage), "dim")
                continue
            if scale is not None:
                words.append_text(scale.words(one, passage))
                continue
            style = AGE_COLOURS[one.age(passage.version)]
            words.append((LOAD if passage.is_load else MARK).format(passage.version), f"dim {style}")
            sampled = Text(one.text(passage), style)
            sampled.highlight_regex(CALL, "bold")
            words.append_text(sampled)
        turns.add_row(speaker, words)
    return Group(Rule(title, align="left", style="dim"), *_facts(one), turns)


def _facts(one: DumpedTrajectory) -> list[Text]:
    versions = Text()
    for version in one.sampling_versions:
        versions.append(f"v{version}", AGE_COLOURS[one.age(version)]).append(" ")
    age = f"oldest {one.staleness} behind window v{one.window}" if one.staleness else f"window v{one.window}"
    ended = f"ended: {one.line['finish_reason']}"
    lines = [Text.assemble(f"{len(one.sampled_indices)} tokens sampled by ", versions, f"({age}), {ended}")]
    if rewards := one.line["turn_rewards"]:
        lines[0].append(f", rewards {' '.join(f'{reward:.3g}' for reward in rewards)}")
    if (sampler := one.probability(one.logprobs)) is not None:
        line = Text(f"mean probability: sampler {sampler:.3f}")
        if one.both_probabilities:
            line.append(f", trainer {one.trainer_probability:.3f}")
            changes = {
                token: abs(before - after) for token, (before, after) in one.both_probabilities.items()
            }
            token = max(changes, key=changes.__getitem__)
            before, after = (f"{probability:.3f}" for probability in one.both_probabilities[token])
            if before != after:
                line.append(f"; most changed {one.texts[token]!r}: {before} -> {after}")
        lines.append(line)
    if numbers := ", ".join(f"{name} {value}" for name, value in one.numbers):
        lines.append(Text(numbers))
    return lines if one.answer is None else [*lines, Text.assemble("expected: ", (one.answer, "bold"))]
