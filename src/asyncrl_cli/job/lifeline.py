"""Watches the daemons of a local session by their pids: when one of them ends, every wait for Ray fails within a second.

When its gcs_server dies, Ray itself goes on for a minute and then ends the driver silently, in the middle of its work.

    gcs_server dies   actors and their arrays live on. Waits for a rollout worker fail at once, and the loop ends the run in good
                      order, with a checkpoint. Waits for the trainer fail `CHECKPOINT_S` later.
    raylet dies       its workers die with it: every wait fails at once
    reaper dies       no wait fails: another reaper takes its place

At that moment the driver may be blocked in a call to Ray (making an actor, say), and its event loop does not run for up to a
minute. After `DEAF_S` the watching thread therefore reports the loss itself and ends the process.

A process has one session at a time, because it has one Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from subprocess import Popen

from asyncrl_cli.errors import SessionLost
from asyncrl_cli.job.process import leave, tell
from asyncrl_cli.tasks.child import how_it_ended

LOOK_EVERY_S = 0.2
CHECKPOINT_S = 5.0
"""Time for a run to write its checkpoint after the gcs_server has died."""
DEAF_S = 8.0
"""How long the event loop may take to react to a daemon's death."""
HINT = "a run that has begun goes on with `asyncrl resume`; if this machine was out of memory, `dmesg` says so"
OUTLIVED = "gcs_server"

Daemons = Mapping[str, Popen[bytes]]

_current: Lifeline | None = None


class Lifeline:
    """`watch` polls the daemons in a thread, calls `mend` each time, and cuts the `waits` short when a daemon has ended.

    `waits`: the time limits of all current waits, and whether each is patient: can go on without the gcs_server for a while.
    """

    def __init__(self, daemons: Daemons, mend: Callable[[], None]) -> None:
        self._daemons = daemons
        self._mend = mend
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waits: dict[asyncio.Timeout, bool] = {}
        self.is_heard = False
        self.ended = threading.Event()
        self.first: tuple[str, int] | None = None
        self._patience_is_over = False

    def error(self, *, patient: bool = False) -> SessionLost | None:
        """The error that names the daemon that died first, if any has. `patient`: None while only the gcs_server is dead, for
        `CHECKPOINT_S` at most."""
        dead = {name: code for name, daemon in self._daemons.items() if (code := daemon.poll()) is not None}
        self.first = self.first or next(iter(dead.items()), None)
        if self.first is None or (patient and set(dead) == {OUTLIVED} and not self._patience_is_over):
            return None
        name, code = self.first
        return SessionLost(f"ray's {name} has ended ({how_it_ended(code)}), and with it this session", hint=HINT)

    def watch(self) -> None:
        while self.error() is None:
            with contextlib.suppress(OSError):  # no process can be started now: the next look tries again
                self._mend()
            if self.ended.wait(LOOK_EVERY_S):
                return
        self._wake()
        if not self.ended.wait(CHECKPOINT_S):
            self._patience_is_over = True
            self._wake()
            if not self.ended.wait(DEAF_S - CHECKPOINT_S) and not self.is_heard:
                tell(f"error: {self.error()}\nhint: {HINT}")
                leave(SessionLost.exit_code)

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


@contextlib.contextmanager
def lifeline(daemons: Daemons, mend: Callable[[], None]) -> Iterator[None]:
    global _current
    assert _current is None, "a session within a session"
    _current = Lifeline(daemons, mend)
    thread = threading.Thread(target=_current.watch, name="lifeline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _current.ended.set()
        thread.join()
        _current = None


def lost_session(*, patient: bool = False) -> SessionLost | None:
    """Why Ray no longer answers; None while it does, and always on a cluster that was not started here."""
    return None if _current is None else _current.error(patient=patient)


@contextlib.contextmanager
def session_wait(limit: asyncio.Timeout, *, patient: bool = False) -> Iterator[None]:
    """Within the block `limit` also expires when the local session is lost. Raises SessionLost if it is lost already."""
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
