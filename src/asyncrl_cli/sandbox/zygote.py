"""The parent of a rollout worker's environment processes: imports the user's class once, and forks a process
on request.

    worker -> zygote    `fork` with one end of a socket, over which the new process talks; `kill PID`
    zygote -> worker    lines of JSON: {"ready": true} or {"failed": why}; then {"pid": ..., "code": ...} for each that ended

Each process leads its own session and process group. When it is killed or dies, the rest of its group is
killed. Anything that it orphaned in another session (a daemon) becomes the zygote's child, and is killed when
the zygote ends. The zygote ends when its socket closes, which happens however the worker ends.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from asyncrl_cli.base.child_process import PR_SET_PDEATHSIG, kill_group, write_line
from asyncrl_cli.contracts.user_code import describe
from asyncrl_cli.tasks.tool_class import Player, ToolClass

PR_SET_CHILD_SUBREAPER = 36
FORK, KILL = b"fork", b"kill"
LAST_LOOK_S = 2.0


def run(requests: BinaryIO, results: BinaryIO, tool_class: ToolClass) -> None:
    """The zygote's role. Standard input is the worker's socket."""
    control = socket.socket(fileno=os.dup(requests.fileno()))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, 0)  # it must first kill its processes, and then ends by itself
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        rewards = {
            part.name: (part.weight, code.load())
            for part in tool_class.rewards
            for code in part.spec.functions
        }
        player = Player(tool_class.code.load(), rewards)
    except (Exception, SystemExit) as error:
        _tell(control, {"failed": describe(error)})
        os._exit(1)
    requests.close()
    results.close()
    zygote = Zygote(control, player)
    try:
        zygote.serve()
    finally:
        zygote.end()
        os._exit(0)  # without waiting for threads that the module has started


class Zygote:
    def __init__(self, control: socket.socket, player: Player) -> None:
        self._control = control
        self._player = player
        self._children: set[int] = set()
        self._pid = os.getpid()
        self._wakeups = self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)

    def serve(self) -> None:
        _tell(self._control, {"ready": True})
        said = b""
        while True:
            ready, _, _ = select.select([self._control, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if self._control in ready:
                data, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
                if not data:
                    return
                *words, said = (said + data).split(b"\n")
                for word in words:
                    self._obey(word, fds)

    def _obey(self, word: bytes, fds: list[int]) -> None:
        if word == FORK:
            self._fork(fds.pop())
        elif int(word.removeprefix(KILL)) in self._children:
            _kill(int(word.removeprefix(KILL)))

    def _fork(self, fd: int) -> None:
        """If the fork fails, the socket closes, and so the worker knows."""
        try:
            pid = os.fork()
        except OSError:
            traceback.print_exc()
            pid = -1
        if pid == 0:
            self._begin(fd)
        os.close(fd)
        if pid > 0:
            self._children.add(pid)

    def _begin(self, fd: int) -> NoReturn:
        """Runs in the new process: serve requests, then exit."""
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for end in self._wakeups:
                os.close(end)
            os.set_inheritable(fd, False)
            if os.getppid() == self._pid:  # else the zygote died before the prctl call
                with os.fdopen(fd, "rb") as requests, os.fdopen(os.dup(fd), "wb") as results:
                    write_line(results, {"pid": os.getpid()})
                    self._player.serve(requests, results)
            os._exit(0)
        except BrokenPipeError:  # nobody waits for it any more
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self._children:
                    self._children.discard(pid)
                    kill_group(pid)  # what the dead process left behind in its group
                    _tell(self._control, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def end(self) -> None:
        """Kill all remaining descendants, including daemons that tools started."""
        limit_s = time.monotonic() + LAST_LOOK_S
        while (left := list(_descendants(os.getpid()))) and time.monotonic() < limit_s:
            for pid in left:
                _kill(pid)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)


def _kill(pid: int) -> None:
    """Kill a process, its group, and whatever descends from it."""
    for victim in [*_descendants(pid), pid]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(victim, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def _tell(control: socket.socket, line: dict[str, Any]) -> None:
    # the worker is gone: the next read finds out
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.sendall(json.dumps(line).encode() + b"\n")
