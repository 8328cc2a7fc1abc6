"""Sampling masks: the tokens among which each trained token was sampled (`rollout.sampling_mask`).

With S the tokens that top_p, top_k and min_p kept of the sampler's distribution, and l the scaled logits of
any model, the logprob of a token is its l minus log sum over S of exp(l). Policy, prox, reference and teacher
all take the sampler's S, so a ratio is 1 and a KL is 0 where the weights are equal. Where S is a single
token, its logprob is 0 under all weights, and nothing is learned from it.

Source: DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, "Keep Sampling Mask".

Legend: N = sampled tokens, C = those of a chunk, V = vocabulary, M = kept tokens of all N, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from asyncrl_cli.data.ragged import Ragged, end_to_end


class KeptTokens(NamedTuple):
    """Pairs of a row, ascending, and the id of a token kept there. A row without any has the whole
    vocabulary."""

    rows_M: torch.Tensor
    ids_M: torch.Tensor

    @classmethod
    def of(cls, parts: Sequence[Ragged], device: torch.device) -> KeptTokens:
        whole: Ragged = end_to_end(parts)
        rows_M = np.repeat(np.arange(len(whole)), whole.lengths)
        ids_M = whole.encoded()[len(whole) :].astype(np.int64)
        return cls(torch.from_numpy(rows_M).to(device), torch.from_numpy(ids_M).to(device))

    def chosen(self, tokens_n: torch.Tensor | None, num_tokens: int) -> KeptTokens:
        """Of these rows, ascending, which get the numbers 0, 1, ... None: of all."""
        if tokens_n is None:
            return self
        numbers_N = torch.full((num_tokens,), -1, device=self.rows_M.device)
        numbers_N[tokens_n] = torch.arange(len(tokens_n), device=self.rows_M.device)
        rows_M = numbers_N[self.rows_M]
        return KeptTokens(rows_M[rows_M >= 0], self.ids_M[rows_M >= 0])

    def chunk(self, rows: slice) -> KeptTokens:
        if rows == slice(None):
            return self
        bounds = torch.tensor([rows.start, rows.stop], device=self.rows_M.device)
        first, last = torch.searchsorted(self.rows_M, bounds).tolist()
        return KeptTokens(self.rows_M[first:last] - rows.start, self.ids_M[first:last])

    def left_out(self, scaled_CV: torch.Tensor) -> torch.Tensor:
        """Whether each token was not kept."""
        is_left_out_CV = torch.zeros_like(scaled_CV, dtype=torch.bool)
        is_left_out_CV[self.rows_M.unique_consecutive()] = True  # each row once, not once per kept token
        is_left_out_CV[self.rows_M, self.ids_M] = False
        return is_left_out_CV
