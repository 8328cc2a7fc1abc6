"""The loop's state in a checkpoint: its types, and what contradicts itself.

`freeze` (loop/cuts.py) writes it, `read_state` reads it back. What follows from the rest is not written. A checkpoint can be whole
and still not be what a loop has written: whatever could break a run hours later is refused here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.loop.admission import takeable_in_time
from asyncrl_cli.loop.attempts import AttemptKey, GroupResult, LedgerState, Stage
from asyncrl_cli.loop.settings import LoopSettings
from asyncrl_cli.loop.watching import EvalSummary
from asyncrl_cli.safe_files import Count, parse_json

SCHEMA_VERSION: Final = 2
"""2 names prompts by uid and epoch; 1 held their items, which do not survive JSON."""


class TryState(TypedDict):
    key: AttemptKey
    requeues: Count


FinishedState = TypedDict("FinishedState", {"deadline": Count, "try": TryState, "result": GroupResult})


class GroupsState(TypedDict):
    """`trajectories`: all, and the failed ones."""

    tokens_discarded: Count
    tokens_trained: Count
    trajectories: tuple[Count, Count]
    ledger: LedgerState
    feed: dict[str, Any]
    running: list[TryState]
    again: list[TryState]
    finished: list[FinishedState]


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
        wrong = next(_contradictions(state, settings), None)
    except ValueError as error:
        wrong = str(error)
    if wrong is not None:
        raise RefusedError(f"the checkpoint's loop state is malformed: {wrong}", hint="take another checkpoint")
    return state


def _contradictions(state: LoopState, settings: LoopSettings) -> Iterator[str]:
    """A cut lies between two train steps: version, window and trained groups follow from the step."""
    step, groups, schedule = state["step"], state["groups"], settings.schedule
    version, taken = settings.window_after(step)
    if step > schedule.train_steps:
        yield f"step {step} of {schedule.train_steps}"
    if (state["last_eval_version"] or 0) > version:
        yield f"last_eval_version is {state['last_eval_version']}, of version {version}"
    trained = groups["ledger"]["ended"].get(Stage.TRAINED, 0)
    if trained != step * schedule.step_groups:
        yield f"{trained} groups are trained at step {step}, not {step * schedule.step_groups}"
    if len(groups["finished"]) + len(groups["running"]) + trained > schedule.groups:
        yield f"there are more groups than the {schedule.groups} of the run"
    yield from _wrong_prompts(groups)
    for entry in groups["finished"]:
        yield from _wrong_group(entry, version, settings.profile.rollout.n)
    takes_left = min(schedule.window_groups, schedule.groups - trained + taken) - taken
    deadlines = Counter(entry["deadline"] for entry in groups["finished"])
    may_wait = settings.profile.async_training.on_stale == "wait"
    if may_wait and not takeable_in_time(deadlines, version, takes_left, schedule.window_groups):
        yield "the deadlines of its finished groups cannot be kept"


def _wrong_prompts(groups: GroupsState) -> Iterator[str]:
    """Every prompt is there once."""
    tries = [*groups["running"], *groups["again"], *(entry["try"] for entry in groups["finished"])]
    prompts = Counter(entry["key"][:2] for entry in tries)
    if prompts.total() != len(prompts):
        yield f"prompt {prompts.most_common(1)[0][0][0]:.40} is there more than once"


def _wrong_group(entry: FinishedState, version: int, n: int) -> Iterator[str]:
    """What has finished can be trained."""
    result = entry["result"]
    prompt, trajectories = f"prompt {result.key.uid:.40}", result.trajectories
    if entry["try"]["key"] != result.key:
        yield f"the result of {prompt} is that of another attempt"
    if not 2 <= len(trajectories) <= n:
        yield f"{prompt} has {len(trajectories)} trajectories, not 2 to {n}"
    sampled = [[version for version, _ in meta.version_tokens] for meta in trajectories]
    if any(versions != sorted(set(versions)) or versions[-1] > version for versions in sampled):
        yield f"{prompt} has tokens of versions that cannot be"
