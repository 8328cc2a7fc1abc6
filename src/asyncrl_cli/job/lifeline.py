"""A local session's daemons, watched by their pids: when one of them ends, every wait for Ray fails within a second.

Without its gcs_server Ray itself goes on for a minute, and then exits silently in the middle of whatever the driver does.

    gcs_server dies   actors and their arrays live on. Waits for a rollout worker fail at once, and the loop ends the run in good
                      order, with a checkpoint. Waits for the trainer fail `CHECKPOINT_S` later.
    raylet dies       its workers die with it: every wait fails at once
    reaper dies       no wait fails: another reaper takes its place

At that moment the driver may be blocked in a call to Ray (making an actor, say), and its event loop hears nothing for up to a
minute. After `DEAF_S` the watching thread therefore reports the loss itself and ends the process.

There is one session per process, as there is one Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from asyncrl_cli.errors import SessionLost
from asyncrl_cli.job.process import leave, tell

LOOK_EVERY_S = 0.2
CHECKPOINT_S = 5.0
"""For the checkpoint of a run whose gcs_server is gone."""
DEAF_S = 8.0
"""How long the event loop may take to hear of a daemon's end."""
HINT = "a run that has begun goes on with `asyncrl resume`; if this machine was out of memory, `dmesg` says so"
OUTLIVED = "gcs_server"

Daemons = Mapping[str, Callable[[], str | None]]
"""By name: how it has ended, None while it lives."""

_current: Lifeline | None = None


class Lifeline:
    """`watch` looks at the daemons in a thread, calls `mend` each time, and cuts the `waits` short when one has ended.

    `waits`: whether each wait, known by its time limit, can go on without the gcs_server for a while.
    """

    def __init__(self, daemons: Daemons, mend: Callable[[], None]) -> None:
        self._daemons = daemons
        self._mend = mend
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waits: dict[asyncio.Timeout, bool] = {}
        self.is_heard = False
        self.ended = threading.Event()
        self.first: tuple[str, str] | None = None
        self._patience_is_over = False

    def error(self, *, patient: bool = False) -> SessionLost | None:
        """The daemon that died first, if any has. `patient`: None for as long as the caller can go on without it."""
        dead = {name: how for name, ended in self._daemons.items() if (how := ended()) is not None}
        self.first = self.first or next(iter(dead.items()), None)
        if self.first is None or (patient and set(dead) == {OUTLIVED} and not self._patience_is_over):
            return None
        name, how = self.first
        return SessionLost(f"ray's {name} has ended ({how}), and with it this session", hint=HINT)

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
    """`limit` also runs out when this process's local session is lost. Raises SessionLost if it is lost already."""
    if _current is None:
        yield
        return
    # Asked only once a daemon has died: a look at all of them takes longer than a call.
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
