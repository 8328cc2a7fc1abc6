"""Runs a ToolClass as an environment: its tools run in the episode's own process, within env.tool_timeout_s
each.

    start      -> reset ─> text for the user's message
    step       -> the tools that the model called ─> their results, or errors
                  no call, or `done` ─> the reward
    malformed  -> the model is told why its call could not be read

A tool that hangs or dies makes the episode fail. So do `reset` and the reward, each with a failure kind of
its own.

A worker's tool calls are logged before they run, which shows what a restarted episode may already have done:
one line of JSON per model answer that calls tools, `["<trajectory>", turn, ["tool", ...]]`. A file of
MOST_BYTES is renamed (suffix OLDER) and replaces the one renamed before it. Together the two reach further
back than any running episode. The driver reads the logs of lost workers and of earlier attempts.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl_cli.contracts.environment import (
    Answer,
    End,
    Environment,
    EpisodeFailed,
    Message,
    Reward,
    Rewards,
    Turn,
)
from asyncrl_cli.contracts.item import Item, messages_of
from asyncrl_cli.sandbox.parent_processes import Process, ProcessEnded, Processes
from asyncrl_cli.tasks.tool_class import ToolClass

MALFORMED = "The tool call could not be read: {}"
MOST_BYTES = 16 * 2**20
SUFFIX, OLDER = ".tools.jsonl", ".older"
Calls = dict[int, list[str]]
"""Names of the tools called, by turn (from 1)."""


@dataclass(eq=False)
class ToolEnvironment(Environment):
    """`rewards`: the task's own reward, added to the class's; None if there is none. `limit_s`:
    env.tool_timeout_s."""

    processes: Processes
    tool_class: ToolClass
    rewards: Rewards | None
    calls: CallLog
    limit_s: float
    _process: Process | None = None
    _completion: list[Message] = field(default_factory=list)
    _num_turns: int = 0
    _num_failed_calls: int = 0
    _text: str = ""

    async def start(self, item: Item) -> Turn:
        self._item = item
        try:
            self._process = await self.processes.take()
        except ProcessEnded as ended:
            raise EpisodeFailed("environment", str(ended)) from None
        prompt = list(messages_of(item["prompt"]))
        columns = {"answer": item["answer"], **item["metadata"]}
        columns.pop("prompt", None)
        self._process.ask("reset", zlib.crc32(self.episode.encode()), prompt, columns)
        answer = await self._answer("environment", "environment", "reset")
        if answer["text"]:
            prompt[-1] = {**prompt[-1], "content": prompt[-1]["content"] + answer["text"]}
        return Turn(messages=tuple(prompt), tools=self.tool_class.tools)

    async def step(self, answer: Answer) -> Turn | End:
        self._num_turns += 1
        self._text = answer.text
        self._completion.append(answer.message)
        if answer.malformed:
            self._num_failed_calls += 1
            return self._turn([{"role": "user", "content": MALFORMED.format(answer.malformed)}])
        calls = answer.message.get("tool_calls") or ()
        if not calls:
            return await self._end()
        functions = [call["function"] for call in calls]
        # Written before they run: the log must hold every call that may have had an effect.
        self.calls.note(self.episode, self._num_turns, [function["name"] for function in functions])
        assert self._process is not None
        asked = [(function["name"], function["arguments"]) for function in functions]
        self._process.ask("calls", asked, num_answers=len(calls))
        results, is_done = list[Message](), False
        for name, _ in asked:  # calls after the one that ends the episode run, too
            result = await self._answer("tool-timeout", "tool-died", f"tool {name}")
            self._num_failed_calls += result["raised"]
            results.append({"role": "tool", "name": name, "content": result["text"]})
            is_done = result["done"]
        if is_done:
            self._completion += results
            return await self._end()
        pairs = zip(calls, results, strict=True)
        return self._turn([{**message, "tool_call_id": call["id"]} for call, message in pairs])

    async def cut(self, reason: str) -> End:
        return await self._end()

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await self.processes.give_back(process, self.limit_s)

    async def _end(self) -> End:
        assert self._process is not None
        self._process.ask("reward", self._completion)
        answer = await self._answer("reward", "reward", "the reward")
        extra = 0.0 if self.rewards is None else await self.rewards.score(self._item, self._text)
        total, parts, fields = answer["reward"] + extra, answer["parts"], answer["fields"]
        if isinstance(extra, Reward):
            parts, fields = {**parts, **extra.parts}, {**fields, **extra.fields}
        facts = {"failed_calls": self._num_failed_calls, **answer["facts"]}
        return End(reward=Reward(total, parts, fields), facts=facts)

    async def _answer(self, late: str, dead: str, doing: str) -> Mapping[str, Any]:
        """The next answer of the process. Raises EpisodeFailed, of the kind `late` or `dead`, if there is
        none."""
        assert self._process is not None
        where = f"{doing} of {self.episode}"
        try:
            answer = await self._process.answer(self.limit_s)
        except TimeoutError:
            raise EpisodeFailed(late, f"{where} took longer than {self.limit_s:g} s and was killed") from None
        except ProcessEnded as ended:
            raise EpisodeFailed(dead, f"{where}: its process ended with {ended}") from None
        if "failed" in answer:
            kind = dead if dead != "tool-died" else "environment"
            raise EpisodeFailed(kind, f"{where}: {answer['failed']}")
        return answer

    def _turn(self, messages: list[Message]) -> Turn:
        self._completion += messages
        return Turn(messages=tuple(messages), tools=self.tool_class.tools)


class CallLog:
    """`path`: None to log nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd = -1

    def note(self, trajectory: str, turn: int, tools: Sequence[str]) -> None:
        if self._path is None:
            return
        if self._fd < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._fd, json.dumps([trajectory, turn, list(tools)]).encode() + b"\n")
        if os.fstat(self._fd).st_size > MOST_BYTES:
            os.replace(self._path, f"{self._path}{OLDER}")
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def noted_calls(logs: Path, worker: str = "*") -> dict[str, Calls]:
    """The logged calls of each trajectory that has called a tool, from the files below `logs`; of one worker
    or of all."""
    found = dict[str, Calls]()
    for file in sorted(logs.rglob(f"{worker}{SUFFIX}*")):
        with file.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # the last line of a killed worker
                trajectory, turn, tools = json.loads(line)
                found.setdefault(trajectory, {}).setdefault(turn, []).extend(tools)
    return found


class RepeatedCalls:
    """Reports the tool calls of episodes that start again after a resume or a worker's death: when they are
    placed again, or their prompt is admitted again. The files are read on creation, before the loop runs, and
    at each death.

    `logs`: of all attempts; `latest`: of the running one."""

    def __init__(self, logs: Path, latest: str = "latest") -> None:
        self._latest = logs / latest
        self._lost = noted_calls(logs)
        self._earlier: dict[tuple[str, str], dict[str, Calls]] = {}
        for trajectory, calls in self._lost.items():
            uid, _, rest = trajectory.rpartition("@")  # <uid>@<epoch>.<attempt>/<index>
            self._earlier.setdefault((uid, rest.partition(".")[0]), {})[trajectory] = calls

    def __call__(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Events to add, one per restarted trajectory. `calls`: the tools that it had called, by turn. It may
        call them again."""
        found = dict[str, Calls]()
        if event["event"] == "lost":
            self._lost |= noted_calls(self._latest, event["worker"])
        elif event["event"] == "running":
            found = self._earlier.pop((event["uid"], str(event["epoch"])), {})
        elif event["event"] == "replaced":
            names = [f"{event['group']}/{index}" for index in event["indices"]]
            found = {name: self._lost.pop(name) for name in names if name in self._lost}
        again = {name: event[name] for name in ("group", "uid", "epoch", "attempt") if name in event}
        return [
            {"event": "tools_again", **again, "trajectory": name, "calls": calls}
            for name, calls in found.items()
        ]
