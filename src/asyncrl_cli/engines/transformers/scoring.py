"""Logprobs of given tokens by a plain forward pass of a causal language model.

Legend: B = sequences, T = tokens of the longest, V = vocabulary.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

MAX_LOGITS_BYTES = 256 * 2**20


@torch.no_grad()
def score(model: PreTrainedModel, sequences: list[list[int]], temperature: float) -> list[list[float]]:
    """Per sequence the logprobs of its tokens 1, 2, ... in the distribution scaled by `temperature` (0 counts as 1)."""
    longest = max((len(sequence) for sequence in sequences), default=0)
    bytes_per_sequence = 4 * 2 * longest * model.config.get_text_config().vocab_size
    step = max(1, MAX_LOGITS_BYTES // max(1, bytes_per_sequence))
    scores: list[list[float]] = []
    for begin in range(0, len(sequences), step):
        scores.extend(_score_batch(model, sequences[begin : begin + step], temperature or 1.0))
    return scores


def _score_batch(model: PreTrainedModel, sequences: list[list[int]], temperature: float) -> list[list[float]]:
    """Padded on the right: under a causal mask no real token sees the padding."""
    longest = max(len(sequence) for sequence in sequences)
    padded = [sequence + [0] * (longest - len(sequence)) for sequence in sequences]
    tokens_BT = torch.tensor(padded, device=model.device)
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1].float() / temperature
    logprobs_BT = torch.log_softmax(logits_BTV, dim=-1).gather(2, tokens_BT[:, 1:, None])[..., 0]
    return [row[: len(sequence) - 1] for row, sequence in zip(logprobs_BT.tolist(), sequences, strict=True)]
