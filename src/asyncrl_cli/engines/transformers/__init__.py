"""Continuous batching over a transformers model; and its figures that a plan counts with, too."""

PAGE_TOKENS = 32
PREFILL_TOKENS_PACKED = 4096
"""Prefill budget per step where attention needs no mask: rebuilding 64 caches takes a few steps."""
CACHE_SHARE_OF_MEMORY = 0.5
"""Of what is free when the cache is made, at most."""
