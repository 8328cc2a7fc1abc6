"""The host of the processes that run users' code: forks one on request, and kills what is left of it.

    parent -> host       `fork` with one end of a socket, over which the new process talks; `kill PID`
    host -> parent       lines of JSON: {} or {"failed": why}; then {"pid", "code"} for each that ended
    parent -> process    pickles: requests
    process -> parent    lines of JSON: {"pid"}, then {"places"} or {"failed": why}; then its answers

Each process leads its own session and process group. When it is killed or dies, the rest of its group is
killed. Anything that it orphaned in another session (a daemon) becomes the host's child, and is killed when
the host ends. The host ends when its socket closes, which happens however its parent ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from asyncrl_cli.base.child_process import PR_SET_PDEATHSIG, kill_group, write_line
from asyncrl_cli.base.named_code import describe

PR_SET_CHILD_SUBREAPER = 36
FORK, KILL = b"fork", b"kill"
LAST_LOOK_S = 2.0


class Server(Protocol):
    """Answers requests in a forked process. `places`: how many at once."""

    @property
    def places(self) -> int: ...

    def serve(self, requests: BinaryIO, results: BinaryIO, *descriptors: int) -> None:
        """Answer until `requests` ends. `descriptors`: of further files from the parent."""


def run(
    requests: BinaryIO,
    results: BinaryIO,
    load: Callable[..., Server],
    arguments: tuple[object, ...],
    is_loaded_once: bool,
) -> None:
    """The host's role, and after a fork that of the new process. Standard input is the parent's socket."""
    control = socket.socket(fileno=os.dup(requests.fileno()))
    requests.close()
    results.close()
    libc, host_pid = ctypes.CDLL(None), os.getpid()
    libc.prctl(PR_SET_PDEATHSIG, 0)  # it must first kill its processes, and then ends by itself
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    server, descriptors = None, list[int]()
    try:
        try:
            server = load(*arguments) if is_loaded_once else None
        except (Exception, SystemExit) as error:
            _send_line(control, {"failed": describe(error)})
            return
        _send_line(control, {})
        descriptors = _forked(control)
    finally:
        if os.getpid() == host_pid:
            limit_s = time.monotonic() + LAST_LOOK_S  # for all descendants, daemons of users' code, too
            while (left := list(_descendants(host_pid))) and time.monotonic() < limit_s:
                for pid in left:
                    _kill(pid)
                list(_ended())
                time.sleep(0.01)
            os._exit(0)  # without waiting for threads that a module has started
    # From here on in a forked process. It returns, so that Python ends as usual and writes out open files.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host_pid:  # the host died before the prctl call
        os._exit(0)
    link, *further = descriptors
    os.set_inheritable(link, False)
    with os.fdopen(link, "rb") as asked, os.fdopen(os.dup(link), "wb") as answers:
        try:
            write_line(answers, {"pid": os.getpid()})
            try:
                server = server or load(*arguments)
            except (Exception, SystemExit) as error:
                write_line(answers, {"failed": describe(error)})
                os._exit(0)
            write_line(answers, {"places": server.places})
            server.serve(asked, answers, *further)
        except BrokenPipeError:  # nobody waits for it any more
            os._exit(0)


def _forked(control: socket.socket) -> list[int]:
    """Obey the parent until its socket closes. Returns in each forked process, too, with its descriptors."""
    children = set[int]()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    rest = b""
    while True:
        ready, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            for pid, code in _ended():
                if pid in children:
                    children.discard(pid)
                    kill_group(pid)  # what the dead process left behind in its group
                    _send_line(control, {"pid": pid, "code": code})
        if control.fileno() not in ready:
            continue
        # A `fork` ends what one call receives, so these descriptors are its own.
        received, descriptors, _, _ = socket.recv_fds(control, 4096, 4)
        if not received:
            return []
        *commands, rest = (rest + received).split(b"\n")
        for command in commands:
            if command != FORK:
                pid = int(command.removeprefix(KILL))
                if pid in children:
                    for victim in [*_descendants(pid), pid]:
                        _kill(victim)
                    kill_group(pid)
                continue
            try:
                pid = os.fork()
            except OSError:  # the socket closes, and so the parent knows
                traceback.print_exc()
                pid = -1
            if pid == 0:
                control.close()
                os.close(woken)
                os.close(wake)
                return descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            if pid > 0:
                children.add(pid)


def _ended() -> Iterator[tuple[int, int]]:
    """(pid, exit code) of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def _send_line(control: socket.socket, line: dict[str, object]) -> None:
    # the parent is gone: the next read finds out
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.sendall(json.dumps(line).encode() + b"\n")
