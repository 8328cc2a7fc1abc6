"""The names of all keys, what each expects, and the nearest one to a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from asyncrl_cli.profile.schema import Profile, Section
from asyncrl_cli.safe_files import MAX_NAME_BYTES, MAX_PATH_BYTES

PARAMS = "task.params"
"""The one free-form table: its entries are keys of their own, `task.params.<name>`."""
LONGEST_NAME = 100
"""Of names that are compared with others, and of what is echoed of a value."""


@cache
def sections() -> Mapping[str, type[Section]]:
    kinds = {name: field.annotation for name, field in Profile.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}


@cache
def keys() -> Mapping[str, str]:
    """Every dotted key with its one line of help, in the order of the schema."""
    return {
        f"{section}.{key}": " ".join((field.description or "").split())
        for section, kind in sections().items()
        for key, field in kind.model_fields.items()
    }


def values_of(profile: Profile) -> dict[str, Any]:
    """Every key's value."""
    return {f"{section}.{name}": value for section in sections() for name, value in getattr(profile, section)}


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that was probably meant: closest in its section, then by its last part, then as a whole."""
    if len(name) > LONGEST_NAME:
        return None
    section, _, last = name.rpartition(".")
    by_last = {key.rpartition(".")[2]: key for key in reversed(list(known))}
    in_section = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    for pool, wanted in ((in_section, last), (by_last, last), (dict(zip(known, known, strict=True)), name)):
        found = difflib.get_close_matches(wanted, pool, n=1, cutoff=0.7)
        if found:
            return pool[found[0]]
    return None


@cache
def _schema() -> dict[str, Any]:
    return Profile.model_json_schema()


def expected(key: str) -> str:
    """What a value of `key` has to be, in words: `an integer of at least 1`."""
    section, _, name = key.partition(".")
    if not name:
        return "a string"
    definition = _schema()["$defs"][sections()[section].__name__]
    return _describe(definition["properties"][name.split(".")[0]])


def _describe(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_describe(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema or "const" in schema:
        choices = [f'"{choice}"' for choice in schema.get("enum", [schema.get("const")])]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if schema.get("type") == "array":
        items = schema.get("prefixItems")
        return f"{len(items)} numbers, each {_describe(items[0])}" if items else "an array of strings"
    if schema.get("format") == "path":
        return f"a string, with at most {MAX_NAME_BYTES} bytes in a name and {MAX_PATH_BYTES} in a path"
    return _NAMES[schema["type"]] + _limits(schema)


_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "object": "a table",
}
_LIMITS = {
    "minimum": " of at least {}",
    "exclusiveMinimum": " above {}",
    "maximum": " and at most {:,}",
    "maxLength": " of at most {} characters",
    "multipleOf": " in steps of {}",
    "pattern": " like 1:1",
}


def _limits(schema: Mapping[str, Any]) -> str:
    return "".join(text.format(schema[name]) for name, text in _LIMITS.items() if name in schema)
