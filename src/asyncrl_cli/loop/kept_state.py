"""The loop's state in a checkpoint: its types, and what its parts say of each other.

`freeze` (loop/cuts.py) writes it, `read_state` reads it back. A checkpoint can be whole and still not be what a loop has written:
whatever could break a run hours later is refused here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.loop.admission import takeable_in_time
from asyncrl_cli.loop.groups import GroupsState
from asyncrl_cli.loop.ledger import Account
from asyncrl_cli.loop.settings import LoopSettings
from asyncrl_cli.safe_files import Count, parse_json

SCHEMA_VERSION: Final = 2
"""2: prompts by uid and epoch; 1 held their items, which JSON changes."""


class EvalState(TypedDict):
    version: Count
    reward_mean: float
    num_prompts: Count
    response_tokens_median: float
    eval_s: float
    num_failed: Count


class LoopState(TypedDict):
    schema_version: Literal[2]
    step: Count
    time_s: float
    groups: GroupsState
    running_tokens: Count
    restarts: NotRequired[Count]
    last_eval_version: Count | None
    evals_ended: list[EvalState]
    observers: list[dict[str, Any]]


def read_state(content: Mapping[str, Any], settings: LoopSettings) -> LoopState:
    """Raises RefusedError unless it is the state of a run with these settings."""
    if content.get("schema_version") != SCHEMA_VERSION:
        raise RefusedError(
            f"the checkpoint's loop state has schema_version {content.get('schema_version')!r:.40}; "
            f"this asyncrl reads {SCHEMA_VERSION}",
            hint="resume with the version of asyncrl that started the run",
        )
    try:
        state = parse_json(json.dumps(content), LoopState)
    except ValueError as error:
        raise _malformed(str(error)) from None
    wrong = next(_contradictions(state, settings), None)
    if wrong is not None:
        raise _malformed(wrong)
    return state


def _malformed(why: str) -> RefusedError:
    return RefusedError(f"the checkpoint's loop state is malformed: {why}", hint="take another checkpoint")


def _contradictions(state: LoopState, settings: LoopSettings) -> Iterator[str]:
    yield from _wrong_step(state, settings)
    yield from _wrong_accounts(state["groups"])
    yield from _wrong_groups(state["groups"], settings)


def _wrong_step(state: LoopState, settings: LoopSettings) -> Iterator[str]:
    """A cut lies between two train steps: step, version and groups follow from each other."""
    step, groups = state["step"], state["groups"]
    is_boundary = step == 0 or settings.ends_window(step)
    expected = {
        "version": -(-step // settings.window_steps) if is_boundary else step // settings.window_steps,
        "taken_in_window": 0 if is_boundary else step % settings.window_steps * settings.step_groups,
        "trained_groups": step * settings.step_groups,
    }
    if step > settings.train_steps:
        yield f"step {step} of {settings.train_steps}"
    found = {name: amount for name, amount in groups.items() if name in expected}
    yield from (f"{name} is {found[name]} at step {step}, not {value}" for name, value in expected.items() if found[name] != value)
    if (state["last_eval_version"] or 0) > groups["version"]:
        yield f"last_eval_version is {state['last_eval_version']}, of version {groups['version']}"


def _wrong_accounts(groups: GroupsState) -> Iterator[str]:
    """The ledger's live attempts are those that run or have finished, each once."""
    ledger, trained = groups["ledger"], groups["ledger"]["ended"].get(Account.TRAINED, 0)
    live = {(uid, epoch, attempt): account for uid, epoch, attempt, account in ledger["live"]}
    running = [entry["key"] for entry in groups["running"]]
    finished = [entry["result"]["key"] for entry in groups["finished"]]
    expected = dict.fromkeys(running, Account.RUNNING) | dict.fromkeys(finished, Account.FINISHED)
    if len(live) != len(ledger["live"]) or live != expected:
        yield "the ledger's attempts are not the running and finished groups"
    accounted = len(live) + sum(ledger["ended"].values())
    if ledger["admitted_total"] != accounted:
        yield f"admitted_total is {ledger['admitted_total']}, accounted for {accounted}"
    if trained != groups["trained_groups"]:
        yield f"trained_groups is {groups['trained_groups']}, the ledger has {trained}"
    again = [entry["key"] for entry in groups["again"]]
    prompts = Counter((uid, epoch) for uid, epoch, _ in [*running, *again, *finished])
    if prompts.total() != len(prompts):
        yield f"prompt {prompts.most_common(1)[0][0][0]:.40} is there more than once"


def _wrong_groups(groups: GroupsState, settings: LoopSettings) -> Iterator[str]:
    """What has finished can be trained, and in time."""
    for entry in groups["finished"]:
        uid, result = entry["result"]["key"][0], entry["result"]
        if entry["try"]["key"] != result["key"]:
            yield f"the result of prompt {uid:.40} is that of another attempt"
        if len(result["trajectories"]) > settings.n:
            yield f"prompt {uid:.40} has {len(result['trajectories'])} trajectories, more than n = {settings.n}"
        versions = [[version for version, _ in trajectory["version_tokens"]] for trajectory in result["trajectories"]]
        if any(found != sorted(set(found)) or found[-1] > groups["version"] for found in versions):
            yield f"prompt {uid:.40} has tokens of versions that cannot be"
    if len(groups["finished"]) + len(groups["running"]) + groups["trained_groups"] > settings.total_groups:
        yield f"there are more groups than the {settings.total_groups} of the run"
    takes_left = min(settings.window_groups, settings.total_groups - groups["trained_groups"] + groups["taken_in_window"])
    takes_left -= groups["taken_in_window"]
    deadlines = Counter(entry["deadline"] for entry in groups["finished"])
    if settings.on_stale == "wait" and not takeable_in_time(deadlines, groups["version"], takes_left, settings.window_groups):
        yield "the deadlines of its finished groups cannot be kept"
