"""Watches the processes that a session depends on: when one is gone, every wait for Ray fails within a
second.

Runs in the driver. In a local session these are its daemons, watched by pid; on a cluster, the head, by
connections to its gcs_server. Without a gcs_server Ray itself goes on for a minute and then silently ends the
driver, in the middle of its work.

    gcs_server dies   actors and their arrays live on. Waits for a rollout worker fail at once, and the loop
                      ends the run in good order, with a checkpoint. Waits for the trainer fail `CHECKPOINT_S`
                      later.
    head is silent    for `HEAD_S`: the same. A gcs_server that is restarted (Ray's fault tolerance) has that
                      long to return
    raylet dies       its workers die with it: every wait fails at once
    an agent dies     so does the raylet, within seconds
    reaper dies       no wait fails: another reaper takes its place

At that moment the driver may be blocked in a call to Ray (making an actor, say), and its event loop does not
run for up to a minute. After `DEAF_S` the watching thread therefore reports the loss itself and ends the
process.

A process has one session at a time, because it has one Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from subprocess import Popen

from asyncrl_cli.base.child_process import how_it_ended
from asyncrl_cli.base.errors import SessionLost
from asyncrl_cli.job.driver_process import leave

LOOK_EVERY_S = 0.2
CHECKPOINT_S = 5.0
"""Time for a run to write its checkpoint after the gcs_server has died."""
DEAF_S = 8.0
"""How long the event loop may take to react to a daemon's death."""
HEAD_S, ANSWER_S = 30.0, 2.0
"""How long a head may be silent, and how long one connection to it may take."""
HINT = (
    "`asyncrl resume` continues a run that had begun; if its machine ran out of memory, `dmesg` there says so"
)
OUTLIVED = "gcs_server"

Daemons = Mapping[str, Popen[bytes]]
Dead = Callable[[], Mapping[str, str]]
"""What has ended, by name, and how."""

_current: Lifeline | None = None


class Lifeline:
    """`watch` polls `dead` in a thread, calls `mend` each time, and cuts the `waits` short when one has
    ended.

    `waits`: the time limits of all current waits, and whether each is patient: can go on without the
    gcs_server for a while.
    """

    def __init__(self, dead: Dead, mend: Callable[[], None], pids: Iterable[int] = ()) -> None:
        """`pids`: whose end is noticed at once. Ray ends a driver that uses the object store after its
        raylet's death, often within 50 ms: nobody would say why."""
        self._dead = dead
        self._mend = mend
        self._descriptors: list[int] = []
        self._poll = select.poll()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # ended already: the first look notices
                self._descriptors.append(os.pidfd_open(pid))
                self._poll.register(self._descriptors[-1], select.POLLIN)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waits: dict[asyncio.Timeout, bool] = {}
        self.is_heard = False
        self.ended = threading.Event()
        self.first: tuple[str, str] | None = None
        self._patience_is_over = False

    def error(self, *, patient: bool = False) -> SessionLost | None:
        """The error that names what ended first, if anything has. `patient`: None while only the gcs_server
        is dead, for `CHECKPOINT_S` at most."""
        dead = self._dead()
        self.first = self.first or next(iter(dead.items()), None)
        if self.first is None or (patient and set(dead) == {OUTLIVED} and not self._patience_is_over):
            return None
        return SessionLost(f"{self.first[1]}, and with it this session", hint=HINT)

    def watch(self) -> None:
        while self.error() is None:
            with contextlib.suppress(OSError):  # no process can be started now: the next look tries again
                self._mend()
            self._poll.poll(LOOK_EVERY_S * 1000)
            if self.ended.is_set():
                return
        self._wake()
        if not self.ended.wait(CHECKPOINT_S):
            self._patience_is_over = True
            self._wake()
            if not self.ended.wait(DEAF_S - CHECKPOINT_S) and not self.is_heard:
                leave(SessionLost.exit_code, f"error: {self.error()}\nhint: {HINT}")

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _wake(self) -> None:
        """Timeouts may be moved only in the thread of their event loop."""
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all waits with it
                self.loop.call_soon_threadsafe(self._expire)

    def _expire(self) -> None:
        self.is_heard = True
        for limit, patient in self.waits.items():
            if self.error(patient=patient) is not None and not limit.expired():
                limit.reschedule(0.0)


class ClusterHead:
    """A cluster's head, which is lost once it has taken no connection for `HEAD_S`."""

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT of its gcs_server."""
        self._address = address
        self._looked_s = 0.0
        self._silent_since_s: float | None = None
        self.dead: dict[str, str] = {}

    def look(self) -> None:
        """Try a connection, every `ANSWER_S`."""
        now_s = time.monotonic()
        if now_s - self._looked_s < ANSWER_S:
            return
        self._looked_s = now_s
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
            self._silent_since_s = None
        except OSError:
            self._silent_since_s = self._silent_since_s or now_s
            if now_s - self._silent_since_s >= HEAD_S:
                silent = f"the cluster's head has not answered at {self._address} for {HEAD_S:g} s"
                self.dead = {OUTLIVED: silent}


def ended_daemons(daemons: Daemons) -> dict[str, str]:
    """Those of a local session's daemons that have ended, and how."""
    codes = {name: daemon.poll() for name, daemon in daemons.items()}
    dead = {name: how_it_ended(code) for name, code in codes.items() if code is not None}
    return {name: f"ray's {name} has ended ({how})" for name, how in dead.items()}


@contextlib.contextmanager
def lifeline(dead: Dead, mend: Callable[[], None], pids: Iterable[int] = ()) -> Iterator[None]:
    """Watch the session within the block. `dead` tells of a local session's daemons (`ended_daemons`, with
    their `pids`) or of a cluster's head (`ClusterHead`)."""
    global _current
    assert _current is None, "a session within a session"
    _current = line = Lifeline(dead, mend, pids)
    thread = threading.Thread(target=line.watch, name="lifeline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        line.ended.set()
        thread.join()
        line.close()
        _current = None


def lost_session(*, patient: bool = False) -> SessionLost | None:
    """Why Ray no longer answers; None while it does."""
    return None if _current is None else _current.error(patient=patient)


@contextlib.contextmanager
def session_wait(limit: asyncio.Timeout, *, patient: bool = False) -> Iterator[None]:
    """Within the block `limit` also expires when the session is lost. Raises SessionLost if it is lost
    already."""
    if _current is None:
        yield
        return
    # Checked only once a daemon has died: polling all of them takes longer than a call to an actor.
    if _current.first is not None and (error := _current.error(patient=patient)) is not None:
        _current.is_heard = True
        raise error
    _current.loop = asyncio.get_running_loop()
    waits = _current.waits
    waits[limit] = patient
    try:
        yield
    finally:
        del waits[limit]
