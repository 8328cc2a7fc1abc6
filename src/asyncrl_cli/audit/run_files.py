"""Reads a run's files for the audit, by their documented formats alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.safe_files import MAX_JSON_BYTES, read_bytes, reason

Line = dict[str, Any]
NUMBERS = ("step", "window", "version", "time_s", "began_s", "from_step", "from_time_s")
"""Keys of lines whose values are numbers, in whatever file."""
SAMPLES = re.compile(r"step-(\d{6,})\.(?:jsonl|safetensors)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory. Arrays have an entry per token (T) of all segments, end to end; `kept` one per sampled
    token. `kept`, `experts`: None without the field. `advantage`: None where none was recorded."""

    reward: float
    finish_reason: str
    advantage: float | None
    segment_lengths: Sequence[int]
    tokens: NDArray[Any]
    logprobs: NDArray[Any]
    versions: NDArray[Any]
    mask: NDArray[Any]
    kept: Sequence[Sequence[int]] | None = None
    experts: NDArray[Any] | None = None

    @property
    def num_sampled(self) -> int:
        return int(self.mask.sum())


class SampledGroup(NamedTuple):
    key: str
    step: int
    window: int
    samples: list[Sample]


class RunFiles:
    """`metrics`, `timeline`, `events`: the lines; `events` without those after a checkpoint from which the
    run was resumed later: they belong to steps that were trained again. `damaged`: what cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path, self.damaged = path, list[str]()
        if (path / "replay.json").exists():
            hint = "audit the run that sampled its trajectories; `asyncrl compare` shows both"
            raise RefusedError(f"{path} is a replay: it has no events of groups to audit", hint=hint)
        config = self.document("config.resolved.json")
        if not isinstance(config.get("profile"), dict):
            why = f"{path / 'config.resolved.json'} cannot be read, which says what the run should have done"
            raise RefusedError(why, hint="audit a run whose directory is whole")
        self.profile: Line = config["profile"]
        self.status = self.document("status.json")
        self.is_done = self.status.get("phase") == "done"
        self.metrics, self.timeline = self._lines("metrics.jsonl"), self._lines("timeline.jsonl")
        self.events = list[Line]()
        for event in self._lines("events.jsonl"):
            if event.get("event") == "resumed":
                self.events = [one for one in self.events if _lasts(one, event)]
            self.events.append(event)

    def section(self, name: str) -> Line:
        found: Line = self.profile.get(name) or {}
        return found

    def named(self, *names: str) -> list[Line]:
        return [event for event in self.events if event.get("event") in names]

    def document(self, name: str) -> Line:
        """A JSON file; empty, and noted, if it cannot be read."""
        try:
            content = json.loads(read_bytes(self.path / name, max_bytes=MAX_JSON_BYTES))
            if not isinstance(content, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            self.damaged.append(f"{name} cannot be read: {reason(error)}")
            return {}
        return content

    def _lines(self, name: str) -> list[Line]:
        try:
            texts = read_bytes(self.path / name, max_bytes=16 * MAX_JSON_BYTES).split(b"\n")
        except (OSError, ValueError) as error:
            self.damaged.append(f"{name} cannot be read: {reason(error)}")
            return []
        *whole, rest = texts
        if rest and self.is_done:  # a run that was killed may leave half a line
            self.damaged.append(f"{name} ends in the middle of line {len(texts)}")
        lines = list[Line]()
        for number, text in enumerate(whole, start=1):
            try:
                line = {**json.loads(text)}
                if wrong := [key for key in NUMBERS if not isinstance(line.get(key, 0), int | float)]:
                    raise ValueError(f"its {wrong[0]} is no number")
                lines.append(line)
            except (ValueError, TypeError, RecursionError) as error:
                self.damaged.append(f"{name}, line {number} is damaged: {error}")
        return lines

    @cached_property
    def last_step(self) -> int:
        return max((step for line in self.metrics if isinstance(step := line.get("step"), int)), default=0)

    def groups(self) -> Iterator[SampledGroup]:
        """The groups whose samples were kept, step by step: those of the arrays if the step has them (all of
        its trajectories), else those of the text. Later steps are of an attempt that was given up."""
        chosen = dict[int, Path]()
        for path in sorted((self.path / "samples").glob("step-*")):  # arrays come after text, in its place
            named = SAMPLES.fullmatch(path.name)
            if named and int(named[1]) <= self.last_step and path.is_file():
                chosen[int(named[1])] = path
        for step, path in sorted(chosen.items()):
            try:
                yield from _from_arrays(path) if path.suffix == ".safetensors" else _from_text(path)
            except Exception as error:  # a damaged file may raise anything in the libraries that read it
                what = f"the samples of step {step} cannot be read: {error}"
                if what not in self.damaged:  # they are read twice
                    self.damaged.append(what)


def _lasts(event: Line, resumed: Line) -> bool:
    if event.get("event") == "checkpointed":  # it is written a little after the time of its cut
        return bool(event.get("step", 0) <= resumed.get("from_step", 0))
    return bool(event.get("began_s", event.get("time_s", 0.0)) <= resumed.get("from_time_s", 0.0))


def _from_text(path: Path) -> Iterator[SampledGroup]:
    lines = [json.loads(text) for text in path.read_bytes().splitlines()]  # texts may have U+2028
    same = ("reward", "finish_reason", "advantage", "segment_lengths")
    for (key, step, window), members in groupby(lines, itemgetter("group", "step", "window")):
        samples = [
            Sample(
                **{name: line[name] for name in same},
                tokens=np.array(line["tokens"]),
                logprobs=np.array(line["logprobs"], np.float32),
                versions=np.array(line["versions"]),
                mask=np.array(line["mask"], bool),
            )
            for line in members
        ]
        yield SampledGroup(key, step, window, samples)


def _from_arrays(path: Path) -> Iterator[SampledGroup]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        head = json.loads(file.metadata()["step"])
        per_token = ("tokens", "logprobs", "versions", "mask", "routed_experts")
        names = (*(f"token/{name}" for name in per_token), "ragged/kept_tokens")
        arrays = {name.partition("/")[2]: file.get_tensor(name) for name in names if name in set(file.keys())}
    t = n = 0
    lengths_N = values = np.zeros(0, np.int64)
    if has_kept := "kept_tokens" in arrays:
        total = int(arrays["mask"].sum())
        lengths_N, values = arrays["kept_tokens"][:total], arrays["kept_tokens"][total:]
    ends_N = np.cumsum([0, *lengths_N])
    for group in head["groups"]:
        samples, facts = [], group["result"]["trajectories"]
        for (counts, values_of), fact, advantage in zip(
            group["heads"], facts, group["advantages"], strict=True
        ):
            t_end, n_end = t + sum(one[0] for one in counts), n + sum(one[1] for one in counts)
            kept = [values[ends_N[i] : ends_N[i + 1]].tolist() for i in range(n, n_end)] if has_kept else None
            own = {name: arrays[name][t:t_end] for name in per_token if name in arrays}
            samples.append(
                Sample(
                    reward=fact["reward"],
                    finish_reason=values_of["finish_reason"],
                    advantage=advantage,
                    segment_lengths=[one[0] for one in counts],
                    kept=kept,
                    experts=own.pop("routed_experts", None),
                    **own,
                )
            )
            t, n = t_end, n_end
        uid, epoch, attempt = group["result"]["key"]
        yield SampledGroup(f"{uid}@{epoch}.{attempt}", head["step"], head["window"], samples)
