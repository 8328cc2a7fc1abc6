"""A loaded profile as text: `config.resolved.json` (every value with its origin) and TOML for people.

    {"schema_version": 1, "profile": {"run": {"train_steps": 200, ...}, ...}, "origins": {"run.seed": "--set", ...}}

eta is written as a string, so that it stays the decimal it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.keys import PARAMS, keys, sections
from asyncrl_cli.profile.layers import DEFAULT, Loaded
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.safe_files import first_of, load_json

SCHEMA_VERSION = 1


def to_document(profile: Profile, origins: Mapping[str, str]) -> dict[str, Any]:
    """JSON-like; `from_document` of it (also through a file) gives the same profile and origins."""
    return {
        "schema_version": SCHEMA_VERSION,
        "profile": profile.model_dump(mode="json"),
        "origins": dict(origins),
    }


def read_document(path: Path) -> Loaded:
    """Raises RefusedError unless `path` is a document of this schema version that describes a profile."""
    return from_document(load_json(path, dict[str, Any], hint="take another checkpoint"), where=str(path))


def from_document(document: Mapping[str, Any], *, where: str = "config.resolved.json") -> Loaded:
    """Raises RefusedError if the document is of another schema version or does not describe a profile."""
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise RefusedError(
            f"{where} has schema_version {version!r:.40}; this asyncrl reads {SCHEMA_VERSION}",
            hint="resume with the version of asyncrl that started the run",
        )
    try:
        profile = Profile.model_validate(_with_exact_eta(document["profile"]))
        origins = {str(key): str(origin) for key, origin in document["origins"].items()}
    except ValidationError as error:
        raise _refused(where, first_of(error)) from None
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise _refused(where, f"{type(error).__name__} {error}") from None
    for section, _, name in (key.partition(".") for key in origins if key in keys()):
        if name not in document["profile"].get(section, {}):
            raise _refused(where, f"{section}.{name} is missing")
    try:
        check(profile)
    except ConfigError as error:
        raise _refused(where, error.message) from None
    return Loaded(profile=profile, origins=origins)


def _refused(where: str, why: str) -> RefusedError:
    return RefusedError(f"{where} does not describe a profile: {why}", hint="take another checkpoint")


def _with_exact_eta(tables: Mapping[str, Any]) -> dict[str, Any]:
    training = tables["async_training"]
    return {**tables, "async_training": {**training, "staleness_threshold": Decimal(training["staleness_threshold"])}}


def to_toml(profile: Profile, origins: Mapping[str, str], *, only_given: bool = True, with_origins: bool = False) -> str:
    """A profile file that needs no other: what some layer gave, or (`only_given=False`) every value that is set."""
    lines = [f"name = {toml_value(profile.name)}", f"purpose = {toml_value(profile.purpose)}"]
    for section in sections():
        entries = list(_entries(profile, section, origins, only_given, with_origins))
        if entries:
            lines += ["", f"[{section}]", *entries]
    return "\n".join(lines) + "\n"


def _entries(profile: Profile, section: str, origins: Mapping[str, str], only_given: bool, with_origins: bool) -> Iterator[str]:
    for name, value in getattr(profile, section):
        key = f"{section}.{name}"
        if key == PARAMS:
            yield from (
                _line(f"params.{toml_key(entry)}", item, origins.get(f"{PARAMS}.{entry}", DEFAULT), with_origins)
                for entry, item in value.items()
            )
        elif value is not None and not (only_given and origins.get(key, DEFAULT) == DEFAULT):
            yield _line(name, value, origins.get(key, DEFAULT), with_origins)


def _line(name: str, value: Any, origin: str, with_origins: bool) -> str:
    text = f"{name} = {toml_value(value)}"
    return f"{text:<48}  # {origin}" if with_origins else text


def toml_key(name: str) -> str:
    """A key as TOML writes it: bare where that is possible."""
    bare = name.isascii() and name.replace("-", "_").isidentifier()
    return name if bare else toml_value(name)


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_key(str(key))} = {toml_value(item)}' for key, item in value.items())}}}"
    return str(value)
