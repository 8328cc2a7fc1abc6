"""Builds microbatches: segments and advantages -> padded tensors on the trainer's device.

Legend: B = rows (segments), T = padded positions, N = sampled tokens, row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from asyncrl_cli.contracts.trajectories import NOT_SAMPLED, GroupPayload, Segment
from asyncrl_cli.train.balance import OptimizerStepPlan, microbatches, packed

SPLIT_COST_TOKENS = {"cpu": 128, "cuda": 8192}
"""Cost of one more microbatch, in padded tokens. On a CPU: 8 ms of overhead at 65 us a token (0.75 M
parameters). On a GPU it is high, because full microbatches are more efficient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Right-padded rows. Position t predicts token t + 1, so a row of T + 1 tokens takes T positions.
    `lengths`: the number of positions of each row, without padding.

    `select_N`: indices into the flattened (B, T) of the positions that predict a sampled token.
    `staleness_N`: the version at the window's start minus the version that sampled the token.
    `trajectory_tokens_N`: the number of sampled tokens in the token's trajectory. `order_N`: the token's
    index among the sampled tokens of this rank's share of the optimizer step, trajectory by trajectory.
    `columns`: further values per token, by name (scores.py).
    """

    inputs_BT: torch.Tensor
    lengths: tuple[int, ...]
    select_N: torch.Tensor
    targets_N: torch.Tensor
    rows_N: torch.Tensor
    logp_mu_N: torch.Tensor
    advantages_N: torch.Tensor
    staleness_N: torch.Tensor
    trajectory_tokens_N: torch.Tensor
    order_N: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)


class BatchRow(NamedTuple):
    """A segment, its trajectory's advantage and number of sampled tokens, and the index of its first sampled
    token."""

    segment: Segment
    advantage: float
    trajectory_tokens: int
    first_token: int = 0


def build_microbatches(
    plan: OptimizerStepPlan,
    payloads: Mapping[int, GroupPayload],
    *,
    window: int,
    max_tokens: int,
    device: torch.device,
    are_packed: bool = False,
) -> list[Microbatch]:
    """Microbatches of this rank's share of an optimizer step; all segments of a trajectory share its
    advantage. `max_tokens` counts padding unless rows `are_packed` (unpadded.py)."""
    rows, num_before = [], 0
    for planned in plan.trajectories:
        segments = payloads[planned.group].trajectories[planned.trajectory].segments
        counts = [int(segment.mask_T.sum()) for segment in segments]
        for segment, count in zip(segments, counts, strict=True):
            if count:
                rows.append(BatchRow(segment, planned.advantage, sum(counts), num_before))
            num_before += count
    lengths = [len(row.segment.tokens_T) - 1 for row in rows]
    parts = (
        packed(lengths, max_tokens)
        if are_packed
        else microbatches(lengths, max_tokens, SPLIT_COST_TOKENS[device.type])
    )
    return [build_microbatch([rows[i] for i in part], window, device) for part in parts]


def build_microbatch(rows: Sequence[BatchRow], window: int, device: torch.device) -> Microbatch:
    """One microbatch of `rows`, padded to the longest. `window`: the version at the window's start.

    Padding follows the real tokens, so causal attention never sees it. Raises ValueError if a segment's first
    token is sampled.
    """
    if any(row.segment.mask_T[0] for row in rows):
        raise ValueError("a segment begins with a sampled token, which nothing predicts")
    shape = (len(rows), max(len(row.segment.tokens_T) for row in rows))
    tokens_BT, mask_BT = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    for b, (segment, *_) in enumerate(rows):
        tokens_BT[b, : len(segment.tokens_T)] = segment.tokens_T
        mask_BT[b, : len(segment.mask_T)] = segment.mask_T
    predicted_BT = mask_BT[:, 1:]
    rows_N, positions_N = predicted_BT.nonzero()
    logp_mu_N = np.concatenate([segment.logprobs_T[segment.mask_T] for segment, *_ in rows]).astype(
        np.float32
    )
    versions_N = np.concatenate([segment.versions_T[segment.mask_T] for segment, *_ in rows])
    advantages_N = np.array([row.advantage for row in rows], dtype=np.float32)[rows_N]
    trajectory_tokens_N = np.array([row.trajectory_tokens for row in rows])[rows_N]
    order_N = np.concatenate([row.first_token + np.arange(row.segment.mask_T.sum()) for row in rows])
    return Microbatch(
        inputs_BT=torch.from_numpy(tokens_BT[:, :-1].copy()).to(device),
        lengths=tuple(len(segment.tokens_T) - 1 for segment, *_ in rows),
        rows_N=torch.from_numpy(rows_N).to(device),
        select_N=torch.from_numpy(rows_N * predicted_BT.shape[1] + positions_N).to(device),
        targets_N=torch.from_numpy(tokens_BT[:, 1:][predicted_BT]).to(device),
        logp_mu_N=torch.from_numpy(logp_mu_N).to(device),
        advantages_N=torch.from_numpy(advantages_N).to(device),
        staleness_N=torch.from_numpy(window - versions_N).to(device),
        trajectory_tokens_N=torch.from_numpy(trajectory_tokens_N).to(device),
        order_N=torch.from_numpy(order_N).to(device),
    )


def empty_microbatch(device: torch.device) -> Microbatch:
    """A microbatch of two tokens that were not sampled. Its loss is 0; with it, a rank joins in every
    collective of a step."""
    return scoring_microbatch([[0, 0]], device, is_scored=False)


def scoring_microbatch(
    sequences: Sequence[Sequence[int]], device: torch.device, *, is_scored: bool = True
) -> Microbatch:
    """A microbatch of whole sequences of any lengths, in which every token but the first is scored (none
    unless `is_scored`)."""
    rows = []
    for tokens in sequences:
        versions = [NOT_SAMPLED, *[0 if is_scored else NOT_SAMPLED] * (len(tokens) - 1)]
        rows.append(BatchRow(Segment.of(tokens, [0.0] * len(tokens), versions), 0.0, len(tokens)))
    return build_microbatch(rows, 0, device)
