"""A local session's daemons, watched by their pids: when one of them ends, whoever waits for Ray hears of it within a second.

Ray itself goes on for a minute without its gcs_server, and then exits in the middle of whatever the driver does, without a word.

    gcs_server dies   actors and their arrays live on. Who waits for a rollout worker fails at once, and the loop ends the run in
                      good order, with a checkpoint. Who waits for the trainer then fails `CHECKPOINT_S` later.
    raylet dies       its workers die with it: everybody fails at once
    reaper dies       nobody fails: another takes its place

A driver that is then in a call of Ray's that blocks (it makes an actor, say) hears nothing for a minute: after `DEAF_S` the thread
that watches says so in its place, and ends the process.

There is one session per process, as there is one Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from asyncrl_cli.errors import SessionLost
from asyncrl_cli.job.stopping import leave, tell

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
    """Looks at `daemons` (by name) in a thread, and calls `mend` each time; `waiting` bounds waits for what they carry."""

    def __init__(self, daemons: Daemons, mend: Callable[[], None]) -> None:
        self._daemons = daemons
        self._mend = mend
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waits: dict[asyncio.Timeout, bool] = {}
        self._first: tuple[str, str] | None = None
        self._is_heard = False
        self._patience_is_over = False

    def error(self, *, patient: bool = False) -> SessionLost | None:
        """Who died, if anybody did. `patient`: None while what is asked for can still do without him."""
        dead = {name: how for name, ended in self._daemons.items() if (how := ended()) is not None}
        self._first = self._first or next(iter(dead.items()), None)
        if self._first is None or (patient and set(dead) == {OUTLIVED} and not self._patience_is_over):
            return None
        name, how = self._first
        return SessionLost(f"ray's {name} has ended ({how}), and with it this session", hint=HINT)

    @contextlib.contextmanager
    def waiting(self, limit: asyncio.Timeout, *, patient: bool) -> Iterator[None]:
        """`limit` runs out when a daemon dies. Raises SessionLost if one has."""
        if self._first is not None and (error := self.error(patient=patient)) is not None:  # a look would take longer than a call
            self._is_heard = True
            raise error
        self._loop = asyncio.get_running_loop()
        self._waits[limit] = patient
        try:
            yield
        finally:
            del self._waits[limit]

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while self.error() is None:
            with contextlib.suppress(OSError):  # no process can be started now: the next look tries again
                self._mend()
            if self._ended.wait(LOOK_EVERY_S):
                return
        self._wake()
        if not self._ended.wait(CHECKPOINT_S):
            self._patience_is_over = True
            self._wake()
            if not self._ended.wait(DEAF_S - CHECKPOINT_S) and not self._is_heard:
                tell(f"error: {self.error()}\nhint: {HINT}")
                leave(SessionLost.exit_code)

    def _wake(self) -> None:
        """In the thread of who waits: timeouts are its own."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it who waited
                self._loop.call_soon_threadsafe(self._expire)

    def _expire(self) -> None:
        self._is_heard = True
        for limit, patient in self._waits.items():
            if self.error(patient=patient) is not None and not limit.expired():
                limit.reschedule(0.0)


@contextlib.contextmanager
def lifeline(daemons: Daemons, mend: Callable[[], None]) -> Iterator[Lifeline]:
    global _current
    assert _current is None, "a session within a session"
    _current = Lifeline(daemons, mend)
    _current.start()
    try:
        yield _current
    finally:
        _current.end()
        _current = None


def lost_session(*, patient: bool = False) -> SessionLost | None:
    """Why nothing of Ray answers any more; None while it does, and on somebody else's cluster."""
    return None if _current is None else _current.error(patient=patient)


@contextlib.contextmanager
def session_wait(limit: asyncio.Timeout, *, patient: bool = False) -> Iterator[None]:
    """`limit` also runs out when this process's local session is lost. Raises SessionLost if it is."""
    if _current is None:
        yield
    else:
        with _current.waiting(limit, patient=patient):
            yield
