"""The engine `transformers`: continuous batching over a transformers model. Here is its kind, importable
without transformers; `asyncrl plan` uses the constants, too."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

from asyncrl_cli.engines.port import Engine, EngineKind
from asyncrl_cli.profile.schema import ProcessPlace, Profile

PAGE_TOKENS = 32
PREFILL_TOKENS_PACKED = 4096
"""Prefill budget per step where attention needs no mask: rebuilding 64 caches takes a few steps."""
CACHE_SHARE_OF_MEMORY = 0.5
"""Largest part of the memory that is free when the cache is allocated."""


def _make(profile: Profile, place: ProcessPlace, on_running: Callable[[int], None]) -> Engine:
    # by its name: the engine's own modules import this one
    engine_class = resolve_name("asyncrl_cli.engines.transformers.transformers_engine:TransformersEngine")
    engine: Engine = engine_class(profile, place, on_running)
    return engine


KIND = EngineKind(make=_make, loads_in_place=True, returns_kept_tokens=True, returns_routed_experts=True)
