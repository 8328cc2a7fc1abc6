"""A run from its first step to its end: stops and failures become its result, only an outside cancellation does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.checkpoint.files import storage_error
from asyncrl_cli.errors import AsyncrlError, ExecutorFailed, Interrupted, SessionLost
from asyncrl_cli.job.stopping import StopRequests, leave, tell

if TYPE_CHECKING:
    from asyncrl_cli.checkpoint.run_directory import RunDirectory
    from asyncrl_cli.job.ports import RayTrainer
    from asyncrl_cli.loop.pipeline import Pipeline
    from asyncrl_cli.observe.observers import Observers

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
    running = asyncio.ensure_future(_loop_and_last_dump(pipeline, trainer))
    in_loop = asyncio.get_running_loop().call_soon_threadsafe
    requests.mean(partial(in_loop, pipeline.request_stop), partial(in_loop, running.cancel), _out)
    error: AsyncrlError | None = None
    try:
        await running
    except asyncio.CancelledError:
        if _cancelled_from_outside():
            running.cancel()
            observers.close("stopped")
            raise
        error = Interrupted("aborted: the step in progress is lost", hint=f"asyncrl resume {directory.name}")
    except AsyncrlError as failure:
        error = failure
        if isinstance(error, SessionLost):
            error.hint = _after_lost_session(directory)
        error.hint = error.hint or _what_next(failure, directory.name)
        log.error("the run ended early", exc_info=failure)
    except OSError as failure:
        error = storage_error(failure)
        log.error("the run ended early", exc_info=failure)
    except Exception as failure:
        error = AsyncrlError(f"asyncrl itself failed: {type(failure).__name__}: {failure}", hint="the traceback is in the log")
        log.error("asyncrl itself failed", exc_info=failure)
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


def _cancelled_from_outside() -> bool:
    """Whether this task itself is being cancelled, and not only the loop that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _after_lost_session(directory: RunDirectory) -> str:
    from asyncrl_cli.checkpoint.find import checkpoints_in, is_sealed, step_of

    step = next((step_of(path) for path in checkpoints_in(directory.checkpoints) if is_sealed(path)), None)
    return f"`asyncrl resume {directory.name}` continues from " + ("its start" if step is None else f"step {step}")


def _what_next(error: AsyncrlError, name: str) -> str:
    if isinstance(error, Interrupted):
        return f"asyncrl resume {name}"
    if isinstance(error, ExecutorFailed):
        return f"`asyncrl logs {name}` tells more, `asyncrl resume {name}` goes on from the last checkpoint"
    return ""
