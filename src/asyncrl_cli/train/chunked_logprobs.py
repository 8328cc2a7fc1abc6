"""Logprobs and entropies of tokens from the decoder's last hidden states, computed in chunks to save memory.

Logits of 16,000 tokens and a vocabulary of 150,000 take 9 GiB in float32, and several copies of them would be
alive in a backward pass. Here logits exist for one chunk of tokens at a time: the forward pass drops them,
and the backward pass computes them again. Only the hidden states are kept in between. torch's own
`linear_cross_entropy` returns no entropies, and supports neither a temperature nor the scales and soft-caps
of some models' heads.

Legend: N = tokens, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from asyncrl_cli.train import LOGITS_CHUNK_ELEMENTS


class Scored(NamedTuple):
    """Each token's logprob (with gradient), and the entropy in nats of its distribution (without gradient).
    Both float32."""

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor


class Head(NamedTuple):
    """What follows the decoder. `logits_of` maps hidden states (N, H) to logits (N, V), and depends on
    `parameters` alone."""

    logits_of: Callable[[torch.Tensor], torch.Tensor]
    parameters: tuple[torch.Tensor, ...]
    vocab_size: int
    temperature: float

    def chunk_tokens(self, device: torch.device) -> int:
        return max(1, LOGITS_CHUNK_ELEMENTS[device.type] // self.vocab_size)

    def score(self, hidden_NH: torch.Tensor, targets_N: torch.Tensor) -> Scored:
        """Logprobs of the targets, and entropies. A single chunk keeps its logits for the backward pass,
        which is faster."""
        if len(targets_N) <= self.chunk_tokens(targets_N.device):
            return self.score_chunk(hidden_NH, targets_N)
        return Scored(*_Chunks.apply(self, targets_N, hidden_NH, *self.parameters))

    def score_chunk(self, hidden_NH: torch.Tensor, targets_N: torch.Tensor) -> Scored:
        logprobs_NV = torch.log_softmax(self.scaled_logits(hidden_NH), dim=-1)
        whole_NV = logprobs_NV.detach()
        return Scored(
            # a sum over one; FSDP rejects the view of squeeze
            logprobs_N=logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).sum(-1),
            entropy_N=-whole_NV.exp().mul_(whole_NV).sum(-1),
        )

    def scaled_logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        logits_NV = self.logits_of(hidden_NH).float()
        return logits_NV if self.temperature == 1.0 else logits_NV / self.temperature  # saves a copy


class _Chunks(torch.autograd.Function):
    """`Head.score_chunk` over chunks of tokens; gradients of the head's parameters are added up in
    float32."""

    @staticmethod
    def forward(
        ctx: Any, head: Head, targets_N: torch.Tensor, hidden_NH: torch.Tensor, *parameters: torch.Tensor
    ) -> Any:
        ctx.head = head
        ctx.save_for_backward(targets_N, hidden_NH)
        size = head.chunk_tokens(targets_N.device)
        chunks = zip(hidden_NH.split(size), targets_N.split(size), strict=True)
        logprobs, entropies = zip(
            *(head.score_chunk(hidden, targets) for hidden, targets in chunks), strict=True
        )
        scored = Scored(torch.cat(logprobs), torch.cat(entropies))
        ctx.mark_non_differentiable(scored.entropy_N)
        return tuple(scored)

    @staticmethod
    def backward(ctx: Any, gradient_N: torch.Tensor, _: torch.Tensor) -> Any:
        head: Head = ctx.head
        targets_N, hidden_NH = ctx.saved_tensors
        hidden_gradient_NH = torch.empty_like(hidden_NH)
        trained = [parameter for parameter in head.parameters if parameter.requires_grad]
        sums = {id(p): torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for p in trained}
        for rows in torch.arange(len(targets_N)).split(head.chunk_tokens(targets_N.device)):
            chunk = slice(int(rows[0]), int(rows[-1]) + 1)
            hidden_gradient_NH[chunk], *found = _chunk_gradients(
                head, trained, hidden_NH[chunk], targets_N[chunk], gradient_N[chunk]
            )
            for parameter, gradient in zip(trained, found, strict=True):
                sums[id(parameter)] += gradient
            del found
        return (
            None,
            None,
            hidden_gradient_NH,
            *(sums[id(p)].to(p.dtype) if p.requires_grad else None for p in head.parameters),
        )


def _chunk_gradients(
    head: Head,
    trained: list[torch.Tensor],
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    gradient_N: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients with respect to a chunk's hidden states and the trained parameters, given those of its
    logprobs."""
    hidden_NH = hidden_NH.detach().requires_grad_()
    with torch.enable_grad():
        scaled_NV = head.scaled_logits(hidden_NH)
    # d logprob / d scaled logit = one-hot - softmax; written out, because autograd would keep two more
    # copies.
    scaled_gradient_NV = torch.softmax(scaled_NV.detach(), dim=-1).mul_(-gradient_N.unsqueeze(-1))
    scaled_gradient_NV.scatter_add_(-1, targets_N.unsqueeze(-1), gradient_N.unsqueeze(-1))
    return torch.autograd.grad(scaled_NV, [hidden_NH, *trained], scaled_gradient_NV)
