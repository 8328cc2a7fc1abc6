"""Samples for people to read: a run may dump the trajectories of a train step as JSON lines
(`samples/step-000040.jsonl`).

Legend: T = all tokens of a segment, prompt and response together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.base.storage import appearing_file
from asyncrl_cli.data.sample_fields import (
    BUILT_IN,
    FINISH_REASON,
    LOGPROBS,
    MASK,
    REWARD,
    TOKENS,
    TURN_REWARDS,
    VERSIONS,
    Field,
    Schema,
)
from asyncrl_cli.data.trajectories import Arrays, GroupPayload, Trajectory

Decode = Callable[[list[int]], str]
"""Token ids to text, e.g. a tokenizer's `decode`."""


def is_dump_step(step: int, every_steps: int, last_step: int) -> bool:
    """Whether `logging.samples_every_steps` asks for a dump of this step. The run's first and last step
    count, too; 0 is never."""
    return every_steps > 0 and (step % every_steps == 0 or step in (1, last_step))


def choose_samples(sizes: Sequence[int], most: int, seed: str) -> dict[int, int]:
    """Which groups of a step to dump, and how many trajectories of each: random groups with `most`
    trajectories in all, or all if `most` is 0. `sizes`: trajectories per group. Groups are in the order in
    which they finished, so the first ones are short."""
    if not most:
        return dict(enumerate(sizes))
    chosen, room = {}, most
    for index in Random(seed).sample(range(len(sizes)), len(sizes)):
        if room and (number := min(sizes[index], room)):
            chosen[index], room = number, room - number
    return dict(sorted(chosen.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup:
    """A group to dump. `advantages`: one per trajectory to dump, None if unknown or not trained. `rewards`:
    theirs, if a reward model has added to those in the payload. `parts`: those of each reward, unweighted.
    `logprobs`: per trajectory, the logprobs of its sampled tokens under the trainer's weights at the step's
    start, segments concatenated. `loss_fields`: by trajectory, what the loss has written per sampled token,
    by field. `answer`: the reference answer, if the task has one."""

    payload: GroupPayload
    advantages: Sequence[float | None]
    rewards: Sequence[float] = ()
    parts: Sequence[Mapping[str, float]] = ()
    logprobs: Sequence[NDArray[np.float32]] | None = None
    loss_fields: Mapping[int, Arrays] = field(default_factory=dict)
    answer: str | None = None


def dump_samples(
    directory: Path,
    step: int,
    groups: Sequence[SampledGroup],
    *,
    window: int,
    decode: Decode,
    max_bytes: float = math.inf,
    schema: Schema = BUILT_IN,
) -> Path:
    """Atomically write one JSON line per trajectory of `step`: its whole text, and the part that the policy
    sampled.

    Arrays cover all tokens of all segments, end to end; `segment_lengths` says where each segment ends,
    `pieces` has the text of each token. `spans` has the text turn by turn: what the model generated, and what
    it was given. `fields` has the declared fields of `schema` with `in_samples`.

    `max_bytes` limits all dumps in the directory. This one takes an eighth of it at most and leaves further
    trajectories out. Then the oldest dumps are deleted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{step:06d}.jsonl"
    room = max_bytes / 8
    with appearing_file(path) as temporary, temporary.open("wb") as file:
        for line in _lines(groups, step, window, decode, schema):
            # Some tokenizers decode to lone surrogates. These become \\udxxx, as JSON writes them.
            encoded = f"{line}\n".encode(errors="backslashreplace")
            if (room := room - len(encoded)) < 0:
                break
            file.write(encoded)
    sizes = {dump: dump.stat().st_size for dump in sorted(directory.glob("step-*.jsonl"))}
    total = sum(sizes.values())
    for oldest, size in sizes.items():
        if total <= max_bytes:
            break
        oldest.unlink()
        total -= size
    return path


def _lines(
    groups: Sequence[SampledGroup], step: int, window: int, decode: Decode, schema: Schema
) -> Iterator[str]:
    for group in groups:
        for index, advantage in enumerate(group.advantages):
            line = _line(group, index, advantage, decode, schema)
            head = {"schema_version": 2, "step": step, "window": window}
            yield json.dumps({**head, **line}, ensure_ascii=False)


def _line(
    group: SampledGroup, index: int, advantage: float | None, decode: Decode, schema: Schema
) -> dict[str, Any]:
    of, trajectory = group.payload, group.payload.trajectories[index]
    segments = list(trajectory.segments())
    tokens = [segment[TOKENS].tolist() for segment in segments]
    mask_T = trajectory.per_token[MASK]
    sampled = [segment[TOKENS][segment[MASK]].tolist() for segment in segments]
    scored = {}
    if group.logprobs is not None:
        trainer_T = np.zeros(len(mask_T), np.float32)
        trainer_T[mask_T] = group.logprobs[index]
        scored = {"trainer_logprobs": _shortest(trainer_T)}
    values, loss_fields = trajectory.values, group.loss_fields.get(index, {})
    further = {
        field.name: _shown(field, trajectory, loss_fields)
        for field in schema.values()
        if field.in_samples and field.name not in BUILT_IN
    }
    return {
        "group": f"{of.uid}@{of.epoch}.{of.attempt}",
        "uid": of.uid,
        "epoch": of.epoch,
        "attempt": of.attempt,
        "trajectory": index,
        "reward": group.rewards[index] if group.rewards else values[REWARD],
        **({"reward_parts": {**group.parts[index]}} if group.parts and group.parts[index] else {}),
        "advantage": advantage,
        "answer": group.answer,
        "finish_reason": values[FINISH_REASON],
        "text": "".join(map(decode, tokens)),
        "sampled_text": "".join(map(decode, sampled)),
        "spans": [span for n, segment in enumerate(segments) for span in _spans(segment, n, decode)],
        "turn_rewards": list(values.get(TURN_REWARDS, ())),
        "tokens": list(chain.from_iterable(tokens)),
        "pieces": list(chain.from_iterable(pieces(ids, decode) for ids in tokens)),
        "logprobs": _shortest(trajectory.per_token[LOGPROBS]),
        **scored,
        "versions": trajectory.per_token[VERSIONS].tolist(),
        "mask": mask_T.astype(int).tolist(),
        "segment_lengths": [len(ids) for ids in tokens],
        "fields": {name: shown for name, shown in further.items() if shown["values"] is not None},
    }


def _shown(field: Field, trajectory: Trajectory, loss_fields: Arrays) -> dict[str, Any]:
    """A declared field of a trajectory: a value, or one for every token (None where it was not sampled, if it
    is a field of sampled tokens). `values` is None if nobody has written it."""
    shown: dict[str, Any] = {"per": field.per, "shown": field.shown, "doc": field.doc}
    array = {**trajectory.per_token, **trajectory.per_sampled, **loss_fields}.get(field.name)
    if not field.is_array or array is None:
        return {**shown, "values": trajectory.values.get(field.name)}
    values = _shortest(array) if array.dtype == np.float32 and array.ndim == 1 else array.tolist()
    if field.per == "sampled":
        left = iter(values)
        values = [next(left) if is_sampled else None for is_sampled in trajectory.per_token[MASK].tolist()]
    return {**shown, "values": values}


def _shortest(values_T: NDArray[np.float32]) -> list[float]:
    """The shortest decimals that represent these numbers as float32: half as long as those for float64."""
    return [float(str(value)) for value in values_T]


def pieces(tokens: Sequence[int], decode: Decode) -> list[str]:
    """The text of each token. If several tokens form one character, the last of them has it.

    A token is decoded after the one before it, because some tokenizers drop a text's first space.
    """
    texts: list[str] = []
    begin, known, before = 0, 0, ""
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[begin:end]))
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(tokens):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        begin, known = known, end
        before = decode(list(tokens[begin:known]))
    return texts


def _spans(segment: Arrays, number: int, decode: Decode) -> Iterator[dict[str, Any]]:
    """The stretches of a segment that the model sampled, and those in between."""
    tokens = zip(segment[MASK].tolist(), segment[TOKENS].tolist(), strict=True)
    for is_sampled, pairs in groupby(tokens, key=itemgetter(0)):
        yield {
            "segment": number,
            "by": "model" if is_sampled else "environment",
            "text": decode([token for _, token in pairs]),
        }
