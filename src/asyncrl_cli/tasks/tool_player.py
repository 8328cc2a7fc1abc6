"""What runs in an environment's process: makes a user's objects, one per episode, and calls their methods.

    worker -> process    pickles: ("reset", seed, prompt, columns), ("calls", [(tool, arguments), ...]), ("reward", completion),
                         ("finish",)
    process -> worker    lines of JSON: first {"pid": ...}, then one per request, of "calls" one per tool call

A line with `failed` says why the episode cannot go on. A tool that raises is none of these: the model is told.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import random
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from asyncrl_cli.tasks.scoring import checked_reward
from asyncrl_cli.tasks.tool_class import tool_names
from asyncrl_cli.tasks.user_code import describe

MAX_TEXT_CHARS = 10**6
"""Longest text of a reset or of a tool: far more than any context, little enough for a pipe."""
NUM_PRINTED_TRACEBACKS = 3

Line = dict[str, Any]


class TooLong(Exception):
    pass


class Player:
    def __init__(self, make: Callable[[], Any], reward: Callable[..., Any] | None) -> None:
        self._make = make
        self._reward = reward
        self._environment: Any = None
        self._runner: Any = None
        self._tracebacks_left = NUM_PRINTED_TRACEBACKS

    def serve(self, requests: BinaryIO, results: BinaryIO) -> None:
        """Answer requests until there are no more."""
        answers: Mapping[str, Callable[..., Any]] = {
            "reset": self._reset,
            "calls": self._calls,
            "reward": self._rewarded,
            "finish": self._finish,
        }
        while True:
            try:
                what, *arguments = pickle.load(requests)
            except EOFError:
                return
            try:
                for line in answers[what](*arguments):
                    _write(results, line)
            except (Exception, SystemExit) as error:
                self._show(error)
                _write(results, {"failed": describe(error)})

    def _reset(self, seed: int, prompt: list[Any], columns: Mapping[str, Any]) -> Sequence[Line]:
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        self._prompt, self._columns = prompt, columns
        self._environment = self._make()
        observation = self._value(self._environment.reset(prompt=prompt, **columns))
        if not isinstance(observation, str | None):
            raise TypeError(f"reset returned {type(observation).__name__}, not text or None")
        return [{"text": _bounded(observation or "")}]

    def _calls(self, calls: Sequence[tuple[str, Any]]) -> Any:
        for name, arguments in calls:
            told = self._call(name, arguments)
            yield {**told, "done": bool(getattr(self._environment, "done", False))}

    def _call(self, name: str, arguments: Any) -> Line:
        """What the model is told, and whether the call failed: the tool's result, or the error that it raised, as TRL puts it."""
        try:
            if name not in tool_names(self._environment):
                raise ValueError(f"Tool {name} not found.")
            return {"text": _bounded(str(self._value(getattr(self._environment, name)(**arguments)))), "raised": False}
        except TooLong:
            raise
        except (Exception, SystemExit) as error:
            return {"text": str({"error": _bounded(str(error))}), "raised": True}

    def _rewarded(self, completion: list[Any]) -> Sequence[Line]:
        rewards, facts = list[Any](), dict[str, float]()
        if hasattr(self._environment, "get_reward"):
            rewards.append(self._value(self._environment.get_reward()))
        if self._reward is not None:
            columns = {name: [value] for name, value in self._columns.items()}
            rewards += self._value(
                self._reward(
                    prompts=[self._prompt],
                    completions=[completion],
                    environments=[self._environment],
                    trainer_state=None,
                    log_extra=lambda *_: None,
                    log_metric=lambda name, value: facts.update({str(name): float(value)}),
                    **columns,
                )
            )
        given = [checked_reward(reward) for reward in rewards if reward is not None]
        if rewards and not given:
            raise ValueError("the reward is None")
        return [{"reward": sum(given), "facts": facts}]

    def _finish(self) -> Sequence[Line]:
        """Let go of the environment. `clean`: nothing that it has started still runs, so that the process can serve another."""
        self._environment = None
        return [{"clean": threading.active_count() == 1 and not self._has_tasks() and not _has_children()}]

    def _has_tasks(self) -> bool:
        if self._runner is None:
            return False
        import asyncio

        return bool(asyncio.all_tasks(self._runner.get_loop()))

    def _value(self, result: Any) -> Any:
        """The result, awaited if it has to be, on an event loop that lasts as long as the process."""
        if not inspect.isawaitable(result):
            return result
        import asyncio

        self._runner = self._runner or asyncio.Runner()

        async def awaited() -> Any:
            return await result

        return self._runner.run(awaited())

    def _show(self, error: BaseException) -> None:
        if self._tracebacks_left:
            self._tracebacks_left -= 1
            traceback.print_exception(error)


def _has_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _bounded(text: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        raise TooLong(f"{len(text):,} characters of text, {MAX_TEXT_CHARS:,} are allowed")
    return text


def _write(results: BinaryIO, line: Line) -> None:
    results.write(json.dumps(line).encode() + b"\n")
    results.flush()
