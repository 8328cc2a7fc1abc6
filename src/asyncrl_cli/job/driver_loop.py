"""The loop of a run: built from its prompts, checkpoints and observers, and run to its end. Runs in the
driver.

A stop or a failure becomes part of the `RunResult`; only a cancellation from outside is raised."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl_cli.base.errors import (
    AsyncrlError,
    ConfigError,
    ExecutorFailed,
    Interrupted,
    SessionLost,
    StallError,
)
from asyncrl_cli.base.paths import as_typed
from asyncrl_cli.base.storage import storage_error
from asyncrl_cli.checkpoint.lookup import go_on
from asyncrl_cli.checkpoint.reader import Checkpoint, sealed_checkpoints, step_of
from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.checkpoint.writer import CheckpointStore
from asyncrl_cli.contracts.ports import Json
from asyncrl_cli.contracts.prompt_group import DataKey
from asyncrl_cli.engines.port import can_continue_responses
from asyncrl_cli.job.driver_process import END_S, StopRequests, leave
from asyncrl_cli.job.driver_prompts import PromptFeed
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import ResumeFrom, World
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.task import Task
from asyncrl_cli.weights.versions import all_loads_s

if TYPE_CHECKING:
    from asyncrl_cli.data.store import Store
    from asyncrl_cli.job.driver_crew import Crew  # they need Ray
    from asyncrl_cli.job.driver_ranks import RayTrainer

log = logging.getLogger("asyncrl")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. `summary` is the last status (what status.json holds); `error` is the failure, if it
    failed."""

    run_dir: Path
    exit_code: int
    summary: Json
    error: AsyncrlError | None = None


def make_pipeline(
    profile: Profile,
    directory: RunDirectory,
    task: Task,
    crew: Crew,
    observers: Observers,
    checkpoint: Checkpoint | None,
) -> Pipeline:
    """The loop and everything it works with. `checkpoint`: where a resumed run continues."""
    keep, write = profile.checkpoint.keep, crew.trainer.write
    store = CheckpointStore(directory.path, keep=keep, profile=profile.name, write_trainer=write)
    resume_from = None
    if checkpoint is not None:
        store.abandon_newer(checkpoint.step, checkpoint.version)
        state, continues = checkpoint.loop_state, can_continue_responses(profile)
        resume_from = ResumeFrom(loop_state=state, payloads=crew.payloads, continues=continues)
    eval_sets = {"": task.eval, **task.eval_sets}
    world = World(
        feed=PromptFeed(
            task.train,
            seed=profile.run.seed,
            eval_sets=eval_sets,
            curriculum=profile.task.curriculum,
            num_overlong=task.num_overlong,
        ),
        trainer=crew.trainer,
        workers=crew.workers,
        lent=[worker.name for worker in crew.workers if worker.is_lent],
        scorers=crew.scorers,
        eval_sets=eval_sets,
        observers=[observers],
        checkpoints=store,
        data=DriverData(crew.store),
        resume_from=resume_from,
    )
    pipeline = Pipeline(LoopSettings.of(profile, all_loads_s(profile.weights, len(crew.workers))), world)
    if checkpoint is not None:
        try:
            observers.live.recall(list(Recorded(directory.path).events("eval", "warning")))
        except ConfigError as error:
            observers.warning(
                f"the screen lacks earlier warnings, and evals from after the checkpoint: {error}"
            )
    return pipeline


class DriverData:
    """`DataStore` of contracts/ports.py on the driver's end of the store."""

    def __init__(self, store: Store) -> None:
        self.clear, self.pinned, self.stats = store.clear, store.pinned, store.stats
        self._store = store

    async def keys(self) -> list[DataKey]:
        return await asyncio.to_thread(self._store.keys)


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

    async def loop_and_last_dump() -> None:
        try:
            await pipeline.run()
        except Interrupted:  # an orderly stop: the last samples are being written
            await trainer.finish_dumps()
            raise
        await trainer.finish_dumps()

    running = asyncio.ensure_future(loop_and_last_dump())
    in_loop = asyncio.get_running_loop().call_soon_threadsafe

    def stop() -> None:
        pipeline.request_stop()
        if not running.done():  # the observers are closed next
            limit = f"within {pipeline.state.grace_s:.0f} s"
            observers.remark(
                f"stopping after this train step, {limit}; {requests.again} ends the run at once"
            )

    requests.allow(lambda: pipeline.state.grace_s + END_S)
    why = "ended at once: finished checkpoints are kept; the reaper ends this run's processes"
    requests.set_actions(partial(in_loop, stop), partial(in_loop, running.cancel), partial(leave, why=why))
    error: AsyncrlError | None = None
    try:
        await running
    except asyncio.CancelledError:
        if this.cancelling():  # this task itself was cancelled, and not only the loop
            observers.close("stopped")
            raise
        error = Interrupted(f"aborted: {_lost(pipeline, directory)}", hint=go_on(directory.path))
    except Exception as failure:
        error = _as_asyncrl_error(failure, directory)
        if isinstance(failure, StallError):
            error.hint = f"{_lost(pipeline, directory)}; {go_on(directory.path)}; {error.hint}"
        if isinstance(error, Interrupted):
            log.info("%s", error)
        else:
            log.error("%s", error, exc_info=failure)
    finally:
        requests.set_actions(lambda: None)
    phase = "done" if error is None else "stopped" if isinstance(error, Interrupted) else "failed"
    summary = observers.close(phase, str(error) if phase == "failed" else "")
    exit_code = 0 if error is None else error.exit_code
    return RunResult(run_dir=directory.path, exit_code=exit_code, summary=summary, error=error)


def _lost(pipeline: Pipeline, directory: RunDirectory) -> str:
    """Which steps are lost, and would be trained again."""
    step = pipeline.state.progress.step
    saved = next(map(step_of, sealed_checkpoints(directory.checkpoints)), None)
    if saved is None:
        return "there is no checkpoint yet"
    if step <= saved:
        return "the step in progress is lost"
    steps = f"step {step} was" if step == saved + 1 else f"steps {saved + 1} to {step} were"
    return f"{steps} not in a checkpoint"


def _as_asyncrl_error(failure: Exception, directory: RunDirectory) -> AsyncrlError:
    """The failure as an error for the user, with a hint about what to do next."""
    if isinstance(failure, OSError):
        return storage_error(failure)
    if not isinstance(failure, AsyncrlError):
        what = f"asyncrl itself failed: {type(failure).__name__}: {failure}"
        return AsyncrlError(what, hint="the traceback is in the log")
    if isinstance(failure, SessionLost):
        failure.hint = go_on(directory.path)
    elif isinstance(failure, Interrupted):
        failure.hint = failure.hint or go_on(directory.path)
    elif isinstance(failure, ExecutorFailed):
        more = f"`asyncrl logs {as_typed(directory.path)}` shows more"
        failure.hint = failure.hint or f"{more}, {go_on(directory.path)}"
    return failure
