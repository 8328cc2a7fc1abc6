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
from asyncrl_cli.loop.attempts import Stage
from asyncrl_cli.loop.groups import GroupsState
from asyncrl_cli.loop.settings import LoopSettings
from asyncrl_cli.loop.watching import EvalSummary
from asyncrl_cli.safe_files import Count, parse_json

SCHEMA_VERSION: Final = 2
"""2: prompts by uid and epoch; 1 held their items, which JSON changes."""


class LoopState(TypedDict):
    schema_version: Literal[2]
    step: Count
    time_s: float
    groups: GroupsState
    running_tokens: Count
    restarts: NotRequired[Count]
    last_eval_version: Count | None
    evals_ended: list[EvalSummary]
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
        "version": -(-step // settings.schedule.window_steps) if is_boundary else step // settings.schedule.window_steps,
        "taken_in_window": 0 if is_boundary else step % settings.schedule.window_steps * settings.schedule.step_groups,
        "trained_groups": step * settings.schedule.step_groups,
    }
    if step > settings.schedule.train_steps:
        yield f"step {step} of {settings.schedule.train_steps}"
    found = {name: amount for name, amount in groups.items() if name in expected}
    yield from (f"{name} is {found[name]} at step {step}, not {value}" for name, value in expected.items() if found[name] != value)
    if (state["last_eval_version"] or 0) > groups["version"]:
        yield f"last_eval_version is {state['last_eval_version']}, of version {groups['version']}"


def _wrong_accounts(groups: GroupsState) -> Iterator[str]:
    """The ledger's live attempts are those that run or have finished, each once."""
    ledger, trained = groups["ledger"], groups["ledger"]["ended"].get(Stage.TRAINED, 0)
    live = {(uid, epoch, attempt): account for uid, epoch, attempt, account in ledger["live"]}
    running = [entry["key"] for entry in groups["running"]]
    finished = [entry["result"]["key"] for entry in groups["finished"]]
    expected = dict.fromkeys(running, Stage.RUNNING) | dict.fromkeys(finished, Stage.FINISHED)
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
        if len(result["trajectories"]) > settings.profile.rollout.n:
            yield f"prompt {uid:.40} has {len(result['trajectories'])} trajectories, more than n = {settings.profile.rollout.n}"
        versions = [[version for version, _ in meta.version_tokens] for meta in result["trajectories"]]
        if any(found != sorted(set(found)) or found[-1] > groups["version"] for found in versions):
            yield f"prompt {uid:.40} has tokens of versions that cannot be"
    schedule, trained, taken = settings.schedule, groups["trained_groups"], groups["taken_in_window"]
    if len(groups["finished"]) + len(groups["running"]) + trained > schedule.groups:
        yield f"there are more groups than the {schedule.groups} of the run"
    takes_left = min(schedule.window_groups, schedule.groups - trained + taken) - taken
    deadlines = Counter(entry["deadline"] for entry in groups["finished"])
    may_wait = settings.profile.async_training.on_stale == "wait"
    if may_wait and not takeable_in_time(deadlines, groups["version"], takes_left, schedule.window_groups):
        yield "the deadlines of its finished groups cannot be kept"
