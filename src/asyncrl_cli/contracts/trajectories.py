"""The arrays of a group. They travel from rollout workers to trainer ranks and not through the driver, which
has only handles of them (`GroupResult.payload`), except when it reads a checkpoint.

    GroupPayload(uid="9f3c", epoch=0, attempt=0, trajectories=(
        Trajectory(reward=1.0, finish_reason="stop", segments=(
            Segment.of(tokens=[5, 9, 7, 2], logprobs=[0, 0, -0.1, -0.7], versions=[-1, -1, 3, 4]),)),))

is a group with one trajectory: a prompt of two tokens, and a response of two that versions 3 and 4 sampled.

Legend: T = all tokens of a segment, prompt and response together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, zip_longest

import numpy as np
from numpy.typing import NDArray

NOT_SAMPLED = -1
"""Version of a token that no policy sampled (prompt, tool output)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One contiguous context. All arrays have length T. A token that was not sampled has mask 0 and version
    -1.

    `logprobs_T` are for the temperature-scaled, untruncated distribution; 0 where mask is 0.
    """

    tokens_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int32]
    mask_T: NDArray[np.bool_]

    def __post_init__(self) -> None:
        lengths = {len(self.tokens_T), len(self.logprobs_T), len(self.versions_T), len(self.mask_T)}
        if len(lengths) != 1:
            raise ValueError(f"arrays of a segment differ in length: {sorted(lengths)}")

    @classmethod
    def of(cls, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> Segment:
        """Make a segment from lists. A token was sampled if it has a version."""
        versions_T = np.array(versions, dtype=np.int32)
        return cls(
            tokens_T=np.array(tokens, dtype=np.int32),
            logprobs_T=np.array(logprobs, dtype=np.float32),
            versions_T=versions_T,
            mask_T=versions_T != NOT_SAMPLED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One or more segments that share a reward; several if the context was rewritten. `turn_rewards`: the
    parts of the reward, if the environment gives them."""

    segments: tuple[Segment, ...]
    reward: float
    finish_reason: str
    turn_rewards: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPayload:
    """The trajectories of one prompt's group, or of one part of it, in the order of `GroupResult` or
    `PartResult`."""

    uid: str
    epoch: int
    attempt: int
    trajectories: tuple[Trajectory, ...]


def joined(parts: Iterable[GroupPayload]) -> list[GroupPayload]:
    """Join results of parts into whole groups, end to end. The parts of a group must be adjacent and in
    order."""
    whole = []
    for (uid, epoch, attempt), own in groupby(parts, key=lambda part: (part.uid, part.epoch, part.attempt)):
        trajectories = tuple(chain.from_iterable(part.trajectories for part in own))
        whole.append(GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=trajectories))
    return whole


def joined_by_index(
    groups: Iterable[tuple[str, int, int]], parts: Iterable[GroupPayload]
) -> list[GroupPayload]:
    """Join what running groups (uid, epoch, attempt) have so far. Here, unlike in results, a part has a
    trajectory at every index up to its last response; at the indices of other parts it has no segments."""
    found: dict[tuple[str, int, int], list[GroupPayload]] = {}
    for part in parts:
        found.setdefault((part.uid, part.epoch, part.attempt), []).append(part)
    whole = []
    for group in groups:
        by_index = zip_longest(*(part.trajectories for part in found[*group]))
        chosen = [max(filter(None, ones), key=lambda one: len(one.segments)) for ones in by_index]
        whole.append(replace(found[*group][0], trajectories=tuple(chosen)))
    return whole
