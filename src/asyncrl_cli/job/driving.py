"""Builds the loop of a run from its prompts, checkpoints and observers, and runs it to its end.

A stop or a failure becomes part of the `RunResult`; only a cancellation from outside is raised."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from asyncrl_cli.base.errors import (
    AsyncrlError,
    ConfigError,
    ExecutorFailed,
    Interrupted,
    RefusedError,
    SessionLost,
)
from asyncrl_cli.base.paths import as_typed
from asyncrl_cli.base.storage import storage_error
from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.checkpoint.sealed import Checkpoint, sealed_checkpoints, step_of
from asyncrl_cli.checkpoint.store import CheckpointStore
from asyncrl_cli.contracts.item import Item, fingerprint
from asyncrl_cli.contracts.prompt_group import Prompt
from asyncrl_cli.engines.port import continues_kept
from asyncrl_cli.envs.call_log import RepeatedCalls
from asyncrl_cli.job.process import StopRequests, leave, tell
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import ResumeFrom, World
from asyncrl_cli.observe.file_sinks import EventsFile, MetricsFile, StatusFile, TimelineFile
from asyncrl_cli.observe.live_status import facts_of
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.screen import make_ui
from asyncrl_cli.observe.sinks import Sink, make_sinks
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.task import Task
from asyncrl_cli.weights.versions import all_loads_s

if TYPE_CHECKING:
    from asyncrl_cli.job.ray_ports import RayTrainer  # it needs Ray

log = logging.getLogger("asyncrl")

ANOTHER_CHECKPOINT = "take another checkpoint"
SAME_DATA = (
    "resume with the run's original data: task.source's file as it was then, or the same version of "
    "reasoning-gym"
)
SAME_EVALS = (
    "later evals could not be compared with earlier ones: restore the files of task.eval_path and "
    "eval.sets as they were"
)

Crew = tuple[Any, Sequence[Any], Sequence[Any], Sequence[Any]]
"""The trainer, the rollout workers, for a resumed run the payloads of the checkpoint's groups, and the
scorers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. `summary` is the last status (what status.json holds); `error` is the failure, if it
    failed."""

    run_dir: Path
    exit_code: int
    summary: Mapping[str, Any]
    error: AsyncrlError | None = None


class PromptFeed:
    """Implements `contracts.ports.Feed` on a task's training items: shuffled per epoch, endless, resumable at any
    point.

    An epoch's order is a function of (seed, epoch) alone, so the state is a position, not a history:
    `{"seed", "epoch", "cursor", "num_items", "fingerprint", "evals"}`. The uids consumed so far are the first
    `cursor` of that order and all items of every earlier epoch. The loop does not stop between epochs: the
    next prompt is one of the next epoch.

    `eval_sets`: the feed does not give these items. Their fingerprints (`evals`) tell a resumed run whether
    they have changed.
    """

    def __init__(
        self, items: Sequence[Item], *, seed: int, eval_sets: Mapping[str, Sequence[Item]] | None = None
    ) -> None:
        if not items:
            raise ValueError("a feed needs at least one item")
        self._items = tuple(items)
        self._index_of = {item["uid"]: index for index, item in enumerate(self._items)}
        if len(self._index_of) != len(self._items):
            raise ValueError(f"{len(self._items)} items have only {len(self._index_of)} different uids")
        self._fingerprint = fingerprint(self._items)
        self._evals = {name: fingerprint(evals) for name, evals in (eval_sets or {}).items()}
        self._seed = seed
        self._enter(epoch=0, cursor=0)

    def next(self) -> Prompt:
        if self._cursor == len(self._items):
            self._enter(epoch=self._epoch + 1, cursor=0)
        item = self._items[self._order[self._cursor]]
        self._cursor += 1
        return Prompt(uid=item["uid"], epoch=self._epoch, item=item)

    def find(self, uid: str, epoch: int) -> Prompt:
        index = self._index_of.get(uid)
        if index is None:
            raise RefusedError(
                f"the checkpoint names prompt {uid}, which is not among the {len(self._items)} of the task",
                hint=SAME_DATA,
            )
        if epoch > self._epoch or (epoch == self._epoch and self._order.index(index) >= self._cursor):
            raise RefusedError(
                f"the checkpoint names prompt {uid} of epoch {epoch}, which the feed never reached",
                hint=SAME_DATA,
            )
        return Prompt(uid=uid, epoch=epoch, item=self._items[index])

    def state(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "num_items": len(self._items),
            "fingerprint": self._fingerprint,
            "evals": self._evals,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises RefusedError if `state` is damaged or belongs to other items or another seed."""
        for key, kind in {
            "seed": int,
            "epoch": int,
            "cursor": int,
            "num_items": int,
            "fingerprint": str,
        }.items():
            if type(state.get(key)) is not kind:
                raise RefusedError(
                    f"the prompt feed's state is damaged: {key} is {state.get(key)!r:.80}",
                    hint=ANOTHER_CHECKPOINT,
                )
        if state["fingerprint"] != self._fingerprint:
            raise RefusedError(
                f"the checkpoint was made with other prompts: {state['num_items']} items with fingerprint "
                f"{state['fingerprint'][:8]}, now {len(self._items)} with {self._fingerprint[:8]}",
                hint=SAME_DATA,
            )
        self._compare_evals(state.get("evals"))
        if state["seed"] != self._seed:
            raise RefusedError(
                f"the checkpoint's prompts were shuffled with seed {state['seed']}, now {self._seed}",
                hint=f"resume with run.seed = {state['seed']}",
            )
        epoch, cursor = state["epoch"], state["cursor"]
        if epoch < 0 or not 0 <= cursor <= len(self._items):
            where = f"epoch {epoch}, cursor {cursor} of {len(self._items)} items"
            raise RefusedError(f"the prompt feed's state is damaged: {where}", hint=ANOTHER_CHECKPOINT)
        self._enter(epoch=epoch, cursor=cursor)

    def _compare_evals(self, before: Any) -> None:
        if before is None:  # older checkpoints have no fingerprints of evals
            return
        if not isinstance(before, Mapping):
            raise RefusedError(
                f"the prompt feed's state is damaged: evals is {before!r:.80}", hint=ANOTHER_CHECKPOINT
            )
        changed = [name for name in before | self._evals if before.get(name) != self._evals.get(name)]
        if changed:
            names = ", ".join(f"eval.sets.{name:.80}" if name else "the eval prompts" for name in changed)
            raise RefusedError(
                f"the checkpoint was made with other items for evals: {names} changed", hint=SAME_EVALS
            )

    def _enter(self, *, epoch: int, cursor: int) -> None:
        # Sorting by Random.random() and not Random.shuffle: only random() is promised to stay the same in
        # every Python.
        rng = Random(f"prompts {self._seed} {epoch}")
        keys = [rng.random() for _ in self._items]
        self._order = sorted(range(len(self._items)), key=keys.__getitem__)
        self._epoch, self._cursor = epoch, cursor


def make_pipeline(
    profile: Profile,
    directory: RunDirectory,
    task: Task,
    crew: Crew,
    observers: Observers,
    checkpoint: Checkpoint | None,
) -> Pipeline:
    """The loop and everything it works with. `checkpoint`: where a resumed run continues."""
    trainer, workers, payloads, scorers = crew

    keep = profile.checkpoint.keep
    store = CheckpointStore(directory.path, keep=keep, profile=profile.name, write_trainer=trainer.write)
    if checkpoint is not None:
        store.abandon_newer(checkpoint.step, checkpoint.version)
    eval_sets = {"": task.eval, **task.eval_sets}
    continues = continues_kept(profile)
    world = World(
        feed=PromptFeed(task.train, seed=profile.run.seed, eval_sets=eval_sets),
        trainer=trainer,
        workers=workers,
        scorers=scorers,
        eval_sets=eval_sets,
        observers=[observers],
        checkpoints=store,
        resume_from=checkpoint
        and ResumeFrom(loop_state=checkpoint.loop_state, payloads=payloads, continues=continues),
    )
    pipeline = Pipeline(LoopSettings.of(profile, all_loads_s(profile.weights, len(workers))), world)
    if checkpoint is not None:
        try:
            observers.live.recall(list(Recorded(directory.path).events("eval")))
        except ConfigError as error:
            observers.warning(f"the screen shows no evals from after the checkpoint: {error}")
    return pipeline


def make_observers(profile: Profile, directory: RunDirectory, ui: str) -> Observers:
    """The run's files, the sinks of `[logging]`, and the screen if it is wanted."""
    sinks: list[Sink] = [
        MetricsFile(directory.metrics),
        EventsFile(directory.events),
        TimelineFile(directory.timeline),
        StatusFile(directory.status),
    ]
    sinks += make_sinks(profile, directory.path)
    if (screen := make_ui(ui)) is not None:
        sinks.append(screen)
    facts = facts_of(profile, directory.path, directory.attempts)
    return Observers(facts, sinks, further=RepeatedCalls(directory.logs))


async def run_to_the_end(
    pipeline: Pipeline,
    trainer: RayTrainer,
    directory: RunDirectory,
    observers: Observers,
    requests: StopRequests,
) -> RunResult:
    """Run the loop. The first stop request ends it in an orderly way, the second cancels it. Raises
    CancelledError if the caller's task is cancelled."""
    this = asyncio.current_task()
    assert this is not None
    running = asyncio.ensure_future(_loop_and_last_dump(pipeline, trainer))
    in_loop = asyncio.get_running_loop().call_soon_threadsafe

    def stop() -> None:
        pipeline.request_stop()
        if not running.done():  # the observers are closed next
            observers.warning(f"stopping after this train step; {requests.again} ends the run at once")

    requests.mean(partial(in_loop, stop), partial(in_loop, running.cancel), _out)
    error: AsyncrlError | None = None
    try:
        await running
    except asyncio.CancelledError:
        if this.cancelling():  # this task itself was cancelled, and not only the loop
            observers.close("stopped")
            raise
        error = Interrupted(
            "aborted: the step in progress is lost", hint=f"asyncrl resume {as_typed(directory.path)}"
        )
    except Exception as failure:
        error = _as_ours(failure, directory)
        if isinstance(error, Interrupted):
            log.info("%s", error)
        else:
            log.error("%s", error, exc_info=failure)
    finally:
        requests.mean(lambda: None)
    phase = "done" if error is None else "stopped" if isinstance(error, Interrupted) else "failed"
    summary = observers.close(phase, str(error) if phase == "failed" else "")
    return RunResult(
        run_dir=directory.path,
        exit_code=0 if error is None else error.exit_code,
        summary=summary,
        error=error,
    )


async def _loop_and_last_dump(pipeline: Pipeline, trainer: RayTrainer) -> None:
    """Run the loop, then wait for the last dump of samples, also after an orderly stop."""
    try:
        await pipeline.run()
    except Interrupted:
        await trainer.finish_dumps()
        raise
    await trainer.finish_dumps()


def _out() -> None:
    tell("ended at once: finished checkpoints are kept; the reaper ends this run's processes")
    leave()


def _as_ours(failure: Exception, directory: RunDirectory) -> AsyncrlError:
    """The failure as an error for the user, with a hint about what to do next."""
    run = as_typed(directory.path)
    if isinstance(failure, OSError):
        return storage_error(failure)
    if not isinstance(failure, AsyncrlError):
        what = f"asyncrl itself failed: {type(failure).__name__}: {failure}"
        return AsyncrlError(what, hint="the traceback is in the log")
    if isinstance(failure, SessionLost):
        step = next(map(step_of, sealed_checkpoints(directory.checkpoints)), None)
        failure.hint = (f"`asyncrl resume {run}` continues from ") + (
            "its start" if step is None else f"step {step}"
        )
    elif isinstance(failure, Interrupted):
        failure.hint = failure.hint or f"asyncrl resume {run}"
    elif isinstance(failure, ExecutorFailed):
        told = f"`asyncrl logs {run}` shows more, `asyncrl resume {run}` continues from the last checkpoint"
        failure.hint = failure.hint or told
    return failure
