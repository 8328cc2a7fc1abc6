"""Looks up implementations by name: built-in ones in a table, others among the entry points of installed
packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from asyncrl_cli.base.errors import ConfigError, first_line

ENGINES = {
    "transformers": "asyncrl_cli.engines.transformers:KIND",
    "vllm": "asyncrl_cli.engines.vllm.vllm_kind:KIND",
}
"""The built-in values of `rollout.engine`."""


def engine_kind(name: str) -> Any:
    """The `engines.port.EngineKind` of an engine; see `find_plugin` for what it raises."""
    return find_plugin("rollout.engine", name, ENGINES, "asyncrl.engines")


def find_plugin(key: str, name: str, ours: Mapping[str, str], group: str, *, also: str = "") -> Any:
    """The object that `key = name` in a profile refers to. `ours`: built-in ones, "module:attribute" by name.
    `group`: entry point group of the others. `also`: other values of the key, for the hint.

    Raises ConfigError if the name is unknown or its package cannot be imported.
    """
    if name in ours:
        return resolve_name(ours[name])
    others = {point.name: point for point in entry_points(group=group)}
    if name not in others:
        known = ", ".join([*sorted({*ours, *others}), *([also] if also else [])])
        raise ConfigError(
            f'{key} = "{name}" is not known',
            hint=f"known: {known}; packages add theirs as entry points of {group}",
        )
    try:
        return others[name].load()
    except Exception as error:  # a user's package may raise anything on import
        raise ConfigError(
            f'{key} = "{name}" cannot be imported: {first_line(error)}', hint=f"see {others[name].value}"
        ) from error
