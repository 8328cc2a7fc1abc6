"""Continuous batching over a transformers model."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl_cli.engines.port import Engine, EngineKind
from asyncrl_cli.profile.schema import Place, Profile

PAGE_TOKENS = 32
PREFILL_TOKENS_PACKED = 4096
"""Prefill budget per step where attention needs no mask: rebuilding 64 caches takes a few steps."""
CACHE_SHARE_OF_MEMORY = 0.5
"""Of what is free when the cache is made, at most."""


def _make(profile: Profile, place: Place, on_running: Callable[[int], None]) -> Engine:
    from asyncrl_cli.engines.transformers.engine import TransformersEngine

    return TransformersEngine(profile, place, on_running)


KIND = EngineKind(make=_make, loads_in_place=True)
