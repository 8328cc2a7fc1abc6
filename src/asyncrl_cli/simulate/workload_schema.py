"""The JSON Schema of a workload's file, in which the keys of `[profile]` and `[profiles.NAME]` are a profile's."""

from __future__ import annotations

from typing import Any

from asyncrl_cli.profile.file_schema import DEFINITIONS, DIALECT, profile_schema, tidied
from asyncrl_cli.simulate.workload import Workload


def workload_schema() -> dict[str, Any]:
    schema, of_profile = tidied(Workload.model_json_schema()), profile_schema()
    sections = {name: section for name, section in of_profile["properties"].items() if "$ref" in section}
    overrides = {"type": "object", "additionalProperties": False, "properties": sections}
    schema["properties"]["profile"] |= overrides
    schema["properties"]["profiles"] |= {"additionalProperties": overrides}
    definitions = {**of_profile[DEFINITIONS], **schema[DEFINITIONS]}
    return {"$schema": DIALECT, **schema, DEFINITIONS: definitions, "title": "asyncrl workload"}
