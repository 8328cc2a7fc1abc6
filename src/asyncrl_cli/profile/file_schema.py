"""The JSON Schema of a profile file, for editors and for taplo: the schema of `Profile`, and the keys that
only files have.

`asyncrl schema profile` prints it. Shipped profiles name it in their first line, `#:schema
./profile.schema.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl_cli.profile.schema import Profile

DIALECT = "https://json-schema.org/draft/2020-12/schema"
EXTENDS = {
    "type": "string",
    "description": "The profile that this one extends: its name, or a path relative to this file.",
}
SCHEMAS, DEFINITIONS = ("properties", "$defs"), "$defs"
"""Keywords whose values map names to schemas. These names are not keywords."""


def profile_schema() -> dict[str, Any]:
    schema = tidied(Profile.model_json_schema())
    schema["properties"] = {"extends": EXTENDS, **schema["properties"]}
    return {"$schema": DIALECT, **schema, "title": "asyncrl profile"}


def tidied(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A pydantic schema without the parts that are useless in TOML or to an editor: null, titles, and
    defaults of whole tables."""
    kept: dict[str, Any] = {}
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


def _number(value: Any) -> Any:
    """Pydantic's schema has a decimal's default as text: turn it into a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
