"""Everything asyncrl raises for a reason a user can act on.

AsyncrlError             exit 1   the run failed
├── ConfigError          exit 2   a key, a flag or a file of the profile is wrong
├── PreflightError       exit 3   what the run needs is not there (GPUs, Ray, an engine, a model)
├── RefusedError         exit 4   run directory in use; foreign or damaged checkpoint
├── ExecutorFailed       exit 1   a trainer or a rollout worker failed; carries its own error
│   └── ExecutorLost     exit 1   ... because its process or its engine is gone, or gave no answer in time
├── SessionLost          exit 1   a daemon of the local Ray session has died, and nothing of Ray answers any more
├── StallError           exit 1   nobody made progress; names who waits for whom
├── StorageError         exit 1   a file of ours cannot be written or read: full disk, quota, rights, a failing disk
├── DamagedWeights       exit 1   received weights are not the published ones (weights/buckets.py)
└── Interrupted          exit 130 stopped on request, after a checkpoint
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class AsyncrlError(Exception):
    """A failure with a message for people: what failed and why, and a `hint` that says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def first_line(error: BaseException) -> str:
    """What a library's error says, without the rest of it; its type if it says nothing."""
    return f"{(str(error).strip() or type(error).__name__).splitlines()[0]:.300}"


def first_names(names: Sequence[str], shown: int = 3) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(names[:shown])}{more}"


def _rebuild(kind: type[AsyncrlError], message: str, hint: str) -> AsyncrlError:
    return kind(message, hint=hint)


def _rebuild_failed(kind: type[ExecutorFailed], cause: str, hint: str, executor: str) -> ExecutorFailed:
    return kind(cause, hint=hint, executor=executor)


class ConfigError(AsyncrlError):
    exit_code = 2


class PreflightError(AsyncrlError):
    exit_code = 3


class RefusedError(AsyncrlError):
    exit_code = 4


class ExecutorFailed(AsyncrlError):
    """An error of `executor`, as `rollout-1`, which the message begins with. Raised inside of one it has no name yet: whoever calls
    the executor adds it."""

    def __init__(self, message: str, *, hint: str = "", executor: str = "") -> None:
        super().__init__(f"{executor} failed: {message}" if executor else message, hint=hint)
        self.executor = executor
        self.cause = message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_failed, (type(self), self.cause, self.hint, self.executor))


class ExecutorLost(ExecutorFailed):
    """A fresh process in its place may do what this one could not (`rollout.max_restarts`)."""


class SessionLost(AsyncrlError):
    pass


class StallError(AsyncrlError):
    pass


class StorageError(AsyncrlError):
    pass


class Interrupted(AsyncrlError):
    exit_code = 130
