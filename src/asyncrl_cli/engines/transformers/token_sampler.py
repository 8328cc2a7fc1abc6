"""Samples the next token of every running sequence, and records its logprob and the version that sampled it.

TokenSampler is a logits processor of transformers' continuous batching, which calls it once per forward pass
in the generation thread. Only there are the distribution, the version and the token all known, so
nothing has to be inferred from timestamps afterwards. The sampler makes the chosen token's score infinite;
continuous batching takes the argmax.

Random numbers depend on the request's seed and the position in the response, not on the rest of the batch. So
the same prompt, seed and weights give the same response, if the probabilities are the same. (Their last bits
depend on the batch's shape, which matters when a random number falls on the border between two tokens.)

Legend: N = sequences that get a token in this pass, V = vocabulary, in P parts of S tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from asyncrl_cli.data.sample_fields import KEPT_TOKENS, ROUTED_EXPERTS
from asyncrl_cli.engines.port import FinishReason
from asyncrl_cli.engines.slotted_engine import Track
from asyncrl_cli.engines.transformers.expert_recorder import ExpertRecorder

PART_TOKENS = 128
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
TOP_K = ContinuousBatchingTopKLogitsWarper(TopKLogitsWarper(top_k=1))
TOP_P = ContinuousBatchingTopPLogitsWarper(TopPLogitsWarper(top_p=1.0))
"""Continuous batching's own filters. Each call passes a limit per row; the limits given here are not used."""


@dataclass(slots=True, eq=False, kw_only=True)
class SampledTrack(Track):
    """The generation thread appends tokens; the event loop reads them when `done` is set."""

    done: asyncio.Future[FinishReason] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    stream: int = field(init=False)
    """Start of this response's stream of random numbers."""
    prompt: tuple[int, ...] = field(init=False)
    num_routed: int = 0
    """How many positions have been asked for their experts."""
    num_cached: int = 0
    """How many of the tokens that the engine was given had keys and values in its cache."""

    def __post_init__(self) -> None:
        self.prompt = tuple(self.prompt_tokens)
        # makes neighbouring seeds unrelated
        self.stream = int(_mix(np.array([self.seed % 2**64], dtype=np.uint64))[0])

    @property
    def tokens_left(self) -> int:
        return self.sampling.max_response_tokens - len(self.tokens)

    def add_experts(self, rows: NDArray[np.int16], unknown: NDArray[np.int16]) -> None:
        """Of the next positions. A token keeps those of the pass from which the token after it was sampled,
        also if keys and values are computed again."""
        first, self.num_routed = self.num_routed, self.num_routed + len(rows)
        known = self.fields.setdefault(ROUTED_EXPERTS, [unknown] * len(self.tokens))
        if not first:
            self.prompt_fields[ROUTED_EXPERTS] = [*rows[: len(self.prompt)]]
        for place, row in enumerate(rows, first - len(self.prompt)):
            if place >= 0 and known[place][0] < 0:
                known[place] = row

    def finish(self, reason: FinishReason) -> None:
        """Set `done`. Call it in the event loop; later calls have no effect."""
        if not self.done.done():
            self.done.set_result(reason)


class TokenSampler(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """`tracks` maps continuous batching's request ids to responses. The sample of a row without a response is
    dropped.

    `call_soon` runs a call in the event loop, to end responses at stop strings, which continuous batching
    does not support. `eos_tokens` and `tail_text` (tokens -> text) depend on the model and are set once it is
    loaded.
    """

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012  (the base class declares it so)
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, *, version: int, call_soon: Callable[..., object]) -> None:
        self.version = version
        self.sampled_tokens = 0
        self.decode_steps = 0
        self.tracks: dict[str, SampledTrack] = {}
        self.eos_tokens: frozenset[int] = frozenset()
        self.tail_text: Callable[[list[int]], str] = str
        self._call_soon = call_soon
        self.recorder: ExpertRecorder | None = None
        self._rows: list[SampledTrack | None] = []
        self._states: list[RequestState] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        self._rows = [self.tracks.get(request.state.request_id) for request in requests_with_new_token]
        self._states = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.FloatTensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """`scores`: at least N rows of V logits (float32); rows beyond N belong to unfinished prefills."""
        rows = self._rows
        logits_NV = scores[: len(rows)]
        temperatures = [track.sampling.temperature or 1.0 if track is not None else 1.0 for track in rows]
        if any(temperature != 1.0 for temperature in temperatures):
            logits_NV = logits_NV / torch.tensor(temperatures, device=logits_NV.device)[:, None]
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        truncated_NV = _truncated(logprobs_NV, rows)
        tokens_N = self.choose(logprobs_NV, truncated_NV, rows)
        scores[: len(rows)].scatter_(1, tokens_N[:, None], torch.inf)
        kept: Sequence[Any] = [()] * len(rows)
        if any(masked := [track is not None and track.sampling.returns_kept for track in rows]):
            is_masked_N1 = torch.tensor(masked, device=logprobs_NV.device)[:, None]
            is_kept_NV = is_masked_N1 & (truncated_NV > -torch.inf)
            kept = np.split(
                is_kept_NV.nonzero()[:, 1].int().numpy(force=True), is_kept_NV.sum(1).cumsum(0).tolist()
            )
            logprobs_NV = torch.where(is_masked_N1, torch.log_softmax(truncated_NV, dim=-1), logprobs_NV)
        logprobs_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
        if self.recorder is not None:
            self._note_experts(self.recorder)
        before = self.sampled_tokens
        for n, (token, logprob) in enumerate(zip(tokens_N.tolist(), logprobs_N.tolist(), strict=True)):
            if (track := rows[n]) is not None and track.finished is None:
                self.record(track, token, logprob, kept[n])
        self.decode_steps += self.sampled_tokens > before
        return scores

    def _note_experts(self, recorder: ExpertRecorder) -> None:
        recorder.end()
        for track, state in zip(self._rows, self._states, strict=True):
            if track is not None and track.finished is None:
                rows = recorder.rows(state.request_id, track.num_routed, state.position_offset)
                track.add_experts(rows, recorder.unknown)

    def choose(
        self, logprobs_NV: torch.Tensor, truncated_NV: torch.Tensor, rows: list[SampledTrack | None]
    ) -> torch.Tensor:
        """The next tokens (N,), by inverse transform sampling: one uniform number per row makes rows
        independent of each other."""
        device = logprobs_NV.device
        # Exact sums over a large vocabulary would cost more than all else here: first the part is drawn.
        probs_NPS = truncated_NV.exp().unflatten(1, (-1, math.gcd(truncated_NV.shape[1], PART_TOKENS)))
        ends_NP = probs_NPS.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        streams = np.array([track.stream if track else 0 for track in rows], dtype=np.uint64)
        positions = np.array([len(track.tokens) + 1 if track else 0 for track in rows], dtype=np.uint64)
        # In [0, 1), of 32 bits only: the product with a rounded sum of probabilities stays below the sum.
        numbers = (_mix(streams + positions * _GOLDEN) >> np.uint64(32)).astype(np.float64) / 2.0**32
        mass_N1 = torch.from_numpy(numbers).to(device)[:, None] * ends_NP[:, -1:]
        part_N1 = torch.searchsorted(ends_NP, mass_N1, right=True)
        begin_N1 = functional.pad(ends_NP, (1, 0)).gather(1, part_N1)
        share_N1 = (mass_N1 - begin_N1) / (ends_NP.gather(1, part_N1) - begin_N1)
        ends_NS = probs_NPS.take_along_dim(part_N1[..., None], dim=1)[:, 0].cumsum(-1, dtype=torch.float64)
        place_N1 = torch.searchsorted(ends_NS, share_N1 * ends_NS[:, -1:], right=True)
        # rounding may go beyond the last token that has a probability
        last_N1 = (ends_NS < ends_NS[:, -1:]).sum(dim=-1, keepdim=True)
        tokens_N = (part_N1 * ends_NS.shape[1] + torch.minimum(place_N1, last_N1))[:, 0]
        greedy = [track is not None and track.sampling.temperature == 0 for track in rows]
        if any(greedy):
            is_greedy_N = torch.tensor(greedy, device=device)
            tokens_N = torch.where(is_greedy_N, logprobs_NV.argmax(dim=-1), tokens_N)
        return tokens_N

    def record(self, track: SampledTrack, token: int, logprob: float, kept: Sequence[int] = ()) -> None:
        """The order is that of `Track`: the event loop may look in between."""
        track.tokens.append(token)
        track.logprobs.append(logprob)
        if track.sampling.returns_kept:
            track.fields.setdefault(KEPT_TOKENS, []).append(kept)
        if self.recorder is not None and ROUTED_EXPERTS in track.fields:
            track.fields[ROUTED_EXPERTS].append(self.recorder.unknown)  # until it is the input of a pass
        at_stop_string = False
        if track.sampling.stop and token not in self.eos_tokens:
            # a character has at most 4 tokens (its bytes)
            longest = max(len(stop) for stop in track.sampling.stop)
            text = self.tail_text(track.tokens[-4 * longest - 4 :])
            at_stop_string = any(stop in text for stop in track.sampling.stop)
        if token in self.eos_tokens or at_stop_string:
            track.finished = "stop"
        elif track.tokens_left == 0:
            track.finished = "length"
        track.versions.append(self.version)
        self.sampled_tokens += 1
        if at_stop_string:
            self._call_soon(track.finish, "stop")


def _truncated(logprobs_NV: torch.Tensor, rows: list[SampledTrack | None]) -> torch.Tensor:
    """With -inf for tokens that cannot be sampled. Each filter, in vLLM's order, takes what the one before it
    has kept; the most likely token always stays."""
    device, off = logprobs_NV.device, (0.0, 0, 1.0)
    how = [track.sampling if track is not None else None for track in rows]
    limits = [(one.min_p, one.top_k, one.top_p) if one is not None else off for one in how]
    if all(limit == off for limit in limits):
        return logprobs_NV
    min_p_N, top_k_N, top_p_N = torch.tensor(limits, device=device).unbind(1)
    least_N1 = logprobs_NV.amax(dim=-1, keepdim=True) + min_p_N.log()[:, None]
    kept_NV = logprobs_NV.masked_fill(logprobs_NV < least_N1, -torch.inf)
    vocab_size = logprobs_NV.shape[1]
    top_k_N = torch.where(top_k_N == 0, vocab_size, top_k_N.clamp(max=vocab_size)).int()
    truncated_NV: torch.Tensor = TOP_P(TOP_K(kept_NV, top_k_N), top_p_N.view(torch.int32))
    return truncated_NV


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64 (Steele, Lea, Flood 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
