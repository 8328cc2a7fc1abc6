"""The errors that a user can act on, and the exit code of each.

AsyncrlError             exit 1   the run failed
├── ConfigError          exit 2   a key, a flag or a file of the profile is wrong
├── PreflightError       exit 3   something that the run needs is missing: GPUs, Ray, a model
├── RefusedError         exit 4   run directory in use; foreign or damaged checkpoint
├── ExecutorFailed       exit 1   a trainer or a rollout worker failed; carries its own error
│   └── ExecutorLost     exit 1   ... because its process or engine is gone, or did not answer in time
│       └── NoRoom       exit 1   ... and the cluster has no room for another process
├── SessionLost          exit 1   a daemon of the local Ray session, the cluster's head, or a process of the
│                                 data store has died
├── StallError           exit 1   nothing made progress; names who waits for whom
├── StorageError         exit 1   a file of the run cannot be written or read: full disk, permissions
├── DamagedWeights       exit 1   received weights are not the published ones (weights/buckets.py)
└── Interrupted          exit 130 stopped on request: after a checkpoint, at once, or while it was starting
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import typing

if typing.TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Collection, Sequence

E = typing.TypeVar("E", bound=BaseException)
LONGEST_NAME = 100
"""Longer names get no suggestion from `nearest`."""
MOST_PROBLEMS = 20
"""At most this many problems are listed in one error."""


class AsyncrlError(Exception):
    """A failure with a message for users: what failed and why, and a `hint` that says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), hint=self.hint), (self.message,)


def first_line(error: BaseException | str) -> str:
    """The first line of an error's text, at most 300 characters; the name of its type if the text is
    empty."""
    return f"{(str(error).strip() or type(error).__name__).splitlines()[0]:.300}"


def first_names(names: Sequence[str], shown: int = 3) -> str:
    """The first `shown` names and, if there are more, how many."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(names[:shown])}{more}"


def first_error(error: BaseException, kind: type[E]) -> E | None:
    """The first exception of type `kind` that is not a group: `error` itself or one nested in it. None if not
    found."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, kind) else None
    found = (first_error(inner, kind) for inner in error.exceptions)
    return next((inner for inner in found if inner is not None), None)


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that was probably meant, or None. Of a dotted name, compares the last part with the
    names of its section (first with the same words in another order), then the last part with all names, then
    the whole name."""
    if len(name) > LONGEST_NAME:
        return None
    section, _, last = name.rpartition(".")
    by_last = {key.rpartition(".")[2]: key for key in reversed(list(known))}
    in_section = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    by_words = {_words(last_part): key for last_part, key in in_section.items()}
    if exact := by_words.get(_words(last)):
        return exact
    whole = {key: key for key in known}
    for pool, wanted in ((in_section, last), (by_last, last), (whole, name)):
        found = difflib.get_close_matches(wanted, pool, n=1, cutoff=0.7)
        if found:
            return pool[found[0]]
    return None


def _words(name: str) -> str:
    return "_".join(sorted(name.split("_")))


def did_you_mean(name: str, known: Collection[str], otherwise: str, shown: Callable[[str], str] = str) -> str:
    """A hint: the known name that was probably meant, or `otherwise`."""
    guess = nearest(name, known)
    return f"did you mean {shown(guess)}?" if guess else otherwise


def counted(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class ConfigError(AsyncrlError):
    exit_code = 2


def combine(problems: Sequence[ConfigError]) -> ConfigError:
    """Combine several errors into one, with all messages and each hint once."""
    assert problems
    if len(problems) == 1:
        return problems[0]
    more = "\n  - ..." if len(problems) > MOST_PROBLEMS else ""
    lines = "".join(f"\n  - {problem.message}" for problem in problems[:MOST_PROBLEMS]) + more
    hints = dict.fromkeys(problem.hint for problem in problems[:MOST_PROBLEMS] if problem.hint)
    return ConfigError(f"{len(problems)} problems in the configuration:{lines}", hint="\n".join(hints))


class PreflightError(AsyncrlError):
    exit_code = 3


class RefusedError(AsyncrlError):
    exit_code = 4


class ExecutorFailed(AsyncrlError):
    """A failure of an executor such as `rollout-1`, whose name begins the message. The executor itself raises
    the error without its name; the caller adds it."""

    def __init__(self, message: str, *, hint: str = "", executor: str = "") -> None:
        super().__init__(f"{executor} failed: {message}" if executor else message, hint=hint)
        self.executor = executor
        self.cause = message

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), hint=self.hint, executor=self.executor), (self.cause,)


class ExecutorLost(ExecutorFailed):
    """The executor's process or engine is gone, or was silent for too long. A new process may succeed
    (`rollout.max_restarts`)."""


class NoRoom(ExecutorLost):
    """No process could be started for the executor in time: the cluster has no room for it, or its node is
    gone."""


class SessionLost(AsyncrlError):
    pass


class StallError(AsyncrlError):
    pass


class StorageError(AsyncrlError):
    pass


class Interrupted(AsyncrlError):
    exit_code = 130


@contextlib.asynccontextmanager
async def timeout(delay_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Raises TimeoutError if the block takes longer than `delay_s`, even in a task that is being cancelled.

    Until Python 3.11.2 (the version in Debian 12), `asyncio.timeout` raises CancelledError there instead
    (python/cpython#102780). Cleanup would then stop at its first late answer, and waits for the rest would
    never end.
    """
    import asyncio  # most processes that import this module need no event loop

    task = asyncio.current_task()
    assert task is not None
    limit, num_cancels = asyncio.timeout(delay_s), task.cancelling()
    try:
        async with limit:
            yield limit
    except asyncio.CancelledError as cancelled:
        if limit.expired() and task.cancelling() <= num_cancels:
            raise TimeoutError from cancelled
        raise
