"""A language model as a function from a microbatch to its sampled tokens' logprobs and entropies, which are
computed in chunks to save memory.

Logits of 16,000 tokens and a vocabulary of 150,000 take 9 GiB in float32, and several copies of them would be
alive in a backward pass. Here logits exist for one chunk of tokens at a time: the forward pass drops them,
and the backward pass computes them again. Only the hidden states are kept in between. torch's own
`linear_cross_entropy` returns no entropies, and supports neither a temperature nor the scales and soft-caps
of some models' heads.

Legend: N = tokens, C = those of a chunk, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from asyncrl_cli.models.experts import Routing
from asyncrl_cli.train import LOGITS_CHUNK_ELEMENTS
from asyncrl_cli.train.batch import Microbatch
from asyncrl_cli.train.packed_rows import Divide, RankShare, padded
from asyncrl_cli.train.sampling_masks import KeptTokens


class Scored(NamedTuple):
    """Each token's logprob (with gradient), the entropy in nats of its distribution (with gradient if
    `Head.differentiates_entropy`), and with a teacher the KL(this, teacher's) of the distributions (with
    gradient); with a sampling mask among the tokens kept. All float32."""

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    divergence_N: torch.Tensor | None = None


class Head(NamedTuple):
    """What follows the decoder. `logits_of` maps hidden states (N, H) to logits (N, V), and depends on
    `parameters` alone. `teacher_NV`: a teacher's logprobs of the whole vocabulary. `kept`: the sampling
    mask."""

    logits_of: Callable[[torch.Tensor], torch.Tensor]
    parameters: tuple[torch.Tensor, ...]
    vocab_size: int
    temperature: float
    differentiates_entropy: bool = False
    teacher_NV: torch.Tensor | None = None
    kept: KeptTokens | None = None

    def chunk_tokens(self, device: torch.device) -> int:
        return max(1, LOGITS_CHUNK_ELEMENTS[device.type] // self.vocab_size)

    def score(self, hidden_NH: torch.Tensor, targets_N: torch.Tensor) -> Scored:
        """Logprobs of the targets, and entropies. A single chunk keeps its logits for the backward pass,
        which is faster; not for the entropy's, where autograd would keep two more copies of them."""
        if not self.differentiates_entropy and len(targets_N) <= self.chunk_tokens(targets_N.device):
            return self.score_chunk(hidden_NH, targets_N, slice(None))
        return Scored(*_Chunks.apply(self, targets_N, hidden_NH, *self.parameters))

    def score_chunk(self, hidden_NH: torch.Tensor, targets_N: torch.Tensor, chunk: slice) -> Scored:
        """`chunk`: which of all tokens these are."""
        scaled_NV = self.scaled_logits(hidden_NH)
        left_out_NV = self.left_out(scaled_NV, chunk)
        if left_out_NV is not None:
            scaled_NV = scaled_NV.masked_fill(left_out_NV, -torch.inf)
        logprobs_NV = torch.log_softmax(scaled_NV, dim=-1)
        del scaled_NV
        whole_NV, divergence_N = logprobs_NV.detach(), None
        products_NV = whole_NV.exp().mul_(whole_NV)
        if left_out_NV is not None:  # 0 times -inf
            products_NV.masked_fill_(left_out_NV, 0)
        if self.teacher_NV is not None:
            differences_NV = logprobs_NV - _renormalized(self.teacher_NV[chunk], left_out_NV)
            if left_out_NV is not None:  # -inf minus -inf
                differences_NV = differences_NV.masked_fill(left_out_NV, 0)
            divergence_N = (logprobs_NV.exp() * differences_NV).sum(-1)
        return Scored(
            # a sum over one; FSDP rejects the view of squeeze
            logprobs_N=logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).sum(-1),
            entropy_N=-products_NV.sum(-1),
            divergence_N=divergence_N,
        )

    def scaled_logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        logits_NV = self.logits_of(hidden_NH).float()
        return logits_NV if self.temperature == 1.0 else logits_NV / self.temperature  # saves a copy

    def left_out(self, scaled_CV: torch.Tensor, chunk: slice) -> torch.Tensor | None:
        return None if self.kept is None else self.kept.chunk(chunk).left_out(scaled_CV)


def _renormalized(logprobs_NV: torch.Tensor, left_out_NV: torch.Tensor | None) -> torch.Tensor:
    if left_out_NV is None:
        return logprobs_NV
    return torch.log_softmax(logprobs_NV.masked_fill(left_out_NV, -torch.inf), dim=-1)


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A model as a function from a microbatch to its `Scored`."""

    model: PreTrainedModel
    temperature: float
    divide: Divide = padded
    differentiates_entropy: bool = False
    routing: Routing | None = None

    def __call__(self, microbatch: Microbatch, teacher_NV: torch.Tensor | None = None) -> Scored:
        share, hidden_NH, head = self._decoded(microbatch)
        head = head._replace(teacher_NV=teacher_NV)
        scored = head.score(hidden_NH, share.of(microbatch.targets_N))
        return Scored(*(share.joined(one, len(microbatch.targets_N)) for one in scored if one is not None))

    def whole_NV(self, microbatch: Microbatch, vocab_size: int) -> torch.Tensor:
        """Logprobs of the first `vocab_size` tokens, which are all that there are, before each sampled
        one."""
        _, hidden_NH, head = self._decoded(microbatch)
        return torch.log_softmax(head.scaled_logits(hidden_NH)[:, :vocab_size], dim=-1)

    def _decoded(self, microbatch: Microbatch) -> tuple[RankShare, torch.Tensor, Head]:
        share = self.divide(microbatch)
        if self.routing is not None:
            experts_BTW = microbatch.experts_BTW
            shape = (self.routing.num_layers, self.routing.top_k)
            self.routing.replayed_QLK = (
                None if experts_BTW is None else share.at_inputs(experts_BTW).unflatten(-1, shape)
            )
        decoded = getattr(self.model, self.model.base_model_prefix)(**share.inputs, use_cache=False)
        hidden_NH = decoded.last_hidden_state.flatten(0, 1).index_select(0, share.select_n)
        head = Head(
            logits_of=partial(self._logits, replace(decoded, last_hidden_state=None)),
            parameters=tuple(self.model.get_output_embeddings().parameters()),
            vocab_size=int(self.model.config.get_text_config().vocab_size),
            temperature=self.temperature,
            differentiates_entropy=self.differentiates_entropy,
            kept=microbatch.kept and microbatch.kept.chosen(share.tokens_n, len(microbatch.targets_N)),
        )
        return share, hidden_NH, head

    def _logits(self, decoded: ModelOutput, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Run the model's own forward pass on the decoder's result, because some models scale or cap their
        logits."""
        name = self.model.base_model_prefix
        decoder = getattr(self.model, name)
        setattr(self.model, name, _Decoder(replace(decoded, last_hidden_state=hidden_NH[None])))
        try:
            logits_NV: torch.Tensor = self.model(use_cache=False).logits.squeeze(0)
        finally:
            setattr(self.model, name, decoder)
        return logits_NV


class _Decoder(torch.nn.Module):
    """A stand-in for the decoder that returns a known result."""

    def __init__(self, decoded: ModelOutput) -> None:
        super().__init__()
        self._decoded = decoded

    def forward(self, **_: object) -> ModelOutput:
        return self._decoded


class _Chunks(torch.autograd.Function):
    """`Head.score_chunk` over chunks of tokens; gradients of the head's parameters are added up in
    float32."""

    @staticmethod
    def forward(
        ctx: Any, head: Head, targets_N: torch.Tensor, hidden_NH: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.head = head
        size = head.chunk_tokens(targets_N.device)
        chunks = [slice(first, first + size) for first in range(0, max(len(targets_N), 1), size)]
        scores = [head.score_chunk(hidden_NH[chunk], targets_N[chunk], chunk) for chunk in chunks]
        scored = [torch.cat(values) for values in zip(*scores, strict=True) if values[0] is not None]
        ctx.save_for_backward(targets_N, hidden_NH, *scored[1:])
        if not head.differentiates_entropy:
            ctx.mark_non_differentiable(scored[1])
        return tuple(scored)

    @staticmethod
    def backward(
        ctx: Any, gradient_N: torch.Tensor, entropy_gradient_N: torch.Tensor, *further_N: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        head: Head = ctx.head
        targets_N, hidden_NH, entropy_N, *divergence_N = ctx.saved_tensors
        hidden_gradient_NH = torch.empty_like(hidden_NH)
        trained = [parameter for parameter in head.parameters if parameter.requires_grad]
        sums = {id(p): torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for p in trained}
        for rows in torch.arange(len(targets_N)).split(head.chunk_tokens(targets_N.device)):
            chunk = slice(int(rows[0]), int(rows[-1]) + 1)
            hidden_CH = hidden_NH[chunk].detach().requires_grad_()
            with torch.enable_grad():
                scaled_CV = head.scaled_logits(hidden_CH)
            if (left_out_CV := head.left_out(scaled_CV, chunk)) is not None:
                scaled_CV.detach().masked_fill_(left_out_CV, -torch.inf)  # in place: a copy less
            # d logprob / d scaled logit = one-hot - softmax, d entropy / d scaled logit = - softmax * (log
            # softmax + entropy), d divergence / d scaled logit = softmax * (log softmax - teacher's -
            # divergence); written out, because autograd would keep two more copies.
            gradient_C1, targets_C1 = gradient_N[chunk].unsqueeze(-1), targets_N[chunk].unsqueeze(-1)
            scaled_gradient_CV = torch.softmax(scaled_CV.detach(), dim=-1)
            slopes_CV = -gradient_C1
            if head.differentiates_entropy:
                slopes_CV = torch.log_softmax(scaled_CV.detach(), dim=-1).add_(entropy_N[chunk].unsqueeze(-1))
                slopes_CV.mul_(-entropy_gradient_N[chunk].unsqueeze(-1)).sub_(gradient_C1)
            for each_N, its_gradient_N in zip(divergence_N, further_N, strict=True):
                assert head.teacher_NV is not None
                ratios_CV = torch.log_softmax(scaled_CV.detach(), dim=-1)
                ratios_CV.sub_(_renormalized(head.teacher_NV[chunk], left_out_CV))
                ratios_CV.sub_(each_N[chunk].unsqueeze(-1)).mul_(its_gradient_N[chunk].unsqueeze(-1))
                slopes_CV = slopes_CV + ratios_CV
                del ratios_CV
            scaled_gradient_CV.mul_(slopes_CV)
            if left_out_CV is not None:  # 0 times -inf
                scaled_gradient_CV.masked_fill_(left_out_CV, 0)
            del slopes_CV  # or it would be alive beside the gradients that follow
            scaled_gradient_CV.scatter_add_(-1, targets_C1, gradient_C1)
            inputs = [hidden_CH, *trained]
            hidden_gradient_NH[chunk], *found = torch.autograd.grad(scaled_CV, inputs, scaled_gradient_CV)
            # or they would be alive beside the next chunk's
            del scaled_CV, scaled_gradient_CV
            for parameter, gradient in zip(trained, found, strict=True):
                sums[id(parameter)] += gradient
            del found
        parameter_sums = (sums[id(p)].to(p.dtype) if p.requires_grad else None for p in head.parameters)
        return None, None, hidden_gradient_NH, *parameter_sums
