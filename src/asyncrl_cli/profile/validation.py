"""Validates a profile's values, and says what each key expects: in errors, in words, and as the JSON Schema
of a profile's file, for editors and for taplo.

`asyncrl schema profile` prints the schema. Shipped profiles name it in their first line, `#:schema
./profile.schema.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from asyncrl_cli.base.errors import ConfigError, combine, did_you_mean
from asyncrl_cli.base.paths import MAX_NAME_BYTES, MAX_PATH_BYTES
from asyncrl_cli.base.safe_files import decapitalized
from asyncrl_cli.profile.keys import PARAMS, keys, sections
from asyncrl_cli.profile.schema import NamedReward, Profile
from asyncrl_cli.profile.toml_files import (
    LONGEST_ECHO,
    Table,
    Value,
    Values,
    parse_value,
    shortened,
    toml_value,
)

DIALECT = "https://json-schema.org/draft/2020-12/schema"
EXTENDS = {
    "type": "string",
    "description": "The profile that this one extends: its name, or a path relative to this file.",
}
NAMED = "NamedReward"
"""The part of a validation error's place that says that it is in the table of a named reward."""
SCHEMAS, DEFINITIONS = ("properties", "$defs"), "$defs"
"""Keywords whose values map names to schemas. These names are not keywords."""


def validate(values: Values, origins: Mapping[str, str]) -> Profile:
    """Make the profile from values by key, including name and purpose. Raises one ConfigError for all type
    and range errors."""
    nested: Table = {}
    params: Table = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if key.startswith(f"{PARAMS}."):
            params[key.removeprefix(f"{PARAMS}.")] = value
        elif name:
            nested.setdefault(section, {})[name] = value
        else:
            nested[key] = value
    if params:
        nested.setdefault("task", {}).setdefault("params", params)
    try:
        return Profile.model_validate(nested)
    except ValidationError as error:
        wrong = dict[str, str]()
        for detail in error.errors():
            key, *within = (".".join(map(str, detail["loc"][:2])), *map(str, detail["loc"][2:]))
            is_named = NAMED in within[:-1]  # the table of a named reward, `{use = ..., weight = ...}`
            wrong[key] = wrong.get(key) or (_wrong_name(within, detail) if is_named else "")
        problems = [_wrong_value(key, values[key], origins[key], why) for key, why in wrong.items()]
        raise combine(problems) from None


def _wrong_name(within: Sequence[str], detail: ErrorDetails) -> str:
    table, field = f'the table of "{shortened(within[within.index(NAMED) - 1])}"', shortened(within[-1])
    if detail["type"] == "missing":
        return f"{table} lacks {field}"
    if detail["type"] == "extra_forbidden":
        meant = did_you_mean(field, [*NamedReward.__annotations__], "it has use and weight")
        return f"{table} has an unknown key {field}: {meant}"
    return f"{field} in {table}: {decapitalized(detail['msg'])}"


def _wrong_value(key: str, value: Value, origin: str, why: str = "") -> ConfigError:
    text, options = shortened(value), _options(key)
    shown = f'"{text}"' if isinstance(value, str) else text.lower() if isinstance(value, bool) else text
    kinds = {option["type"] for option in options if not _choices(option)}
    hint = f"it means: {keys().get(key, 'one line of text')}"
    if len(text) >= LONGEST_ECHO:
        pass  # too long to be quoted
    elif isinstance(value, str) and kinds - {"string"} and _is_toml(value):
        hint = f"remove the quotes: {key} = {value}"
    elif isinstance(value, str):
        found = [choice for option in options for choice in _choices(option)]
        hint = did_you_mean(value, found, hint, '"{}"'.format)
    elif kinds == {"string"}:
        quoted = f'{key} = "{value}"' if origin != "--set" else f"--set '{key}=\"{value}\"'"
        hint = f"quote it: {quoted}"
    if why:
        shown = shortened(toml_value(value))
        example = '{right = {use = "math-verify"}, short = {use = "my_rewards:brief", weight = 0.2}}'
        return ConfigError(f"{key} = {shown} ({origin}): {why}", hint=f"{key} = {example}")
    return ConfigError(f"{key} = {shown} ({origin}): expected {expected(key)}", hint=hint)


def _is_toml(text: str) -> bool:
    try:
        return bool(parse_value(text) != text)
    except ConfigError:
        return False


def expected(key: str) -> str:
    """What a value of `key` must be, in words: `an integer of at least 1`."""
    return " or ".join(map(_describe, _options(key)))


def choices(key: str) -> list[str]:
    """The values of a key that has a fixed list of them, as TOML or as text; empty for any other key."""
    options = _options(key)
    is_boolean = any(option.get("type") == "boolean" for option in options)
    return [choice for option in options for choice in _choices(option)] + ["true", "false"] * is_boolean


def _options(key: str) -> list[Table]:
    """The kinds of value that `key` accepts, as JSON schemas."""
    section, _, name = key.partition(".")
    if not name:
        return [{"type": "string"}]
    schema = _schema()["$defs"][sections()[section].__name__]["properties"][name.split(".")[0]]
    return [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]


@cache
def _schema() -> Table:
    return Profile.model_json_schema()


def _choices(option: Values) -> list[str]:
    return option["enum"] if "enum" in option else [option["const"]] if "const" in option else []


def _describe(option: Values) -> str:
    if choices := [f'"{choice}"' for choice in _choices(option)]:
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if items := option.get("prefixItems"):
        return f"{len(items)} numbers, each {_describe(items[0])}"
    if option["type"] == "array":
        return f"an array, each entry {_describe(option['items'])}"
    if option.get("format") == "path":
        return f"a string, with at most {MAX_NAME_BYTES} bytes in a name and {MAX_PATH_BYTES} in a path"
    limits = (text.format(option[name]) for name, text in _LIMITS.items() if name in option)
    return _NAMES[option["type"]] + "".join(limits)


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
    "exclusiveMaximum": " and below {}",
    "minLength": " of at least {} character",
    "maxLength": " of at most {} characters",
    "examples": ' like "{0[0]}"',
}


def profile_schema() -> Table:
    schema = tidied(Profile.model_json_schema())
    schema["properties"] = {"extends": EXTENDS, **schema["properties"]}
    return {"$schema": DIALECT, **schema, "title": "asyncrl profile"}


def tidied(schema: Values) -> Table:
    """A pydantic schema without the parts that are useless in TOML or to an editor: null, titles, and
    defaults of whole tables."""
    kept: Table = {}
    for keyword, value in schema.items():
        if keyword in SCHEMAS:
            kept[keyword] = {name: tidied(inner) for name, inner in value.items()}
        elif keyword == "anyOf":
            options = [tidied(option) for option in value if option.get("type") != "null"]
            kept |= options[0] if len(options) == 1 else {"anyOf": options}
        elif keyword in ("items", "additionalProperties") and isinstance(value, Mapping):
            kept[keyword] = tidied(value)
        elif keyword == "default":
            kept |= {} if value is None or "$ref" in schema else {"default": _number(value)}
        elif keyword not in ("title", "multipleOf", "format"):
            kept[keyword] = value
    return kept


def _number(value: Value) -> Value:
    """Pydantic's schema has a decimal's default as text: turn it into a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
