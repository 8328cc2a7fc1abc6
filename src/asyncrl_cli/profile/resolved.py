"""A loaded profile as text: `config.resolved.json` (every value with its origin) and TOML for people.

    {"schema_version": 1, "profile": {"run": {"train_steps": 200, ...}, ...}, "origins": {"run.seed": "--set", ...}}

eta is written as a string, so that it stays the decimal it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.keys import PARAMS, entries_of, keys, sections
from asyncrl_cli.profile.layers import DEFAULT, Loaded
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import toml_key, toml_value
from asyncrl_cli.safe_files import first_of, load_json

SCHEMA_VERSION = 1


def to_document(profile: Profile, origins: Mapping[str, str]) -> dict[str, Any]:
    """JSON-like; `from_document` of it (also through a file) gives the same profile and origins."""
    return {"schema_version": SCHEMA_VERSION, "profile": profile.model_dump(mode="json"), "origins": dict(origins)}


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
        return _loaded(document["profile"], document["origins"])
    except ValidationError as error:
        why = first_of(error)
    except ConfigError as error:
        why = error.message
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        why = f"{type(error).__name__} {error}"
    raise RefusedError(f"{where} does not describe a profile: {why}", hint="take another checkpoint")


def _loaded(tables: Mapping[str, Any], origins: Mapping[str, str]) -> Loaded:
    training = tables["async_training"]
    exact = {**training, "staleness_threshold": Decimal(training["staleness_threshold"])}
    profile = Profile.model_validate({**tables, "async_training": exact})
    for section, _, name in (key.partition(".") for key in origins if key in keys()):
        if name not in tables.get(section, {}):
            raise ConfigError(f"{section}.{name} is missing")
    check(profile)
    return Loaded(profile=profile, origins={str(key): str(origin) for key, origin in origins.items()})


def to_toml(profile: Profile, origins: Mapping[str, str], *, only_given: bool = True, with_origins: bool = False) -> str:
    """A profile file that needs no other: what some layer gave, or (`only_given=False`) every value that is set."""
    tables: dict[str, list[str]] = {section: [] for section in sections()}
    for key, value in entries_of(profile).items():
        section, _, name = key.partition(".")
        if key.startswith(f"{PARAMS}."):  # of an older run it is not known where it came from
            name, origin = f"params.{toml_key(key.removeprefix(f'{PARAMS}.'))}", origins.get(key, "unknown")
        else:
            origin = origins.get(key, DEFAULT)
        if value not in (None, {}) and not (only_given and origin == DEFAULT):
            text = f"{name} = {toml_value(value)}"
            tables[section].append(f"{text:<48}  # {origin}" if with_origins else text)
    lines = [f"name = {toml_value(profile.name)}", f"purpose = {toml_value(profile.purpose)}"]
    for section, entries in tables.items():
        lines += ["", f"[{section}]", *entries] if entries else []
    return "\n".join(lines) + "\n"
