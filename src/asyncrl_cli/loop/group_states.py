"""Groups in a checkpoint: JSON, without their data, the prompts' items, and what follows from the run's step.

`frozen` writes it, `restore` reads it. Both keep to one order of keys: each finished group's parts, then each
ended part of a running group, then what running groups have of unfinished responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.contracts.ports import Json, PartialResult
from asyncrl_cli.contracts.prompt_group import (
    AttemptKey,
    DataKey,
    GroupResult,
    PartialResponse,
    PartKey,
    PartResult,
    Prompt,
    VersionPlan,
)
from asyncrl_cli.loop.groups import Groups
from asyncrl_cli.loop.ledger import Attempt, LedgerState, Part, Stage
from asyncrl_cli.loop.logical_order import LogicalAdmission

Find = Callable[[str, int], Prompt]
"""Finds a prompt by uid and epoch (`Feed.find`)."""
PartialResponses = Mapping[PartKey, Mapping[int, PartialResponse]]
"""What running parts have so far, by part and index."""


class TryState(TypedDict):
    """`position` and `versions`: only in deterministic runs."""

    key: AttemptKey
    requeues: Count
    position: NotRequired[Count]
    versions: NotRequired[VersionPlan]


class EndedState(TypedDict):
    """A part of a running group that has ended."""

    indices: tuple[Count, ...]
    version: Count
    result: PartResult


class RunningState(TryState):
    """A running group. `kept`: by index, the responses that continue from the tokens that they had."""

    deadline: Count
    num_parts: Count
    ended: list[EndedState]
    kept: dict[int, PartialResponse]


FinishedState = TypedDict("FinishedState", {"deadline": Count, "try": TryState, "result": GroupResult})


class GroupsState(TypedDict):
    """The groups' part of a checkpoint. `again`: requeued, not yet started. `judged`: in deterministic runs,
    the first position that is not."""

    tokens_discarded: Count
    tokens_trained: Count
    ledger: LedgerState
    feed: Json
    running: list[RunningState]
    again: list[TryState]
    finished: list[FinishedState]
    failures: NotRequired[dict[str, Count]]
    orphans: NotRequired[Count]
    judged: NotRequired[Count]


def frozen(groups: Groups, kept: PartialResponses) -> GroupsState:
    """The groups now. `kept`: what the running parts had a moment ago."""
    order = groups.admission
    state: GroupsState = {
        "tokens_discarded": groups.tokens_discarded,
        "tokens_trained": groups.tokens_trained,
        "ledger": groups.ledger.state(),
        "feed": groups.feed.state(),
        "running": [_running_state(attempt, kept) for attempt in groups.ledger.running.values()],
        "again": [_try_state(attempt) for attempt in groups.again],
        "finished": [
            {
                "deadline": attempt.deadline,
                "try": _try_state(attempt),
                "result": _without_payload(attempt.outcome()),
            }
            for attempt in groups.ledger.finished.values()
        ],
        "failures": dict(groups.failures),
        "orphans": groups.data.orphans,
    }
    if isinstance(order, LogicalAdmission):
        state["judged"] = order.judged
    return state


def payloads(groups: Groups) -> tuple[tuple[DataKey, ...], ...]:
    """The keys of all data held here, without those of unfinished responses."""
    finished = [attempt.outcome().payload or () for attempt in groups.ledger.finished.values()]
    ended = [part for attempt in groups.ledger.running.values() for part in attempt.ended_parts()]
    return (*finished, *((part.payload,) if part.payload is not None else () for part in ended))


def partial_tokens(
    groups: Groups, running: Iterable[RunningState], partial_results: Iterable[PartialResult]
) -> dict[AttemptKey, dict[int, DataKey]]:
    """The running groups with `kept` responses, and by index the keys of these responses' tokens: what their
    workers have just given, or else what they continue from."""
    given = {
        part_key: dict.fromkeys(indices, key)
        for found in partial_results  # parts that have not begun come last, and have no new key
        for key, (part_key, indices) in zip(found.keys, found.responses.items(), strict=False)
    }
    keys = dict[AttemptKey, dict[int, DataKey]]()
    for entry in running:
        if kept := entry["kept"]:
            attempt = groups.ledger.running[entry["key"]]
            parts = [given.get(part.key, {}) for part in attempt.running_parts()]
            newest = dict(chain(attempt.partial_tokens.items(), *(one.items() for one in parts)))
            keys[attempt.key] = {index: newest[index] for index in kept}
    return keys


def restore(
    groups: Groups, state: GroupsState, payloads: Iterable[tuple[DataKey, ...]], n: int, lost_tokens: int
) -> None:
    """Continue from `state`. What ran at the snapshot is placed again, as if all workers had been lost.
    Responses continue from their kept tokens; `lost_tokens` count as discarded. `n`: responses of a group."""
    groups.tokens_discarded = state["tokens_discarded"] + lost_tokens
    groups.tokens_trained = state["tokens_trained"]
    groups.failures = Counter(state.get("failures", {}))
    groups.data.orphans = state.get("orphans", 0)
    groups.feed.restore(state["feed"])
    keys, find = iter(payloads), groups.feed.find
    finished = []
    for entry in state["finished"]:
        attempt = _restored_attempt(entry["try"], find)
        attempt.stage, attempt.deadline = Stage.FINISHED, entry["deadline"]
        attempt.result = replace(entry["result"], payload=next(keys))
        finished.append(attempt)
    running = [_restored_running(entry, find, keys, n) for entry in state["running"]]
    for attempt in running:
        attempt.partial_tokens = dict.fromkeys(attempt.partial, *next(keys)) if attempt.partial else {}
    groups.ledger.restore(state["ledger"], [*running, *finished])
    if isinstance(groups.admission, LogicalAdmission):
        groups.tokens_discarded += groups.admission.restore(state.get("judged", 0))
    groups.admission.note_unplaced()
    groups.again.extend(_restored_attempt(entry, find) for entry in state["again"])


def forget_unfinished(groups: Groups) -> None:
    """After `restore`: the kept responses that had not ended start again."""
    for attempt in groups.ledger.running.values():
        unfinished = [index for index, kept in attempt.partial.items() if not kept.is_whole]
        groups.tokens_discarded += sum(attempt.partial.pop(index).tokens for index in unfinished)


def _without_payload(result: PartResult | GroupResult) -> Any:
    return asdict(replace(result, payload=None))


def _try_state(attempt: Attempt) -> TryState:
    state: TryState = {"key": attempt.key, "requeues": attempt.requeues}
    if attempt.versions is not None:
        state["position"], state["versions"] = attempt.position, attempt.versions
    return state


def _restored_attempt(state: TryState, find: Find) -> Attempt:
    key = state["key"]
    return Attempt(
        prompt=find(key.uid, key.epoch),
        number=key.attempt,
        requeues=state["requeues"],
        position=state.get("position", -1),
        versions=state.get("versions"),
    )


def _running_state(attempt: Attempt, kept: PartialResponses) -> RunningState:
    """`kept` has what running parts had; a part that began later has nothing yet."""
    ended: list[EndedState] = []
    all_partial = dict(attempt.partial)
    for part in attempt.parts.values():
        if part.result is None:
            all_partial |= kept.get(part.key, {})
        else:
            result = _without_payload(part.result)
            ended.append({"indices": part.indices, "version": part.version, "result": result})
    return {
        **_try_state(attempt),
        "deadline": attempt.deadline,
        "num_parts": attempt.num_parts,
        "ended": ended,
        "kept": dict(sorted(all_partial.items())),
    }


def _restored_running(
    state: RunningState, find: Find, keys: Iterator[tuple[DataKey, ...]], n: int
) -> Attempt:
    """`keys`: those of its ended parts come next."""
    again = _restored_attempt(state, find)
    again.deadline = state["deadline"]
    for entry in state["ended"]:
        (payload,), key = next(keys), entry["result"].key
        again.parts[key.number] = Part(
            key=key,
            indices=entry["indices"],
            worker="",
            version=entry["version"],
            result=replace(entry["result"], payload=payload),
        )
    again.num_parts, again.partial = state["num_parts"], dict(state["kept"])
    ended = {index for part in again.parts.values() for index in part.indices}
    again.unplaced = tuple(index for index in range(n) if index not in ended)
    return again
