"""Microbatches: segments and advantages -> padded tensors on the trainer's device, with columns of per-token
values.

A column has one number per sampled token. These travel with a train step's microbatches, and so do all
declared fields with `in_losses` (data/sample_fields.py):

    prox        the token's logprob under the weights at the window's start
    ref         its logprob under the reference
    teacher     its logprob under the teacher                            (teachers.py)
    critic      the critic's value of the state in which it was sampled
    penalties   the KL estimate that is subtracted, weighted, from its reward (critic.py)
    advantages  its advantage, if that depends on the columns above      (critic.py)
    returns     what the critic should have answered                     (critic.py)
    finished    0 if its response was cut off, and the critic learns nothing from it (critic.py)

Any process that has the stage's model computes one of the first four for groups (`ShardedModel.column`).
They are fields of the trajectories then; `PolicyTrainer.train` computes the missing ones itself, once per
token.

Legend: B = rows (segments), T = padded positions, N = sampled tokens, row by row; F = sampled tokens of a
rank's share of an optimizer step, trajectory by trajectory; P = its trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl_cli.data.sample_fields import (
    BUILT_IN,
    KEPT_TOKENS,
    LOGPROBS,
    MASK,
    NOT_SAMPLED,
    ROUTED_EXPERTS,
    TOKENS,
    VERSIONS,
    Field,
    Schema,
)
from asyncrl_cli.data.trajectories import Arrays, GroupPayload, Trajectory, segment_of
from asyncrl_cli.profile import arithmetic
from asyncrl_cli.train.prefix_trees import PrefixTree, cut_trees, prefix_tree
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.sampling_masks import KeptTokens
from asyncrl_cli.train.step_plan import OptimizerStepPlan, RankPlan

PROX, REF, TEACHER, VALUES = arithmetic.PROX, arithmetic.REF, arithmetic.TEACHER, arithmetic.CRITIC
TEACHER_NUMBER = "teacher number"
"""Of several teachers, which one the token has."""
PENALTIES, ADVANTAGES, RETURNS, FINISHED = "penalties", "advantages", "returns", "finished"
SPLIT_COST_TOKENS = {"cpu": 128, "cuda": 8192}
"""Cost of one more microbatch, in padded tokens. On a CPU: 8 ms of overhead at 65 us a token (0.75 M
parameters). On a GPU it is high, because full microbatches are more efficient."""

Column = Mapping[int, tuple[NDArray[np.float32], ...]]
"""By group index: an array per trajectory, with one number per sampled token, all segments end to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Right-padded rows. Position t predicts token t + 1, so a row of T + 1 tokens takes T positions.
    `lengths`: the number of positions of each row, without padding.

    `select_N`: indices into the flattened (B, T) of the positions that predict a sampled token.
    `staleness_N`: the version at the window's start minus the version that sampled the token.
    `trajectory_tokens_N`: the number of sampled tokens in the token's trajectory. `order_N`: the token's
    index among those of this rank's share of the optimizer step (F). `columns`: further values (N), by name.
    `tree`: if set, models that can compute what rows share once. `kept`: if set, language models compute
    logprobs and entropies among these tokens. `experts_BTW`: if set, those that the sampler gave each
    position to, layer by layer, for models that replay them (models/experts.py).
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
    tree: PrefixTree | None = None
    kept: KeptTokens | None = None
    experts_BTW: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's share of an optimizer step, as microbatches. `counts_P`: sampled tokens per trajectory."""

    plan: OptimizerStepPlan
    microbatches: list[Microbatch]
    counts_P: list[int]

    def fill(self, name: str, values_of: Callable[[Microbatch], torch.Tensor]) -> None:
        """Compute a column for the microbatches that lack it. A collective, if `values_of` is one: the column
        is missing on all ranks or on none."""
        for microbatch in self.microbatches:
            if name not in microbatch.columns:
                microbatch.columns[name] = values_of(microbatch)

    def column(self, name: str) -> torch.Tensor:
        """A column over all microbatches, (F)."""
        values_F = torch.zeros(sum(self.counts_P), device=self.microbatches[0].rows_N.device)
        for microbatch in self.microbatches:
            values_F[microbatch.order_N] = microbatch.columns[name].float()
        return values_F

    def set_column(self, name: str, values_F: torch.Tensor) -> None:
        for microbatch in self.microbatches:
            microbatch.columns[name] = values_F[microbatch.order_N]


class BatchRow(NamedTuple):
    """A segment, its trajectory's advantage and number of sampled tokens, and the index of its first sampled
    token."""

    segment: Arrays
    advantage: float
    trajectory_tokens: int
    first_token: int = 0


def step_batches(
    plan: RankPlan,
    payloads: Mapping[int, GroupPayload],
    columns: Sequence[str] = (),
    *,
    max_tokens: int,
    ranks: Ranks,
    are_packed: bool = False,
    are_trees: bool = False,
    schema: Schema = BUILT_IN,
) -> list[StepBatch]:
    """This rank's share of each optimizer step, with the fields that losses want. A collective. All segments
    of a trajectory share its advantage. `columns`: further fields that all trajectories have (a rank without
    groups has the names, too). `max_tokens` is per rank; it counts padding unless rows `are_packed`
    (packed_rows.py). `are_trees`: it counts unique positions, where rows share enough (prefix_trees.py)."""
    batches, budget = list[StepBatch](), max_tokens * ranks.sequence_size
    for step in plan.optimizer_steps:
        rows, counts_P, first_token = list[BatchRow](), list[int](), 0
        for planned in step.trajectories:
            trajectory = payloads[planned.group].trajectories[planned.trajectory]
            counts_P.append(trajectory.num_sampled)
            for segment, count in zip(trajectory.segments(), trajectory.counts, strict=True):
                if count.sampled:
                    rows.append(BatchRow(segment, planned.advantage, counts_P[-1], first_token))
                first_token += count.sampled
        lengths = [len(row.segment[TOKENS]) - 1 for row in rows]
        split_cost = SPLIT_COST_TOKENS[ranks.device.type]
        trees = cut_trees([row.segment[TOKENS][:-1] for row in rows], budget) if are_trees else []
        cut = cut_packed(lengths, budget) if are_packed else cut_padded(lengths, budget, split_cost)
        parts = ([rows[i] for i in indices] for indices in trees or cut)
        microbatches = [
            build_microbatch(part, plan.window, ranks.device, is_tree=bool(trees)) for part in parts
        ]
        batches.append(StepBatch(step, microbatches, counts_P))
    # Every rank must take part in every FSDP collective: those with fewer microbatches add empty ones, of two
    # tokens that were not sampled.
    most = torch.tensor([max(len(batch.microbatches), 1) for batch in batches], device=ranks.device)
    for batch, number in zip(batches, ranks.max(most).tolist(), strict=True):
        while len(batch.microbatches) < number:
            batch.microbatches.append(scoring_microbatch([[0, 0]], ranks.device, is_scored=False))
        mine = [payloads[one.group].trajectories[one.trajectory] for one in batch.plan.trajectories]
        for declared in (*(schema[name] for name in columns), *schema.in_losses):
            values_F = np.concatenate([declared.filled(0), *(sampled_values(one, declared) for one in mine)])
            is_float = np.issubdtype(values_F.dtype, np.floating)
            values_F = values_F.astype(np.float32 if is_float else np.int64)
            batch.set_column(declared.name, torch.from_numpy(values_F).to(ranks.device))
    return batches


def sampled_values(trajectory: Trajectory, declared: Field) -> NDArray[Any]:
    """A field's values for the sampled tokens of a trajectory, all segments end to end."""
    if declared.name in trajectory.per_sampled:
        return trajectory.per_sampled[declared.name]
    if declared.name in trajectory.per_token:
        return trajectory.per_token[declared.name][trajectory.per_token[MASK]]
    return declared.filled(trajectory.num_sampled)


def build_microbatch(
    rows: Sequence[BatchRow], window: int, device: torch.device, *, is_tree: bool = False
) -> Microbatch:
    """One microbatch of `rows`, padded to the longest. `window`: the version at the window's start.

    Padding follows the real tokens, so causal attention never sees it. Raises ValueError if a segment's first
    token is sampled.
    """
    if any(row.segment[MASK][0] for row in rows):
        raise ValueError("a segment begins with a sampled token, which nothing predicts")
    shape = (len(rows), max(len(row.segment[TOKENS]) for row in rows))
    tokens_BT, mask_BT = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    for b, (segment, *_) in enumerate(rows):
        tokens_BT[b, : len(segment[TOKENS])] = segment[TOKENS]
        mask_BT[b, : len(segment[MASK])] = segment[MASK]
    predicted_BT = mask_BT[:, 1:]
    rows_N, positions_N = predicted_BT.nonzero()
    # Scorers have neither: they need tokens alone.
    absent = dict.fromkeys((LOGPROBS, VERSIONS), np.zeros(shape[1], dtype=np.int32))
    logp_mu_N, versions_N = (
        np.concatenate([{**absent, **one}[name][: len(one[MASK])][one[MASK]] for one, *_ in rows])
        for name in (LOGPROBS, VERSIONS)
    )
    advantages_N = np.array([row.advantage for row in rows], dtype=np.float32)[rows_N]
    trajectory_tokens_N = np.array([row.trajectory_tokens for row in rows])[rows_N]
    masks = []
    if any(len(one[KEPT_TOKENS].values) for one, *_ in rows if KEPT_TOKENS in one):
        masks = [
            one[KEPT_TOKENS] if KEPT_TOKENS in one else BUILT_IN[KEPT_TOKENS].filled(int(one[MASK].sum()))
            for one, *_ in rows
        ]
    order_N = np.concatenate([row.first_token + np.arange(row.segment[MASK].sum()) for row in rows])
    return Microbatch(
        inputs_BT=torch.from_numpy(tokens_BT[:, :-1].copy()).to(device),
        lengths=tuple(len(segment[TOKENS]) - 1 for segment, *_ in rows),
        rows_N=torch.from_numpy(rows_N).to(device),
        select_N=torch.from_numpy(rows_N * predicted_BT.shape[1] + positions_N).to(device),
        targets_N=torch.from_numpy(tokens_BT[:, 1:][predicted_BT]).to(device),
        logp_mu_N=torch.from_numpy(logp_mu_N.astype(np.float32)).to(device),
        advantages_N=torch.from_numpy(advantages_N).to(device),
        staleness_N=torch.from_numpy(window - versions_N).to(device),
        trajectory_tokens_N=torch.from_numpy(trajectory_tokens_N).to(device),
        order_N=torch.from_numpy(order_N).to(device),
        tree=prefix_tree([row.segment[TOKENS][:-1] for row in rows], device) if is_tree else None,
        kept=KeptTokens.of(masks, device) if masks else None,
        experts_BTW=_experts(rows, shape[1] - 1, device),
    )


def _experts(rows: Sequence[BatchRow], width: int, device: torch.device) -> torch.Tensor | None:
    found = [row.segment.get(ROUTED_EXPERTS) for row in rows]
    like = next((one for one in found if one is not None and one.shape[1]), None)
    if like is None:
        return None
    experts_BTW = np.full((len(rows), width, like.shape[1]), -1, dtype=np.int16)
    for b, one in enumerate(found):
        if one is not None and one.shape[1]:
            experts_BTW[b, : len(one) - 1] = one[:-1]
    return torch.from_numpy(experts_BTW).to(device)


def scoring_microbatch(
    sequences: Sequence[Sequence[int]],
    device: torch.device,
    *,
    is_scored: bool = True,
    is_tree: bool = False,
) -> Microbatch:
    """A microbatch of whole sequences of any lengths, in which every token but the first is scored (none
    unless `is_scored`)."""
    rows = []
    for tokens in sequences:
        versions = [NOT_SAMPLED, *[0 if is_scored else NOT_SAMPLED] * (len(tokens) - 1)]
        rows.append(BatchRow(segment_of(tokens, [0.0] * len(tokens), versions), 0.0, len(tokens)))
    return build_microbatch(rows, 0, device, is_tree=is_tree)


def cut_padded(lengths: Sequence[int], max_tokens: int, split_cost_tokens: int) -> list[list[int]]:
    """Row indices per microbatch: as few microbatches as `max_tokens` (with padding) allows, then split where
    padding costs more.

    Rows are grouped by length, longest first. A microbatch is cut in two if that saves more padded tokens
    than `split_cost_tokens`, the cost of one more forward and backward pass. A row longer than the budget
    gets a microbatch of its own. Within a microbatch the order of `lengths` is kept.
    """
    cut: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if cut and (len(cut[-1]) + 1) * lengths[cut[-1][0]] <= max_tokens:
            cut[-1].append(index)
        else:
            cut.append([index])
    return [sorted(part) for rows in cut for part in _split_padding(rows, lengths, split_cost_tokens)]


def cut_packed(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row indices per microbatch for rows packed end to end without padding: longest first, each filled up to
    `max_tokens`."""
    cut, used = list[list[int]](), max_tokens
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if used + lengths[index] > max_tokens:
            cut.append([])
            used = 0
        cut[-1].append(index)
        used += lengths[index]
    return [sorted(rows) for rows in cut]


def _split_padding(rows: list[int], lengths: Sequence[int], split_cost_tokens: int) -> list[list[int]]:
    # `rows` are sorted, longest first: a cut before row i narrows rows i.. from the first row's length.
    savings = [(len(rows) - i) * (lengths[rows[0]] - lengths[rows[i]]) for i in range(len(rows))]
    best = max(range(len(rows)), key=savings.__getitem__)
    if savings[best] <= split_cost_tokens:
        return [rows]
    halves = rows[:best], rows[best:]
    return [part for half in halves for part in _split_padding(half, lengths, split_cost_tokens)]
