"""The data of trajectories, by field.

    Trajectory(
        counts=(Counts(tokens=4, sampled=2),),
        per_token={"tokens": [5, 9, 7, 2], "logprobs": [0, 0, -0.1, -0.7], "versions": [-1, -1, 3, 4],
                   "mask": [0, 0, 1, 1]},
        per_sampled={"ref": [-0.2, -0.6]},
        values={"reward": 1.0, "finish_reason": "stop"})

is one segment: a prompt of two tokens, and a response of two that versions 3 and 4 sampled. Arrays are
numpy's, end to end, never padded before the microbatch, and views where a store lends its memory.

Legend: T = all tokens of a segment, prompt and response together; N = its sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, starmap
from typing import Any, NamedTuple

import numpy as np

from asyncrl_cli.contracts.prompt_group import AttemptKey, DataKey
from asyncrl_cli.data.ragged import Ragged, end_to_end
from asyncrl_cli.data.sample_fields import LOGPROBS, MASK, NOT_SAMPLED, TOKENS, VERSIONS, Schema

Arrays = Mapping[str, Any]
"""By field: an NDArray, or a Ragged if the field is declared so."""
HEADS = "heads"


class Counts(NamedTuple):
    """Of a segment."""

    tokens: int
    sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One or more segments that share a reward; several if the context was rewritten. `counts`: of each
    segment. `per_token`, `per_sampled`: the arrays of fields, all segments end to end. `values`: the other
    fields."""

    counts: tuple[Counts, ...] = ()
    per_token: Arrays = field(default_factory=dict)
    per_sampled: Arrays = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(count.tokens for count in self.counts)

    @property
    def num_sampled(self) -> int:
        return sum(count.sampled for count in self.counts)

    def segments(self) -> Iterator[Arrays]:
        """Each segment's views of all arrays, (T) and (N)."""
        t = n = 0
        for tokens, sampled in self.counts:
            yield {
                **{name: array[t : t + tokens] for name, array in self.per_token.items()},
                **{name: array[n : n + sampled] for name, array in self.per_sampled.items()},
            }
            t, n = t + tokens, n + sampled


def segment_of(tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> Arrays:
    """A segment from lists. A token was sampled if it has a version."""
    versions_T = np.array(versions, dtype=np.int32)
    return {
        TOKENS: np.array(tokens, dtype=np.int32),
        LOGPROBS: np.array(logprobs, dtype=np.float32),
        VERSIONS: versions_T,
        MASK: versions_T != NOT_SAMPLED,
    }


def trajectory_of(segments: Sequence[Arrays], schema: Schema, /, **values: Any) -> Trajectory:
    """Join segments. A field that only some of them have is filled in the others. Raises ValueError if an
    array's length is not that of its segment."""
    counts = tuple(Counts(len(one[TOKENS]), int(one[MASK].sum())) for one in segments)
    arrays: dict[str, dict[str, Any]] = {"token": {}, "sampled": {}}
    for name in dict.fromkeys(chain.from_iterable(segments)):
        declared = schema[name]
        like = next(segment[name] for segment in segments if name in segment)
        parts = []
        for segment, count in zip(segments, counts, strict=True):
            length = count.tokens if declared.per == "token" else count.sampled
            part = segment[name] if name in segment else declared.filled(length, like)
            if len(part) != length:
                raise ValueError(f"field {name} has {len(part)} values for {length} {declared.per} tokens")
            parts.append(part)
        arrays[declared.per][name] = end_to_end(parts)
    return Trajectory(counts=counts, per_token=arrays["token"], per_sampled=arrays["sampled"], values=values)


def packed(trajectories: Sequence[Trajectory], schema: Schema) -> dict[str, Any]:
    """Several trajectories as one array per field, all segments end to end, by "token/<name>" and
    "sampled/<name>", or encoded by "ragged/<name>"; and under HEADS the counts and values of each."""
    whole = trajectory_of([segment for one in trajectories for segment in one.segments()], schema)
    return {
        HEADS: tuple((one.counts, dict(one.values)) for one in trajectories),
        **{
            schema[name].column: array.encoded() if isinstance(array, Ragged) else array
            for name, array in (*whole.per_token.items(), *whole.per_sampled.items())
        },
    }


def unpacked(columns: Mapping[str, Any]) -> list[Trajectory]:
    """The trajectories, as views of `columns`, which may lack fields."""
    found, t, n = list[Trajectory](), 0, 0
    per_token, per_sampled = (
        {key.removeprefix(kind): array for key, array in columns.items() if key.startswith(kind)}
        for kind in ("token/", "sampled/")
    )
    total = sum(count[1] for counts, _ in columns[HEADS] for count in counts)
    for key, array in columns.items():
        if key.startswith("ragged/"):
            per_sampled[key.removeprefix("ragged/")] = Ragged.decoded(array, total)
    for counts, values in columns[HEADS]:
        one = Trajectory(counts=tuple(starmap(Counts, counts)), values=values)
        t_end, n_end = t + one.num_tokens, n + one.num_sampled
        arrays = {name: array[t:t_end] for name, array in per_token.items()}
        sampled = {name: array[n:n_end] for name, array in per_sampled.items()}
        found.append(replace(one, per_token=arrays, per_sampled=sampled))
        t, n = t_end, n_end
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPayload:
    """The trajectories of one prompt's group, or of one part of it, in the order of `GroupResult` or
    `PartResult`."""

    uid: str
    epoch: int
    attempt: int
    trajectories: tuple[Trajectory, ...]


def joined_by_index(
    groups: Mapping[AttemptKey, Mapping[int, DataKey]], parts: Mapping[DataKey, Sequence[Trajectory]]
) -> list[GroupPayload]:
    """Join what running groups have so far. The keys of their responses, by index, say which part's data is
    the newest: a response that went on elsewhere is in an earlier part's data, too. Here, unlike in results,
    a part and the whole have a trajectory at every index up to the last response; others have no segments."""
    whole = []
    for (uid, epoch, attempt), keys in groups.items():
        chosen = [parts[keys[i]][i] if i in keys else Trajectory() for i in range(max(keys) + 1)]
        whole.append(GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=tuple(chosen)))
    return whole
