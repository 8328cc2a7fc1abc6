"""What a rollout produces: trajectories. They travel from a rollout worker to the trainer ranks, never through the driver, and a
run may dump those of a train step as JSON lines (`samples/step-000040.jsonl`).

Legend: T = all tokens of a segment, prompt and response together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NOT_SAMPLED = -1
"""Version of a token that no policy sampled (prompt, tool output)."""
Decode = Callable[[list[int]], str]
"""Token ids to text, e.g. a tokenizer's `decode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One contiguous context. All arrays have length T; a token that was not sampled has mask 0 and version -1.

    `logprobs_T` are of the temperature-scaled, untruncated distribution; 0 where mask is 0.
    """

    tokens_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int32]
    mask_T: NDArray[np.bool_]

    def __post_init__(self) -> None:
        lengths = {len(self.tokens_T), len(self.logprobs_T), len(self.versions_T), len(self.mask_T)}
        if len(lengths) != 1:
            raise ValueError(f"arrays of a segment differ in length: {sorted(lengths)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One or more segments that share a reward; several where the context was rewritten. `turn_rewards`: what the reward is made
    of, if the environment says so."""

    segments: tuple[Segment, ...]
    reward: float
    finish_reason: str
    turn_rewards: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPayload:
    """The trajectories of one prompt, or those of one part of its group; same order as in `GroupResult` or `PartResult`."""

    uid: str
    epoch: int
    attempt: int
    trajectories: tuple[Trajectory, ...]


def joined(parts: Iterable[GroupPayload]) -> list[GroupPayload]:
    """Whole groups, in order. The parts of a group come one after the other, in the order of their numbers."""
    whole = []
    for (uid, epoch, attempt), own in groupby(parts, key=lambda part: (part.uid, part.epoch, part.attempt)):
        trajectories = tuple(chain.from_iterable(part.trajectories for part in own))
        whole.append(GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=trajectories))
    return whole


def is_dump_step(step: int, every_steps: int) -> bool:
    """Whether `logging.samples_every_steps` asks for this step (counted from 1); 0 is never."""
    return every_steps > 0 and step % every_steps == 0


def dump_samples(directory: Path, step: int, payloads: Sequence[GroupPayload], *, window: int, decode: Decode) -> Path:
    """Write one JSON line per trajectory of `step`, atomically: its whole text, and the part that the policy sampled.

    Arrays cover all tokens of all segments, end to end; `segment_lengths` says where each segment ends. `spans` tells the
    trajectory as people read it, turn by turn: what the model said, and what it was told.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{step:06d}.jsonl"
    temporary = path.with_name(f".{path.name}.tmp")
    # A lone surrogate, which some tokenizers decode to, becomes \\udxxx: JSON's own way to write it.
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for group in payloads:
            for index, trajectory in enumerate(group.trajectories):
                line = {"schema_version": 1, "step": step, "window": window, **_line(group, index, trajectory, decode)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    temporary.replace(path)
    return path


def _line(group: GroupPayload, index: int, trajectory: Trajectory, decode: Decode) -> dict[str, Any]:
    segments = trajectory.segments
    tokens = [segment.tokens_T.tolist() for segment in segments]
    sampled = [segment.tokens_T[np.asarray(segment.mask_T, dtype=bool)].tolist() for segment in segments]
    return {
        "group": f"{group.uid}@{group.epoch}.{group.attempt}",
        "uid": group.uid,
        "epoch": group.epoch,
        "attempt": group.attempt,
        "trajectory": index,
        "reward": trajectory.reward,
        "finish_reason": trajectory.finish_reason,
        "text": "".join(map(decode, tokens)),
        "sampled_text": "".join(map(decode, sampled)),
        "spans": [span for number, segment in enumerate(segments) for span in _spans(segment, number, decode)],
        "turn_rewards": list(trajectory.turn_rewards),
        "tokens": list(chain.from_iterable(tokens)),
        "logprobs": [float(value) for segment in segments for value in segment.logprobs_T],
        "versions": [int(value) for segment in segments for value in segment.versions_T],
        "mask": [int(value) for segment in segments for value in segment.mask_T],
        "segment_lengths": [len(ids) for ids in tokens],
    }


def _spans(segment: Segment, number: int, decode: Decode) -> Iterator[dict[str, Any]]:
    """The stretches of a segment that the model sampled, and those between them."""
    for is_sampled, pairs in groupby(zip(segment.mask_T.tolist(), segment.tokens_T.tolist(), strict=True), key=itemgetter(0)):
        yield {"segment": number, "by": "model" if is_sampled else "environment", "text": decode([token for _, token in pairs])}
