"""Calls to actors from the driver's event loop: bounded, and failing in the words of the actor that failed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import ObjectLostError, RayError, RayTaskError

from asyncrl_cli.errors import AsyncrlError, ExecutorFailed, ExecutorLost
from asyncrl_cli.job.lifeline import lost_session, session_wait

logger = logging.getLogger(__name__)
T = TypeVar("T")
COLORS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Limit:
    """Of one call; `seconds` None: something else bounds it. `key`: of the profile, where the limit comes from; `key_s`: its value,
    where the limit is longer than that."""

    seconds: float | None
    key: str = ""
    key_s: float | None = None

    def __str__(self) -> str:
        if self.key_s is not None:
            return f"{self.seconds:g} s (by {self.key} = {self.key_s:g} s)"
        return f"{self.key} = {self.seconds:g} s" if self.key else f"{self.seconds:g} s"


async def answer(
    ref: Any, *, executor: str, call: str, limit: Limit, since: Callable[[], float] | None = None, patient: bool = False
) -> Any:
    """Await an ObjectRef. `since()`: when the limit began, on the event loop's clock, if that was later than the call.
    `patient`: go on without a gcs_server for a while (lifeline.py).

    Raises:
        ExecutorFailed: `<executor> failed: <its own error>`, when the call raised; ExecutorLost when the actor or its engine
            ended, or time ran out. The remote traceback goes to the log.
        ConfigError, PreflightError, RefusedError: as the actor raised them.
        SessionLost: a daemon of the local session died.
    """
    timeout_s = limit.seconds
    try:
        async with asyncio.timeout(timeout_s if since is None else None) as timeout:
            with session_wait(timeout, patient=patient):
                return await (ref if timeout_s is None or since is None else _extended(ref, timeout_s, since))
    except RayError as error:  # before TimeoutError: a remote TimeoutError arrives as both
        raise lost_session(patient=patient) or _failure(executor, call, error) from error
    except TimeoutError:
        if (lost := lost_session(patient=patient)) is not None:
            raise lost from None
        hint = f"its log may say why; if it only needs longer, --set {limit.key}=..." if limit.key else ""
        raise ExecutorLost(f"{call} took longer than {limit}", hint=hint, executor=executor) from None


async def _extended(ref: Any, timeout_s: float, since: Callable[[], float]) -> Any:
    """Await it; TimeoutError `timeout_s` after the call or `since()`, whichever is later by then."""
    now = asyncio.get_running_loop().time
    pending, began_s = asyncio.ensure_future(ref), now()
    try:
        while not pending.done():
            until_s = max(began_s, since()) + timeout_s
            if until_s <= now():
                raise TimeoutError
            await asyncio.wait([pending], timeout=until_s - now())
        return pending.result()
    finally:
        pending.cancel()


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """All results, in order; the first failure ends the wait for the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failure(executor: str, call: str, error: RayError) -> AsyncrlError:
    logger.error("%s failed in %s: %s", executor, call, COLORS.sub("", str(error)))
    if not isinstance(error, RayTaskError):
        what = "arrays were lost" if isinstance(error, ObjectLostError) else "its process ended"
        return ExecutorLost(f"{what} during {call}: {_died(error)}", executor=executor)
    cause = error.cause
    if isinstance(cause, ExecutorFailed):
        return ExecutorLost(cause.message, hint=cause.hint, executor=executor)
    if not isinstance(cause, AsyncrlError):
        return ExecutorFailed(f"{type(cause).__name__}: {str(cause).strip()}".removesuffix(": "), executor=executor)
    return type(cause)(f"{executor}: {cause.message}", hint=cause.hint)


def _died(error: RayError) -> str:
    """The informative lines of Ray's long message: the reason, not the ids."""
    lines = [line.strip() for line in COLORS.sub("", str(error)).splitlines() if line.strip()]
    reasons = [line for line in lines if "cause" in line.lower() or "exit" in line.lower() or "killed" in line.lower()]
    return (reasons or lines or [type(error).__name__])[0]
