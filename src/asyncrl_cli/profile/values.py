"""Tables validated into a `Profile`; type errors told with key, origin and fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.profile.check import combine
from asyncrl_cli.profile.keys import PARAMS, expected, keys, nearest
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.sources import ProfileFile
from asyncrl_cli.profile.toml import LONGEST_ECHO, parse_value, shortened


def validate(values: Mapping[str, Any], origins: Mapping[str, str], file: ProfileFile) -> Profile:
    """All type and range errors of all layers as one ConfigError."""
    nested: dict[str, Any] = {"name": file.content.get("name", file.name), "purpose": file.content.get("purpose", "")}
    for key, value in values.items():
        section, _, name = key.partition(".")
        table = nested.setdefault(section, {})
        if key.startswith(f"{PARAMS}."):
            table, name = table.setdefault("params", {}), key.removeprefix(f"{PARAMS}.")
        table[name] = value
    try:
        return Profile.model_validate(nested)
    except ValidationError as error:
        wrong = dict.fromkeys(".".join(str(part) for part in detail["loc"][:2]) for detail in error.errors())
        raise combine([_wrong_value(key, nested, origins.get(key, file.origin)) for key in wrong]) from None


def _wrong_value(key: str, nested: Mapping[str, Any], origin: str) -> ConfigError:
    section, _, name = key.partition(".")
    value = nested[section][name] if name else nested[section]
    text = shortened(value)
    shown = f'"{text}"' if isinstance(value, str) else text.lower() if isinstance(value, bool) else text
    return ConfigError(f"{key} = {shown} ({origin}): expected {expected(key)}", hint=_type_hint(key, value, origin))


def _type_hint(key: str, value: Any, origin: str) -> str:
    wanted, meaning = expected(key), f"what it is: {keys().get(key, 'one line of text')}"
    if len(shortened(value)) >= LONGEST_ECHO:
        return meaning
    if isinstance(value, str) and not wanted.startswith(("a string", "one of")) and parse_value(value) != value:
        return f"leave the quotes out: {key} = {value}"
    if wanted.startswith("a string") and not isinstance(value, str):
        return f"quote it: --set '{key}=\"{value}\"'" if origin == "--set" else f'quote it: {key} = "{value}"'
    guess = nearest(shortened(value), [choice.strip('"') for choice in wanted.removeprefix("one of ").split(", ")])
    return f'did you mean "{guess}"?' if wanted.startswith("one of") and guess else meaning
