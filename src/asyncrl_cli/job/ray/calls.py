"""Calls to actors: each has a time limit, and its error names the actor that failed.

Most calls come from the driver. With `nccl` and `ipc` a rollout worker also asks rank 0 for weights directly
(`RayRankZero`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, OutOfDiskError, RayError, RayTaskError

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, ExecutorLost, timeout
from asyncrl_cli.job.ray.lifeline import lost_session, session_wait
from asyncrl_cli.profile.schema import Profile

logger = logging.getLogger(__name__)
T = TypeVar("T")
GUESSES = " Some common causes include"
OWNER_DIED = "owner has died"
"""Ray says so although the actor's owner, this process, lives: the raylet is just ending, and the lifeline
will see it."""
ENDS_WITHIN_S, LOOK_EVERY_S = 2.0, 0.1
DISK_HINT = "`df` there shows the disk; `ray start --object-store-memory` gives the object store more memory"
RAISED_AT = re.compile(r"\(pid=\d+, ip=([^,)]+)")
"""In Ray's text of an error that an actor raised."""
MEMORY_FULL = re.compile(r"low on memory.* was (.* limit)")
COLORS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Limit:
    """The time limit of one call; `seconds` is None if something else bounds the call. `key`: the profile's
    key that sets it; `key_s`: that key's value, if `seconds` is longer."""

    seconds: float | None
    key: str = ""
    key_s: float | None = None

    def __str__(self) -> str:
        if self.key_s is not None:
            return f"{self.seconds:g} s (by {self.key} = {self.key_s:g} s)"
        return f"{self.key} = {self.seconds:g} s" if self.key else f"{self.seconds:g} s"


def start_limit(profile: Profile) -> Limit:
    """Covers imports, loading the model from a slow disk, and an engine's memory profiling."""
    return Limit(profile.placement.start_timeout_s, "placement.start_timeout_s")


def shown_host(host: str) -> str:
    """A node's address for messages: "" for the driver's own node, which they need not name."""
    return "" if host == ray.util.get_node_ip_address() else host


async def answer(
    ref: Awaitable[T],
    *,
    executor: str,
    call: str,
    limit: Limit,
    since: Callable[[], float] | None = None,
    patient: bool = False,
    host: str = "",
) -> T:
    """Await an ObjectRef. `since()`: a time on the event loop's clock; the limit counts from it if it is
    later than the call. `patient`: keep waiting for a while after the gcs_server has died (lifeline.py).
    `host`: the actor's node, if it is to be named.

    Raises:
        ExecutorFailed: `<executor> failed: <its own error>`, when the call raised. The remote traceback goes
            to the log.
        ExecutorLost: the actor or its engine ended, or time ran out.
        ConfigError, PreflightError, RefusedError: as the actor raised them.
        SessionLost: a daemon of the local session died, or a cluster's head.
    """
    timeout_s = limit.seconds
    try:
        async with timeout(timeout_s if since is None else None) as running:
            with session_wait(running, patient=patient):
                return await (ref if timeout_s is None or since is None else _extended(ref, timeout_s, since))
    except (RayError, TimeoutError) as error:
        if OWNER_DIED in str(error):
            for _ in range(round(ENDS_WITHIN_S / LOOK_EVERY_S)):
                if lost_session() is not None:
                    break
                await asyncio.sleep(LOOK_EVERY_S)
        raise lost_session(patient=patient) or _failure(executor, call, limit, error, host) from error


async def _extended(ref: Awaitable[T], timeout_s: float, since: Callable[[], float]) -> T:
    """Await `ref`. TimeoutError `timeout_s` after the call or after `since()`, which may rise meanwhile:
    whichever is later."""
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


def _failure(executor: str, call: str, limit: Limit, error: Exception, host: str) -> AsyncrlError:
    where = f" on {host}" if host else ""
    if not isinstance(error, RayError):  # a TimeoutError within the actor arrives as both
        hint = f"its log may say why; if it only needs longer, --set {limit.key}=..." if limit.key else ""
        return ExecutorLost(f"{call}{where} took longer than {limit}", hint=hint, executor=executor)
    text = COLORS.sub("", str(error))
    # the informative line of Ray's long message: the reason, without ids and tables of processes
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    words = "cause", "exit", "killed"
    reasons = [line for line in lines if any(word in line.lower() for word in words)]
    why = (reasons or lines or [type(error).__name__])[0]
    logger.error("%s failed in %s: %s", executor, call, text if isinstance(error, RayTaskError) else why)
    if isinstance(error, OutOfDiskError):
        raised_at = RAISED_AT.search(str(error))
        node = raised_at[1] if raised_at else ray.util.get_node_ip_address()
        full = f"node {node} has room for arrays neither in ray's object store nor on the disk"
        return ExecutorFailed(f"{full} that it spills to, during {call}", hint=DISK_HINT, executor=executor)
    if not isinstance(error, RayTaskError):
        what = "arrays were lost" if isinstance(error, ObjectLostError) else f"its process{where} ended"
        why = why.partition(GUESSES)[0]
        if isinstance(error, ActorUnavailableError):
            why = "it cannot be reached"
        elif used := MEMORY_FULL.search(why):
            why = f"ray ended it because its node's memory was full, {used[1]}"
        elif "connection error code" in why:  # Ray knows no more
            why = "a signal ended it (kill -9, or too little memory), or it crashed"
        return ExecutorLost(f"{what} during {call}: {why}", executor=executor)
    cause = error.cause
    if isinstance(cause, ExecutorFailed):
        return ExecutorLost(cause.message, hint=cause.hint, executor=executor)
    if not isinstance(cause, AsyncrlError):
        what = f"{type(cause).__name__}: {str(cause).strip()}".removesuffix(": ")
        return ExecutorFailed(what, executor=executor)
    return type(cause)(f"{executor}{where}: {cause.message}", hint=cause.hint)
