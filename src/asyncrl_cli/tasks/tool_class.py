"""A user's environment in the convention of TRL's `environment_factory`: its description, and the player that
runs it in a child.

A class (or function) that takes no arguments makes the environment of one episode. `reset(**columns)` begins
it and may return text to add to the user's message. All other public methods are the model's tools, described
by docstrings and type hints. The reward is the sum of `get_reward()`, if there is one, and of the functions
in task.reward. An attribute `done` that is true ends the episode.

    worker -> process    pickles: ("reset", seed, prompt, columns), ("calls", [(tool, arguments), ...]),
                         ("reward", completion), ("finish",)
    process -> worker    lines of JSON: one per request (for "calls" one per tool call)

A line with `failed` says why the episode cannot go on. An error raised by a tool is not such a failure: the
model is told.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from asyncrl_cli.base.child_process import pickles, write_line
from asyncrl_cli.base.named_code import UserCode, describe_with_traceback
from asyncrl_cli.contracts.environment import Message, RewardPart, ToolSchema
from asyncrl_cli.tasks.reward_functions import check_trl, checked_reward

if TYPE_CHECKING:
    import asyncio  # imported only where a class has coroutine functions

GET_REWARD = "get_reward"
NOT_TOOLS = ("reset", GET_REWARD)
MAX_TEXT_CHARS = 10**6
"""Longest text that `reset` or a tool may return: far more than any context, little enough for a pipe."""

Line = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolClass:
    """Small and picklable. `tools`: the schemas of its methods, in OpenAI's shape. `rewards`: functions in
    TRL's signature, called with `prompts`, `completions`, `environments` and the columns, each a list of one,
    and TRL's other arguments."""

    code: UserCode
    tools: tuple[ToolSchema, ...] = ()
    rewards: tuple[RewardPart, ...] = ()


def inspect_class(code: UserCode) -> tuple[list[ToolSchema], bool]:
    """The tools' schemas, and whether the class has `get_reward`. Runs in a child; raises an error if the
    class cannot be used."""
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
    check_trl(code.attribute, inspect.signature(function))


class TooLong(Exception):
    pass


class Player:
    places = 1

    def __init__(self, tool_class: ToolClass) -> None:
        """Imports the class and its reward functions. Raises any error of that."""
        parts = [(part, code) for part in tool_class.rewards for code in part.spec.functions]
        self._rewards = {part.name: (part.weight, code.load()) for part, code in parts}
        self._make = tool_class.code.load()
        self._environment: Any = None
        self._runner: asyncio.Runner | None = None

    def serve(self, requests: BinaryIO, results: BinaryIO, *descriptors: int) -> None:
        """Answer requests until there are no more; each names one of the four methods below."""
        for what, *arguments in pickles(requests):
            try:
                for line in getattr(self, what)(*arguments):
                    write_line(results, line)
            except (Exception, SystemExit) as error:
                write_line(results, {"failed": describe_with_traceback(error)})

    def reset(self, seed: int, prompt: list[Message], columns: Mapping[str, object]) -> Sequence[Line]:
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        self._prompt, self._columns = prompt, columns
        self._environment = self._make()
        observation = self._value(self._environment.reset(prompt=prompt, **columns))
        if not isinstance(observation, str | None):
            raise TypeError(f"reset returned {type(observation).__name__}, not text or None")
        return [{"text": _bounded(observation or "")}]

    def calls(self, calls: Sequence[tuple[str, Mapping[str, object]]]) -> Iterator[Line]:
        for name, arguments in calls:
            result = self._call(name, arguments)
            yield {**result, "done": bool(getattr(self._environment, "done", False))}

    def _call(self, name: str, arguments: Mapping[str, object]) -> Line:
        """The text for the model, and whether the call failed: the tool's result, or the error that it
        raised, in TRL's format."""
        try:
            if name not in tool_names(self._environment):
                raise ValueError(f"Tool {name} not found.")
            result = self._value(getattr(self._environment, name)(**arguments))
            return {"text": _bounded(str(result)), "raised": False}
        except TooLong:
            raise
        except (Exception, SystemExit) as error:
            return {"text": str({"error": _bounded(str(error))}), "raised": True}

    def reward(self, completion: list[Message]) -> Sequence[Line]:
        given, facts = dict[str, object](), dict[str, float]()
        if hasattr(self._environment, "get_reward"):
            given[GET_REWARD] = self._value(self._environment.get_reward())
        for name, (_, function) in self._rewards.items():
            (given[name],) = self._value(
                function(
                    prompts=[self._prompt],
                    completions=[completion],
                    environments=[self._environment],
                    trainer_state=None,
                    log_extra=lambda *_: None,
                    log_metric=lambda name, value: facts.update({str(name): float(value)}),
                    **{name: [value] for name, value in self._columns.items()},
                )
            )
        rewards = {name: checked_reward(reward) for name, reward in given.items() if reward is not None}
        if given and not rewards:
            raise ValueError("the reward is None")
        total = sum(
            self._rewards[name][0] * reward if name in self._rewards else reward
            for name, reward in rewards.items()
        )
        parts = rewards if len(given) > 1 else {}
        fields = {name: value for reward in rewards.values() for name, value in reward.fields.items()}
        return [{"reward": checked_reward(total), "facts": facts, "parts": parts, "fields": fields}]

    def finish(self) -> Sequence[Line]:
        """Drop the environment. `clean`: nothing that it started still runs, so the process can serve another
        one."""
        self._environment = None
        has_tasks = has_children = False
        if self._runner is not None:
            import asyncio

            has_tasks = bool(asyncio.all_tasks(self._runner.get_loop()))
        with contextlib.suppress(ChildProcessError):  # there are none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            has_children = True
        return [{"clean": threading.active_count() == 1 and not has_tasks and not has_children}]

    def _value(self, result: object) -> Any:
        """The result, awaited if it is awaitable, on an event loop that lasts as long as the process."""
        if not inspect.isawaitable(result):
            return result
        import asyncio

        self._runner = self._runner or asyncio.Runner()

        async def awaited() -> object:
            return await result

        return self._runner.run(awaited())


def _bounded(text: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        raise TooLong(f"{len(text):,} characters of text, {MAX_TEXT_CHARS:,} are allowed")
    return text
