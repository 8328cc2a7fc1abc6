"""Turns a `task.environment` of the form module:Class into a ToolClass, and tries it out before the run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.code_records import recorded_file, try_out, user_code
from asyncrl_cli.tasks.tool_class import ToolClass, check_reward, inspect_class
from asyncrl_cli.tasks.user_code import UserCode, is_user_code

IMPORT_LIMIT_S = 30.0
"""Least time for the import: that of transformers, which describes the tools, is part of it."""
EXPECTS = "it takes no arguments; it has `reset`, and tools as public methods with type hints and docstrings"


def import_limit_s(profile: Profile) -> float:
    """How long the import of the class may take, when it is tried out and in every rollout worker."""
    return max(IMPORT_LIMIT_S, profile.env.tool_timeout_s)


def resolve_tool_class(profile: Profile, name: str, run_dir: Path | None) -> tuple[ToolClass, tuple[str, ...]]:
    """The class of `task.environment = name`, and notes for the user. Raises ConfigError if it or its reward cannot be used.

    `run_dir`: set for a resumed run, whose code is imported from the recorded files; RefusedError if that is impossible.
    """
    limit_s, notes = import_limit_s(profile), list[str]()

    def found(what: str, code_name: str, check: Any, expects: str) -> Any:
        if what == "environment" and not is_user_code(profile.task.environment):  # a builtin task's own class
            return UserCode(name=code_name), check(UserCode(name=code_name))
        file, note = (None, "") if run_dir is None else recorded_file(run_dir, what, code_name)
        notes.extend([note] if note else [])
        code, limit_key = user_code(code_name, file, profile.task.import_path), "env.tool_timeout_s"
        return try_out(f"task.{what}", code, check, limit_s=limit_s, limit_key=limit_key, expects=expects)

    code, (tools, has_reward) = found("environment", name, inspect_class, EXPECTS)
    reward = None
    if is_user_code(profile.task.reward):
        reward, _ = found("reward", profile.task.reward, check_reward, "the function takes TRL's arguments by name")
    elif profile.task.reward == "auto" and not has_reward:
        raise ConfigError(
            f'task.environment = "{name}" has no method get_reward, and task.reward = "auto": nothing says what it is worth',
            hint='add `def get_reward(self) -> float`, or set task.reward = "module:function" (TRL\'s signature) or "exact-match"',
        )
    return ToolClass(code=code, tools=tuple(tools), reward=reward), tuple(notes)
