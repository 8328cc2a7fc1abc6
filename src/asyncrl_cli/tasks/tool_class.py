"""A user's environment in the convention of TRL's `environment_factory`.

A class (or function) that takes no arguments makes the environment of one episode. `reset(**columns)` begins it and may return text
to add to the user's message. All other public methods are the model's tools, described by docstrings and type hints. The reward is
the sum of `get_reward()`, if there is one, and of task.reward, if that is given. An attribute `done` that is true ends the episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.tasks.user_code import UserCode

NOT_TOOLS = ("reset", "get_reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolClass:
    """Small and picklable. `tools`: the schemas of its methods, in OpenAI's shape. `reward`: a function in TRL's signature, called
    with `prompts`, `completions`, `environments`, the columns and the rest, each a list of one."""

    code: UserCode
    tools: tuple[Mapping[str, Any], ...] = ()
    reward: UserCode | None = None


def inspect_class(code: UserCode) -> tuple[list[dict[str, Any]], bool]:
    """The tools' schemas, and whether the class has `get_reward`. Runs in a child; raises what stands against using the class."""
    from transformers.utils import get_json_schema

    environment = code.load()()
    if not callable(getattr(environment, "reset", None)):
        raise TypeError(f"{code.attribute} has no method `reset`")
    schemas = [get_json_schema(getattr(environment, name)) for name in tool_names(environment)]
    return schemas, callable(getattr(environment, "get_reward", None))


def tool_names(environment: object) -> list[str]:
    members = inspect.getmembers(type(environment), inspect.isfunction)
    return [name for name, _ in members if name not in NOT_TOOLS and not name.startswith("_")]


def check_reward(code: UserCode) -> None:
    function = code.load()
    if inspect.isclass(function) or not callable(function):
        raise TypeError(f"{code.attribute} is not a function but {type(function).__name__}")
    asked = inspect.signature(function).parameters.get("completion_ids")
    if asked is not None and asked.default is asked.empty:
        raise TypeError(f"{code.attribute} asks for completion_ids, which are not at hand where environments run")
