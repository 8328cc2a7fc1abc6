"""Groups in a checkpoint: JSON, without payloads and the prompts' items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.contracts.ports import Json
from asyncrl_cli.contracts.prompt_group import (
    AttemptKey,
    GroupResult,
    Handle,
    PartialResponse,
    PartKey,
    PartResult,
    Prompt,
)
from asyncrl_cli.loop.attempts import Attempt, Part, Stage
from asyncrl_cli.loop.ledger import LedgerState

Find = Callable[[str, int], Prompt]
"""Finds a prompt by uid and epoch (`Feed.find`)."""


class TryState(TypedDict):
    key: AttemptKey
    requeues: Count


class EndedState(TypedDict):
    """A part of a running group that has ended."""

    indices: tuple[Count, ...]
    version: Count
    result: PartResult


class RunningState(TryState):
    """A running group. `kept`: by index, the responses that continue from the tokens that they had.
    Checkpoints up to 2026-11 have none of the keys below: their groups start again."""

    deadline: NotRequired[Count]
    num_parts: NotRequired[Count]
    ended: NotRequired[list[EndedState]]
    kept: NotRequired[dict[int, PartialResponse]]


FinishedState = TypedDict("FinishedState", {"deadline": Count, "try": TryState, "result": GroupResult})


class GroupsState(TypedDict):
    """The groups' part of a checkpoint. `again`: requeued, not yet started."""

    tokens_discarded: Count
    tokens_trained: Count
    ledger: LedgerState
    feed: Json
    running: list[RunningState]
    again: list[TryState]
    finished: list[FinishedState]
    failures: NotRequired[dict[str, Count]]


def try_state(attempt: Attempt) -> TryState:
    return {"key": attempt.key, "requeues": attempt.requeues}


def running_state(attempt: Attempt, kept: Mapping[PartKey, Mapping[int, PartialResponse]]) -> RunningState:
    """`kept` has what running parts had; a part that began later has nothing yet."""
    ended: list[Any] = []
    all_partial = dict(attempt.partial)
    for part in attempt.parts.values():
        if part.result is None:
            all_partial |= kept.get(part.key, {})
        else:
            result = asdict(replace(part.result, payload=None))
            ended.append({"indices": part.indices, "version": part.version, "result": result})
    return {
        **try_state(attempt),
        "deadline": attempt.deadline,
        "num_parts": attempt.num_parts,
        "ended": ended,
        "kept": dict(sorted(all_partial.items())),
    }


def finished_state(attempt: Attempt) -> FinishedState:
    result: Any = asdict(replace(attempt.outcome(), payload=None))
    return {"deadline": attempt.deadline, "try": try_state(attempt), "result": result}


def restored_attempt(state: TryState, find: Find) -> Attempt:
    key = state["key"]
    return Attempt(prompt=find(key.uid, key.epoch), number=key.attempt, requeues=state["requeues"])


def restored_finished(state: FinishedState, find: Find, payload: tuple[Handle, ...]) -> Attempt:
    again = restored_attempt(state["try"], find)
    again.stage, again.deadline = Stage.FINISHED, state["deadline"]
    again.result = replace(state["result"], payload=payload)
    return again


def restored_running(
    state: RunningState, find: Find, handles: Iterator[tuple[Handle, ...]], deadline: int, n: int
) -> Attempt:
    """`handles`: those of its ended parts come next. `deadline`: if the state has none."""
    again = restored_attempt(state, find)
    again.deadline = state.get("deadline", deadline)
    for entry in state.get("ended", ()):
        (payload,), key = next(handles), entry["result"].key
        again.parts[key.number] = Part(
            key=key,
            indices=entry["indices"],
            worker="",
            version=entry["version"],
            result=replace(entry["result"], payload=payload),
        )
    again.num_parts, again.partial = state.get("num_parts", 0), dict(state.get("kept", {}))
    ended = {index for part in again.parts.values() for index in part.indices}
    again.unplaced = tuple(index for index in range(n) if index not in ended)
    return again
