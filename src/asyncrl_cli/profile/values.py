"""Values: text parsed as TOML, tables validated into a `Profile`, type errors told with key, origin and fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli
from pydantic import ValidationError

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.profile.check import combine
from asyncrl_cli.profile.keys import PARAMS, expected, keys, nearest
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.sources import LONGEST_ECHO, ProfileFile, parse_toml, shortened


def parse_value(text: str) -> Any:
    """A TOML value, or the text itself if it is none."""
    try:
        parsed = parse_toml(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    except ValueError as error:
        raise ConfigError(f"{shortened(text)} is no value: {error}", hint="a value is TOML, else a string") from None
    return parsed["value"] if len(parsed) == 1 else text


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
        raise combine([_wrong_value(key, nested, origins, file) for key in wrong]) from None


def _wrong_value(key: str, nested: Mapping[str, Any], origins: Mapping[str, str], file: ProfileFile) -> ConfigError:
    section, _, name = key.partition(".")
    value = nested[section][name] if name else nested[section]
    origin = origins.get(key, f"profile {file.name} ({file.path})")
    text = shortened(value)
    shown = f'"{text}"' if isinstance(value, str) else text.lower() if isinstance(value, bool) else text
    return ConfigError(f"{key} = {shown} ({origin}): expected {expected(key)}", hint=_type_hint(key, value, origin))


def _type_hint(key: str, value: Any, origin: str) -> str:
    wanted = expected(key)
    if len(shortened(value)) >= LONGEST_ECHO:
        return f"what it is: {keys().get(key, 'one line of text')}"
    if isinstance(value, str) and not wanted.startswith(("a string", "one of")) and parse_value(value) != value:
        return f"leave the quotes out: {key} = {value}"
    if wanted.startswith("a string") and not isinstance(value, str):
        quoted = f'{key} = "{value}"'
        return f"quote it: --set '{key}=\"{value}\"'" if origin == "--set" else f"quote it: {quoted}"
    guess = nearest(shortened(value), [choice.strip('"') for choice in wanted.removeprefix("one of ").split(", ")])
    if wanted.startswith("one of") and guess:
        return f'did you mean "{guess}"?'
    meaning = keys().get(key, "one line of text")
    return f"what it is: {meaning}"
