"""What a profile may not ask of its `rollout.engine`. Engines are known by name only (plugins.py): none is imported from here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.plugins import ENGINES, engine_kind
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.profile.toml import shortened, toml_value

ENGINE_KEYS = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "enforce_eager", "engine_args")
"""Of [rollout]; no engine knows them but one that says so."""


def engine_conflicts(profile: Profile) -> Iterator[ConfigError]:
    """The engine must be known, know the keys that are given, and have nothing against the profile itself."""
    rollout = profile.rollout
    try:
        kind = engine_kind(rollout.engine)
    except ConfigError as error:
        yield error
        return
    for key in ENGINE_KEYS:
        if key not in kind.keys and (value := getattr(rollout, key)) not in (None, {}):
            knows = next(name for name in ENGINES if key in engine_kind(name).keys)
            yield ConfigError(
                f'rollout.{key} = {shortened(toml_value(value))} with rollout.engine = "{rollout.engine}", which does not know it',
                hint=f"--set rollout.engine={knows}, or leave rollout.{key} out",
            )
    yield from kind.conflicts(profile)
    yield from _weights_for(kind, profile)


def _weights_for(kind: Any, profile: Profile) -> Iterator[ConfigError]:
    """How weights reach the engine. `kind`: an `EngineKind`."""
    transport, given = profile.weights.transport, f'rollout.engine = "{profile.rollout.engine}"'
    if transport in DIRECT_TRANSPORTS:
        if transport not in kind.direct_transports:
            able = next(name for name in ENGINES if transport in engine_kind(name).direct_transports)
            yield ConfigError(
                f'weights.transport = "{transport}" with {given}: the bytes go into an engine\'s own processes on a GPU, '
                "and it has none that take them",
                hint=f"--set rollout.engine={able}, or --set weights.transport=object-store",
            )
    elif not profile.weights.dual_buffer and not kind.loads_in_place:
        able = next(name for name in ENGINES if engine_kind(name).loads_in_place)
        yield ConfigError(
            f"weights.dual_buffer = false with {given}: it reads new weights from memory that holds all of a version at once, "
            "so there is always a second buffer",
            hint=f"--set weights.dual_buffer=true, or rollout.engine={able}",
        )
