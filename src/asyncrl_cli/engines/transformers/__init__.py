"""The engine `transformers`: continuous batching over a transformers model. `asyncrl plan` uses the constants here, too.

This module can be imported without transformers.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl_cli.engines.port import Engine, EngineKind
from asyncrl_cli.profile.schema import Place, Profile

PAGE_TOKENS = 32
PREFILL_TOKENS_PACKED = 4096
"""Prefill budget per step where attention needs no mask: rebuilding 64 caches takes a few steps."""
CACHE_SHARE_OF_MEMORY = 0.5
"""Largest part of the memory that is free when the cache is allocated."""


def _make(profile: Profile, place: Place, on_running: Callable[[int], None]) -> Engine:
    from asyncrl_cli.engines.transformers.engine import TransformersEngine

    return TransformersEngine(profile, place, on_running)


KIND = EngineKind(make=_make, loads_in_place=True)
