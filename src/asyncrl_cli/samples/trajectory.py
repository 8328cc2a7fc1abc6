"""Trajectories as they travel from a rollout worker to the trainer ranks (never through the driver).

Legend: T = all tokens of a segment, prompt and response together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOT_SAMPLED = -1
"""Version of a token that no policy sampled (prompt, tool output)."""


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
    """One or more segments that share a reward (several: multi-turn, or a rewritten context)."""

    segments: tuple[Segment, ...]
    reward: float
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPayload:
    """The trajectories of one prompt; same order as `GroupResult.trajectories` of the same attempt."""

    uid: str
    epoch: int
    attempt: int
    trajectories: tuple[Trajectory, ...]
