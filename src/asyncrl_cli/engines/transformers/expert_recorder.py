"""Records which experts each token was given to, beside the keys and values that they led to: by block of the
paged cache. So what requests share in the cache, they share here.

    schedule_batch -> begin(batch) -> forward: the routers' choices -> TokenSampler: end(), rows(request)

Everything runs in the generation thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.requests import FutureRequestState

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.models.experts import Routing


class ExpertRecorder:
    """A row has the experts of one position, int16: those of the first layer, of the second, and so on."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.routing = Routing(model)
        self.unknown: NDArray[np.int16] = np.full(self.routing.num_layers * self.routing.top_k, -1, np.int16)
        self._allocator: Any = None
        self._blocks: dict[int, NDArray[np.int16]] = {}
        self._passed: list[tuple[str, int, int]] = []

    def use(self, cache: PagedAttentionCache) -> None:
        """Raises ConfigError if layers have caches of several kinds, which share no prefixes."""
        if len(cache.cache_allocators) > 1:
            why = 'rollout.engine = "transformers" records experts only where all layers attend to everything'
            raise ConfigError(
                f"trainer.router_replay = true: {why}", hint="--set trainer.router_replay=false"
            )
        (self._allocator,) = cache.cache_allocators.values()

    def begin(self, batch: Iterable[FutureRequestState]) -> None:
        """Before a forward pass of these requests."""
        states = ((request.state, request.query_length) for request in batch)
        self._passed = [(state.request_id, state.position_offset, count) for state, count in states]
        self.routing.recorded = {}

    def end(self) -> None:
        """After it, before any request gives its blocks back."""
        assert self.routing.recorded is not None
        layers = [self.routing.recorded[layer] for layer in range(self.routing.num_layers)]
        rows_QW = torch.cat(layers, dim=-1).short().numpy(force=True)
        q = 0
        for request_id, begin, count in self._passed:
            for block, offset, length in self._places(request_id, begin, begin + count):
                empty = np.empty((self._allocator.tokens_per_page, rows_QW.shape[1]), np.int16)
                self._blocks.setdefault(block, empty)[offset : offset + length] = rows_QW[q : q + length]
                q += length

    def rows(self, request_id: str, begin: int, end: int) -> NDArray[np.int16]:
        """Of these positions of a request."""
        places = self._places(request_id, begin, end)
        parts = [self._blocks[block][offset : offset + length] for block, offset, length in places]
        return np.concatenate([self.unknown[None][:0], *parts])

    def copy(self, source: int, target: int) -> None:
        """As the cache copies a block's keys and values."""
        self._blocks[target] = self._blocks[source].copy()

    def _places(self, request_id: str, begin: int, end: int) -> Iterable[tuple[int, int, int]]:
        """Blocks, where in the block, and how many positions."""
        table, size = self._allocator.block_table[request_id], self._allocator.tokens_per_page
        while begin < end:
            length = min(size - begin % size, end - begin)
            yield table[begin // size], begin % size, length
            begin += length
