"""Checkpoints of the loop: its snapshot between an optimizer step and the next take, written beside training.

First the trainer's state is copied to the host, which stalls training. Then the workers report the tokens of
their running responses, the loop's state is frozen in one turn of the event loop, and a background task
writes it all. There is one write at a time: the next snapshot waits for it. If a response begins or ends
between a worker's report and the freeze, the loop's own state counts.

What can be derived is not written. Undamaged files may still hold a state that no loop has written, so a
resume refuses contradictions that could break it hours later.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from typing import Any, Final, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, RefusedError
from asyncrl_cli.base.safe_files import Count, parse_json
from asyncrl_cli.contracts.events import EvalSummary, StepRecord
from asyncrl_cli.contracts.ports import CheckpointWriter, Json, LoopSnapshot, PartialResult, RolloutWorker
from asyncrl_cli.contracts.prompt_group import PartialResponse, TrajectoryMeta
from asyncrl_cli.loop import group_states
from asyncrl_cli.loop.admission import takeable_in_time
from asyncrl_cli.loop.causes import lags
from asyncrl_cli.loop.governor import GovernorState
from asyncrl_cli.loop.group_states import GroupsState, RunningState
from asyncrl_cli.loop.ledger import Stage
from asyncrl_cli.loop.logical_order import LogicalAdmission
from asyncrl_cli.loop.run_state import ResumeFrom, RunState
from asyncrl_cli.measure.states import State
from asyncrl_cli.profile.arithmetic import LoopSettings, least_trajectories

SCHEMA_VERSION: Final = 2
"""Version 2 names prompts by uid and epoch; version 1 held the prompts' items, which do not survive JSON."""


class WindowState(TypedDict):
    """The current window: its version, and how many groups it has taken."""

    version: Count
    taken_groups: Count


class LoopState(TypedDict):
    schema_version: Literal[2]
    step: Count
    window: WindowState
    """It follows from the step, except in a run that was extended after a last window of fewer steps."""
    time_s: float
    groups: GroupsState
    governor: NotRequired[GovernorState]
    running_tokens: Count
    restarts: NotRequired[Count]
    last_eval_version: Count | None
    evals_ended: list[EvalSummary]
    observers: list[Json]


class Checkpointer:
    """Makes checkpoints of the loop."""

    def __init__(self, run: RunState, tasks: asyncio.TaskGroup, writer: CheckpointWriter | None) -> None:
        self._run = run
        self._tasks = tasks
        self._writer = writer
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, record: StepRecord | None = None) -> None:
        """Freeze a checkpoint and begin to write it, unless this step already has one. Nothing may be in
        training. `record`: of the step, if the observers do not have it yet."""
        run, progress, executors = self._run, self._run.progress, self._run.executors
        if self._writer is None or progress.snapshot_step == progress.step:
            return
        await self.finish()
        await self._until_current()
        data = run.groups.data
        with ExitStack() as kept:  # the data that is to be written, until it is
            with executors.calling_trainer(State.SYNCING, "a checkpoint's snapshot"):
                await executors.trainer.snapshot(progress.step)
                slots = run.admission.workers
                asked = [
                    one
                    for one in executors.workers
                    if slots[one.name].unfinished and not slots[one.name].down
                ]
                with run.changes.waiting("trainer (checkpoint)", "what running responses have so far"):
                    partial_results = await asyncio.gather(
                        *(self._partial_result(worker, kept) for worker in asked)
                    )
            snapshot = freeze(run, partial_results, record)
            kept.enter_context(data.pinned((*chain(*snapshot.payloads), *snapshot.partial_tokens)))
            progress.snapshot_step = progress.step
            writing = self._write(self._writer, snapshot, kept.pop_all())
            self._writing = self._tasks.create_task(writing, name=f"checkpoint {progress.step}")

    async def _until_current(self) -> None:
        """Deterministic runs: a resume has the weights of one version only, so no response may need an older
        one. (A stop does not wait: then a resume does not repeat the run.)"""
        run, admission = self._run, self._run.admission
        if not isinstance(admission, LogicalAdmission):
            return
        await run.changes.until(
            lambda: admission.needs_only_newest or run.failure.stopping,
            "trainer",  # the watchdog bounds this wait
            lambda: f"every response to need version {run.version}: {', '.join(lags(run))}",
        )
        if not admission.needs_only_newest:
            run.progress.warn(
                f"responses of older versions run at the checkpoint of step {run.progress.step}: only from "
                "the one before it is a resumed run the uninterrupted one, bit for bit"
            )

    async def _partial_result(self, worker: RolloutWorker, kept: ExitStack) -> PartialResult:
        """What the worker's running responses have so far; without an answer they start again after a
        resume."""
        run = self._run
        try:
            found = await worker.partial_responses()
            kept.enter_context(run.groups.data.lent(found.keys))
            return found
        except AsyncrlError as error:
            if run.failure.error is None:  # else the run already has its cause, perhaps this very error
                why = error.cause if isinstance(error, ExecutorFailed) else error
                run.progress.warn(
                    f"the running responses of {worker.name} are not in the checkpoint of step "
                    f"{run.progress.step}: {why}"
                )
            return PartialResult(rest_tokens=run.executors.reports.running_tokens(worker.name))

    async def finish(self) -> None:
        """Wait for the write in progress, if any; the port's own timeout bounds it."""
        if self._writing is not None:
            what = f"the checkpoint of step {self._run.progress.snapshot_step} to be written"
            with self._run.changes.waiting("trainer (checkpoint)", what):
                await self._writing

    async def _write(self, writer: CheckpointWriter, snapshot: LoopSnapshot, kept: ExitStack) -> None:
        with kept:
            path = await writer.write(snapshot)
        self._run.progress.checkpointed(snapshot.step, snapshot.version, path.name)


def freeze(
    run: RunState, partial_results: Sequence[PartialResult] = (), record: StepRecord | None = None
) -> LoopSnapshot:
    """The loop's state as JSON, and the keys of the data that belongs to it. Nothing may be in
    training."""
    ledger, taken_groups = run.groups.ledger, run.admission.taken_in_window
    assert not ledger.training, "a checkpoint lies between two train steps"
    # `record` has them: its line comes later, and the next run's first line must not have them again.
    evals_ended: list[Any] = [asdict(summary) for summary in run.evaluator.ended] if record is None else []
    groups = group_states.frozen(
        run.groups, {key: kept for found in partial_results for key, kept in found.responses.items()}
    )
    state: LoopState = {
        "schema_version": SCHEMA_VERSION,
        "step": run.progress.step,
        "window": {"version": run.version, "taken_groups": taken_groups},
        "time_s": run.progress.time_s,
        "groups": groups,
        "running_tokens": sum(found.rest_tokens for found in partial_results),
        "restarts": run.executors.num_restarts,
        "last_eval_version": run.evaluator.last_ended,
        "evals_ended": evals_ended,
        "observers": [observer.state(record) for observer in run.progress.observers],
    }
    if run.admission.governor is not None:
        state["governor"] = run.admission.governor.state()
    return LoopSnapshot(
        step=run.progress.step,
        version=run.version,
        at_window_boundary=taken_groups == 0,
        loop_state={**state},
        payloads=group_states.payloads(run.groups),
        partial_groups=group_states.partial_tokens(run.groups, groups["running"], partial_results),
    )


def thaw(run: RunState, resumed: ResumeFrom) -> None:
    """Restore what `freeze` saved. Raises RefusedError for a state that `freeze` cannot have saved under
    these settings."""
    state = read_state(resumed.loop_state, run.settings)
    run.progress.resume(state["step"], state["time_s"])
    run.executors.num_restarts = state.get("restarts", 0)
    run.evaluator.last_version, run.evaluator.ended = state["last_eval_version"], state["evals_ended"]
    for observer, observed in zip(run.progress.observers, state["observers"], strict=True):
        observer.restore(observed)
    run.admission.version = state["window"]["version"]
    run.admission.taken_in_window = state["window"]["taken_groups"]
    if run.admission.governor is not None:
        run.admission.governor.resume(run.version, state.get("governor"))
    run.progress.event("resumed", from_step=state["step"], from_time_s=state["time_s"])
    n, lost_tokens = run.settings.profile.rollout.n, state["running_tokens"]
    group_states.restore(run.groups, state["groups"], resumed.payloads, n, lost_tokens)
    if not resumed.continues:
        group_states.forget_unfinished(run.groups)
    for worker in run.admission.workers.values():
        worker.version = run.version - 1


def read_state(content: Json, settings: LoopSettings) -> LoopState:
    """Validate `content`. Raises RefusedError unless it is the state of a run with these settings."""
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
        raise RefusedError(
            f"the checkpoint's loop state is malformed: {wrong}", hint="take another checkpoint"
        )
    return state


def _contradictions(state: LoopState, settings: LoopSettings) -> Iterator[str]:
    """Contradictions to the settings or the step. A snapshot lies between two train steps, so trained groups
    follow from the step."""
    step, groups, schedule = state["step"], state["groups"], settings.schedule
    version, taken = state["window"]["version"], state["window"]["taken_groups"]
    if step > schedule.train_steps:
        yield f"step {step} of {schedule.train_steps}"
    steps_in_window, rest = divmod(taken, schedule.step_groups)
    is_whole = version <= step - steps_in_window <= version * schedule.window_steps
    if rest or taken >= schedule.window_groups or not is_whole or (taken and step == schedule.train_steps):
        yield f"step {step} is not in a window of version {version} with {taken} groups taken"
    if (state["last_eval_version"] or 0) > version:
        yield f"last_eval_version is {state['last_eval_version']}, but the version is {version}"
    trained = groups["ledger"]["ended"].get(Stage.TRAINED, 0)
    if trained != step * schedule.step_groups:
        yield f"{trained} groups are trained at step {step}, not {step * schedule.step_groups}"
    live, admitted = len(groups["finished"]) + len(groups["running"]), groups["ledger"]["admitted_total"]
    if admitted != (accounted := live + sum(groups["ledger"]["ended"].values())):
        yield f"admitted_total is {admitted}, but the stages add up to {accounted}"
    if live + trained > schedule.groups:
        yield f"there are more groups than the {schedule.groups} of the run"
    tries = [*groups["running"], *groups["again"], *(entry["try"] for entry in groups["finished"])]
    prompts = Counter(entry["key"][:2] for entry in tries)
    if prompts.total() != len(prompts):
        yield f"prompt {prompts.most_common(1)[0][0][0]:.40} occurs more than once"
    for running in groups["running"]:
        yield from _wrong_running(running, version, settings)
    least, most = least_trajectories(settings.profile), settings.profile.rollout.n
    if settings.profile.run.deterministic:  # groups are judged in order, after they have finished
        least = 0
    for entry in groups["finished"]:
        result = entry["result"]
        prompt, trajectories = f"prompt {result.key.uid:.40}", result.trajectories
        if entry["try"]["key"] != result.key:
            yield f"the result of {prompt} belongs to another attempt"
        if not least <= len(trajectories) <= most:
            yield f"{prompt} has {len(trajectories)} trajectories, not {least} to {most}"
        yield from _wrong_versions(prompt, trajectories, version)
    takes_left = min(schedule.window_groups, schedule.groups - trained + taken) - taken
    deadlines = Counter(entry["deadline"] for entry in (*groups["finished"], *groups["running"]))
    may_wait = settings.profile.async_training.on_stale == "wait"
    if may_wait and not takeable_in_time(deadlines, version, takes_left, schedule.window_groups):
        yield "the deadlines of its finished groups cannot be kept"


def _wrong_running(entry: RunningState, version: int, settings: LoopSettings) -> Iterator[str]:
    """What would keep a running group from continuing."""
    ended, kept = entry["ended"], entry["kept"]
    prompt = f"running prompt {entry['key'].uid:.40}"
    indices = [*chain.from_iterable(part["indices"] for part in ended), *kept]
    all_indices = set(range(settings.profile.rollout.n))
    has_all_ended = all_indices <= set(chain.from_iterable(part["indices"] for part in ended))
    if has_all_ended or len(set(indices)) != len(indices) or not set(indices) <= all_indices:
        yield f"{prompt} has the responses {indices}"
    numbers = [part["result"].key.number for part in ended]
    if any(part["result"].key.attempt != entry["key"] for part in ended) or sorted(set(numbers)) != numbers:
        yield f"{prompt} has parts of another attempt"
    if numbers and numbers[-1] >= entry["num_parts"]:
        yield f"{prompt} has {entry['num_parts']} parts, and one has the number {numbers[-1]}"
    yield from _wrong_versions(prompt, kept.values(), version)
    oldest = min([version, *(one.oldest for one in kept.values()), *(part["version"] for part in ended)])
    if entry["deadline"] > oldest + settings.schedule.max_staleness:
        yield f"the deadline of {prompt} is {entry['deadline']}, with tokens of version {oldest}"


def _wrong_versions(
    prompt: str, sampled: Iterable[PartialResponse | TrajectoryMeta], version: int
) -> Iterator[str]:
    versions = [[version for version, _ in one.version_tokens] for one in sampled]
    if any(one != sorted(set(one)) or one[-1] > version for one in versions):
        yield f"{prompt} has tokens of impossible versions"
