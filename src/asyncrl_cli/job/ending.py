"""A run from its first step to its end: stops and failures become its result, only an outside cancellation does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.checkpoint.find import checkpoints_in, is_sealed, step_of
from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.errors import AsyncrlError, ExecutorFailed, Interrupted, SessionLost
from asyncrl_cli.job.stopping import StopRequests, leave, tell
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.storage import storage_error

if TYPE_CHECKING:
    from asyncrl_cli.job.ports import RayTrainer  # it needs Ray

log = logging.getLogger("asyncrl")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. `summary` is the last status (what status.json holds); `error` the failure, if it failed."""

    run_dir: Path
    exit_code: int
    summary: Mapping[str, Any]
    error: AsyncrlError | None = None


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
            running.cancel()
            observers.close("stopped")
            raise
        error = Interrupted("aborted: the step in progress is lost", hint=f"asyncrl resume {directory.name}")
    except Exception as failure:
        log.error("the run ended early", exc_info=failure)
        error = _as_ours(failure, directory)
    finally:
        requests.mean(lambda: None, lambda: None)
    phase = "done" if error is None else "stopped" if isinstance(error, Interrupted) else "failed"
    summary = observers.close(phase, "" if phase != "failed" else str(error))
    exit_code = 0 if error is None else error.exit_code
    return RunResult(run_dir=directory.path, exit_code=exit_code, summary=summary, error=error)


async def _loop_and_last_dump(pipeline: Pipeline, trainer: RayTrainer) -> None:
    """The last dump of samples is waited for, also by a run that was stopped in order."""
    try:
        await pipeline.run()
    except Interrupted:
        await trainer.dumps.finish()
        raise
    await trainer.dumps.finish()


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
        step = next((step_of(path) for path in checkpoints_in(directory.checkpoints) if is_sealed(path)), None)
        failure.hint = f"`asyncrl resume {name}` continues from " + ("its start" if step is None else f"step {step}")
    elif isinstance(failure, Interrupted):
        failure.hint = failure.hint or f"asyncrl resume {name}"
    elif isinstance(failure, ExecutorFailed):
        goes_on = f"`asyncrl resume {name}` goes on from the last checkpoint"
        failure.hint = failure.hint or f"`asyncrl logs {name}` tells more, {goes_on}"
    return failure
