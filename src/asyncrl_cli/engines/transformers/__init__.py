"""The engine `transformers`: continuous batching over a transformers model. `asyncrl plan` uses the constants
here, too."""

PAGE_TOKENS = 32
PREFILL_TOKENS_PACKED = 4096
"""Prefill budget per step where attention needs no mask: rebuilding 64 caches takes a few steps."""
CACHE_SHARE_OF_MEMORY = 0.5
"""Largest part of the memory that is free when the cache is allocated."""
