"""The loop of a run, put together and run to its end. Stops and failures become its result; only a cancellation from outside does
not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.checkpoint.sealed import Checkpoint, LoopStateFile, sealed_checkpoints, step_of
from asyncrl_cli.checkpoint.store import CheckpointStore
from asyncrl_cli.errors import AsyncrlError, ExecutorFailed, Interrupted, SessionLost, StorageError
from asyncrl_cli.job.feed import PromptFeed
from asyncrl_cli.job.process import StopRequests, leave, tell
from asyncrl_cli.loop.board import ResumeFrom, World
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.ports import Cut, Trainer
from asyncrl_cli.observe.live_status import RunFacts
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.screen import make_ui
from asyncrl_cli.observe.sinks import EventsFile, MetricsFile, Sink, StatusFile, TimelineFile
from asyncrl_cli.observe.wandb_sink import Wandb
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.storage import storage_error, telling_storage
from asyncrl_cli.tasks.task import Task
from asyncrl_cli.weights.versions import all_loads_s

if TYPE_CHECKING:
    from asyncrl_cli.job.adapters import RayTrainer  # it needs Ray

log = logging.getLogger("asyncrl")

Crew = tuple[Any, Sequence[Any], Sequence[Any]]
"""The trainer, the rollout workers, and the payloads of the finished groups in the checkpoint that a run goes on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. `summary` is the last status (what status.json holds); `error` the failure, if it failed."""

    run_dir: Path
    exit_code: int
    summary: Mapping[str, Any]
    error: AsyncrlError | None = None


class RunCheckpoints:
    """Implements `loop.ports.CheckpointWriter`: the store's directory, the trainer's part written by the trainer."""

    def __init__(self, store: CheckpointStore, trainer: Trainer) -> None:
        self._store = store
        self._trainer = trainer

    async def write(self, cut: Cut) -> Path:
        def write_trainer(directory: Path) -> Awaitable[Any]:
            return self._trainer.write(cut.step, directory, cut.payloads, not cut.at_window_boundary)

        state: LoopStateFile = {
            "schema_version": 1,
            "step": cut.step,
            "version": cut.version,
            "at_window_boundary": cut.at_window_boundary,
            "loop_state": {**cut.loop_state},
        }
        try:
            with telling_storage():
                return await self._store.write(state, write_trainer)
        except StorageError as error:
            raise StorageError(f"the checkpoint of step {cut.step} cannot be written: {error.message}", hint=error.hint) from error


def make_pipeline(
    profile: Profile, directory: RunDirectory, task: Task, crew: Crew, observers: Observers, checkpoint: Checkpoint | None
) -> Pipeline:
    """`checkpoint`: where a resumed run goes on."""
    trainer, workers, payloads = crew
    store = CheckpointStore(directory.path, keep=profile.checkpoint.keep, profile=profile.name)
    if checkpoint is not None:
        store.abandon_newer(checkpoint.step)
    world = World(
        feed=PromptFeed(task.train, seed=profile.run.seed),
        trainer=trainer,
        workers=workers,
        eval_items=task.eval,
        observers=[observers],
        checkpoints=RunCheckpoints(store, trainer),
        resume_from=checkpoint and ResumeFrom(loop_state=checkpoint.loop_state, payloads=payloads),
    )
    return Pipeline(LoopSettings.of(profile, all_loads_s(profile.weights, len(workers))), world)


def make_observers(profile: Profile, directory: RunDirectory, ui: str) -> Observers:
    """Files, Weights & Biases, and the screen, if there is one."""
    sinks: list[Sink] = [
        MetricsFile(directory.metrics),
        EventsFile(directory.events),
        TimelineFile(directory.timeline),
        StatusFile(directory.status),
    ]
    if profile.logging.wandb != "disabled":
        config = profile.model_dump(mode="json")
        mode, project = profile.logging.wandb, profile.logging.wandb_project
        sinks.append(Wandb(directory.path, mode=mode, project=project, name=directory.name, config=config))
    if (screen := make_ui(ui)) is not None:
        sinks.append(screen)
    return Observers(RunFacts.of(profile, directory.path, directory.attempts), sinks)


async def run_to_the_end(
    pipeline: Pipeline, trainer: RayTrainer, directory: RunDirectory, observers: Observers, requests: StopRequests
) -> RunResult:
    """Run the loop; a stop ends it in order, a second one cancels it. Cancelled from outside, it raises CancelledError."""
    this = asyncio.current_task()
    assert this is not None
    running = asyncio.ensure_future(_loop_and_last_dump(pipeline, trainer))
    in_loop = asyncio.get_running_loop().call_soon_threadsafe
    requests.mean(partial(in_loop, pipeline.request_stop), partial(in_loop, running.cancel), _out)
    error: AsyncrlError | None = None
    try:
        await running
    except asyncio.CancelledError:
        if this.cancelling():  # from outside: this task itself, and not only the loop that it waits for
            observers.close("stopped")
            raise
        error = Interrupted("aborted: the step in progress is lost", hint=f"asyncrl resume {directory.name}")
    except Exception as failure:
        log.error("the run ended early", exc_info=failure)
        error = _as_ours(failure, directory)
    finally:
        requests.mean(lambda: None)
    phase = "done" if error is None else "stopped" if isinstance(error, Interrupted) else "failed"
    summary = observers.close(phase, str(error) if phase == "failed" else "")
    exit_code = 0 if error is None else error.exit_code
    return RunResult(run_dir=directory.path, exit_code=exit_code, summary=summary, error=error)


async def _loop_and_last_dump(pipeline: Pipeline, trainer: RayTrainer) -> None:
    """The last dump of samples is waited for, also by a run that was stopped in order."""
    try:
        await pipeline.run()
    except Interrupted:
        await trainer.finish_dumps()
        raise
    await trainer.finish_dumps()


def _out() -> None:
    tell("out at once: checkpoints that are whole stay, what the run has started is ended by its reaper")
    leave()


def _as_ours(failure: Exception, directory: RunDirectory) -> AsyncrlError:
    """The failure in words for people, with what to do next."""
    name = directory.name
    if isinstance(failure, OSError):
        return storage_error(failure)
    if not isinstance(failure, AsyncrlError):
        what = f"asyncrl itself failed: {type(failure).__name__}: {failure}"
        return AsyncrlError(what, hint="the traceback is in the log")
    if isinstance(failure, SessionLost):
        step = next(map(step_of, sealed_checkpoints(directory.checkpoints)), None)
        failure.hint = f"`asyncrl resume {name}` continues from " + ("its start" if step is None else f"step {step}")
    elif isinstance(failure, Interrupted):
        failure.hint = failure.hint or f"asyncrl resume {name}"
    elif isinstance(failure, ExecutorFailed):
        goes_on = f"`asyncrl resume {name}` goes on from the last checkpoint"
        failure.hint = failure.hint or f"`asyncrl logs {name}` tells more, {goes_on}"
    return failure
