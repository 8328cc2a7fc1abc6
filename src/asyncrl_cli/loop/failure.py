"""The third part of the run's state: whether it ends before its last step, and for what failure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from asyncrl_cli.base.errors import AsyncrlError, ExecutorLost, first_error
from asyncrl_cli.loop.admission import Admission
from asyncrl_cli.loop.changes import Changes
from asyncrl_cli.loop.progress import RunProgress


class Failure:
    """A stop, by the user or for an `error`. Admission closes; the trainer finishes its step and
    checkpoints."""

    def __init__(self, admission: Admission, changes: Changes, progress: RunProgress) -> None:
        self.stopping = False
        self.error: AsyncrlError | None = None
        """The first failure. None if the user has asked for the stop."""
        self._admission = admission
        self._changes = changes
        self._progress = progress

    def stop(self, error: AsyncrlError | None = None) -> None:
        if error is not None and self.error is None:
            self.error = error
            self._progress.event("failed", error=str(error))
        self.stopping = self._admission.stopping = True
        self._changes.notify()

    async def guarded(
        self, work: Callable[[], Awaitable[None]], on_lost: Callable[[ExecutorLost], None] | None = None
    ) -> None:
        """Run a part of the loop. An AsyncrlError stops the run in good order, unless `on_lost` handles it as
        an executor's loss.

        `work` is a function that is called only here, so a task that is cancelled before it begins leaves no
        unawaited coroutine.
        """
        try:
            await work()
        except (AsyncrlError, ExceptionGroup) as error:
            found = first_error(error, AsyncrlError)
            if found is None:
                raise
            if on_lost is not None and isinstance(found, ExecutorLost):
                on_lost(found)
            else:
                self.stop(found)
