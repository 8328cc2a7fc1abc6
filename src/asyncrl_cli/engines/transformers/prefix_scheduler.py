"""The scheduler of continuous batching, extended: a prompt is computed once for all responses to it.

transformers shares whole blocks, and only those that an earlier forward pass has filled. But the responses of
a group begin together, and a prompt ends within a block, or is shorter than one. Here,

    the first request with a prompt    computes it
    those that come meanwhile          wait until it has: one forward pass, more if the prompt is long
    the others                         share its whole blocks, copy the block in which the prompt ends, and
                                       compute the prompt's last token, whose logits they sample from

Keys and values belong to the version that computed them. Requests that a `keep-kv` load has interrupted
(`interrupted`) hold some of older weights, so nobody takes anything from them.

Everything here runs in the generation thread, between two forward passes; `load` looks in during a pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    RequestState,
    RequestStatus,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from asyncrl_cli.engines.transformers.expert_recorder import ExpertRecorder
from asyncrl_cli.engines.transformers.token_sampler import SampledTrack

PREFIX_SCHEDULER = "asyncrl_prefix"
MIN_SHARED_TOKENS = 8
"""A shorter prompt is computed by every response: that costs less than waiting for a forward pass."""
Prompt = tuple[int, ...]


class PrefixScheduler(FIFOScheduler):  # type: ignore[misc]
    """`tracks` maps continuous batching's request ids to responses."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.tracks: Mapping[str, SampledTrack] = {}
        self.interrupted: set[str] = set()
        self.recorder: ExpertRecorder | None = None
        self.is_fixed = False
        """A deterministic run: no prompt is split, and none shared."""
        self._room_tokens = 0
        self._computed: dict[Prompt, RequestState] = {}

    def schedule_batch(
        self, token_budget: int, cache_budget: int
    ) -> tuple[list[FutureRequestState] | None, bool, int, int]:
        self._room_tokens = token_budget - len(self.active_requests)
        batch, *rest = super().schedule_batch(token_budget, cache_budget)
        for request in batch or ():
            if request.state.request_id in self.interrupted:
                request.complete_blocks = {}  # so that later prompts do not find its blocks
        if self.recorder is not None:
            self.recorder.begin(batch or ())
        return batch, *rest

    def _get_waiting_candidates(self) -> list[RequestState]:
        """Without those whose prompt another request computes now."""
        waiting: list[RequestState] = super()._get_waiting_candidates()
        if self.is_fixed:
            ends = accumulate(len(state.remaining_prefill_tokens) for state in waiting)
            return [state for state, end in zip(waiting, ends, strict=True) if end <= self._room_tokens]
        if not waiting or not self.cache.use_prefix_sharing:
            return waiting
        computing = set[Prompt]()
        self._computed = {}
        for state in self.active_requests.values():
            prompt = self._prompt_of(state)
            if prompt and state.request_id not in self.interrupted:
                if state.position_offset >= len(prompt) - 1:
                    self._computed[prompt] = state
                else:
                    computing.add(prompt)
        candidates = []
        for state in waiting:
            prompt = self._prompt_of(state)
            if prompt in self._computed or prompt not in computing:
                candidates.append(state)
            if prompt and prompt not in self._computed:
                computing.add(prompt)
        return candidates

    def _infer_request_tokens(self, state: RequestState, request_ids_to_remove_from_waiting: set[str]) -> Any:
        is_new = state.status == RequestStatus.PENDING
        if is_new and (source := self._computed.get(self._prompt_of(state))) is not None:
            self._share_prompt(state, source)
            if state.position_offset:
                self.active_requests[state.request_id] = state
                self.waiting_requests.pop(state.request_id, None)
                request_ids_to_remove_from_waiting.add(state.request_id)
        tokens = super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)
        track = self.tracks.get(state.request_id)
        if is_new and track is not None and len(track.tokens) == track.num_kept:
            track.num_cached = state.position_offset
        return tokens

    def _share_prompt(self, state: RequestState, source: RequestState) -> None:
        """Give a new request the source's keys and values of the prompt, unless whole blocks of its own
        tokens are in the cache that reach further."""
        (allocator,) = self.cache.cache_allocators.values()  # more than one shares no prefixes
        pool, page_tokens = allocator.pool, allocator.tokens_per_page
        prompt, tokens = self._prompt_of(state), state.initial_tokens
        # At least one token is computed: the next one is sampled from its logits.
        num_shared = min(len(prompt), source.position_offset, len(tokens) - 1)
        if len(allocator.match_prefix_blocks(tokens)) * page_tokens >= num_shared:
            return
        num_whole, rest = divmod(num_shared, page_tokens)
        if rest and not pool.count_free_blocks(allocator.index):
            if pool.num_free_sectors:
                pool.allocate_sector(allocator.index)
            else:
                rest = 0
        source_blocks = allocator.block_table[source.request_id]
        blocks = source_blocks[:num_whole]
        for block in blocks:
            allocator.ledger.acquire(block)
        if rest:
            # The rest of the block holds the source's response, which is overwritten before it is read.
            copied = pool.get_free_blocks(allocator.index, 1)
            allocator.copy_blocks([source_blocks[num_whole]], copied)
            if self.recorder is not None:
                self.recorder.copy(source_blocks[num_whole], copied[0])
            blocks += copied
        if blocks:
            allocator.block_table[state.request_id] = blocks
            state.status = RequestStatus.PREFILLING
            state.position_offset = num_whole * page_tokens + rest
            state.remaining_prefill_tokens = tokens[state.position_offset :]

    def _prompt_of(self, state: RequestState) -> Prompt:
        """Empty if it is not worth sharing."""
        track = self.tracks.get(state.request_id)
        prompt = track.prompt if track is not None else ()
        return prompt if len(prompt) > MIN_SHARED_TOKENS else ()


SCHEDULER_MAPPING[PREFIX_SCHEDULER] = PrefixScheduler
