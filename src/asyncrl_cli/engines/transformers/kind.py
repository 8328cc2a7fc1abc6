"""The EngineKind of the engine `transformers`, importable without transformers."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl_cli.engines.port import Engine, EngineKind
from asyncrl_cli.profile.schema import ProcessPlace, Profile


def _make(profile: Profile, place: ProcessPlace, on_running: Callable[[int], None]) -> Engine:
    from asyncrl_cli.engines.transformers.engine import TransformersEngine

    return TransformersEngine(profile, place, on_running)


KIND = EngineKind(make=_make, loads_in_place=True)
