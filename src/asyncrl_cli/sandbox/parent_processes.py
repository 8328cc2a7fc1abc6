"""Processes that run users' code, seen from the worker that needs them: of rewards, agents and environments.

    take ─> Process ─ask, answer─> ... ─give_back─> idle ─> take ...
                          └─ hung, died, stopped ─> kill

A host (child_host.py) forks them, and kills all that is left of one. They answer over a socket: pickles one
way, lines of JSON the other. Nothing here blocks the event loop or needs a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl_cli.base.child_process import command, environment, how_it_ended, kill_group, send
from asyncrl_cli.base.errors import timeout
from asyncrl_cli.sandbox import child_host
from asyncrl_cli.tasks.tool_class import Player, ToolClass

MOST_IDLE = 64
LINE_LIMIT_BYTES = 16 * 2**20
"""More than a tool's longest text takes as JSON."""
FORK_LIMIT_S, DEATH_LIMIT_S, END_LIMIT_S = 30.0, 2.0, 5.0
LAST_ANSWERS_S = 0.25
"""For the answers that a dead process has left in its socket, which one that it started may hold open."""
FULL_PAUSE_S = 0.01
"""The host's socket holds some 280 commands. If it is full, `take` tries again after this pause."""
CHUNK_BYTES, CHUNK_PAUSE_S = 2**16, 0.002
LOGGED_BYTES, LOGGED_BYTES_PER_S = 2**18, 2**14

Answer = dict[str, Any]
"""JSON of users' code: each asker checks what it reads."""

logger = logging.getLogger(__name__)


class ProcessEnded(Exception):
    """The process has died, or no process can be started; `str(error)` says how or why."""


class UnreadableAnswer(ProcessEnded):
    """Users' code wrote to the socket: the process is of no more use."""


@dataclass(slots=True, eq=False)
class Process:
    """`num_owed`: how many answers are still to come; the first two are its pid and how many requests it
    takes at once (`places`)."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int = 0
    places: int = 0
    num_owed: int = 2
    ended: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def ask(self, *request: object, num_answers: int = 1) -> None:
        """Send a request. If it cannot be pickled, raises that error and sends nothing."""
        send(self.writer, pickle.dumps(request, protocol=5))
        self.num_owed += num_answers

    async def answer(self, limit_s: float | None = None) -> Answer:
        """The next answer. Raises TimeoutError or ProcessEnded."""
        async with timeout(limit_s):
            try:
                line = await self.reader.readline()
                answer = json.loads(line) if line.endswith(b"\n") else None
            except ValueError as error:
                raise UnreadableAnswer(f"an unreadable answer ({error})") from error
            except OSError:  # users' code or the end of the process closed the socket
                answer = None
        if not isinstance(answer, dict):
            raise ProcessEnded(await self.how_it_ended() or "its socket closed")
        self.num_owed -= 1
        return answer

    async def how_it_ended(self, limit_s: float = DEATH_LIMIT_S) -> str:
        """Its signal or exit code, or "" if it has not ended in that time."""
        with contextlib.suppress(TimeoutError):
            async with timeout(limit_s):
                return how_it_ended(await asyncio.shield(self.ended))
        return ""


@dataclass(slots=True, eq=False, kw_only=True)
class Processes:
    """The processes of one kind, and their host.

    `load(*arguments)` makes what serves requests (child_host.Server): in every process, or once in the host
    before it forks (`is_loaded_once`). That may take `start_limit_s`. `name`: "reward", for messages.
    `python`: see `child_process.command`. `log_path`: of what they print; None: our standard error.
    """

    name: str
    load: Callable[..., child_host.Server]
    arguments: tuple[object, ...]
    start_limit_s: float
    is_loaded_once: bool = False
    python: str = ""
    log_path: Path | None = None
    host: asyncio.subprocess.Process | None = None
    control: socket.socket | None = None
    """Our end of the socket to the host, over which `_commands` writes, too; None if the host has ended."""
    _commands: asyncio.StreamWriter | None = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _beside: list[asyncio.Task[None]] = field(default_factory=list)
    _idle: list[Process] = field(default_factory=list)
    _alive: dict[int, Process] = field(default_factory=dict)
    _open: set[Process] = field(default_factory=set)

    async def start(self) -> None:
        """Start the host, if there is none. Raises ProcessEnded if that fails, or `load` in it."""
        async with self._starting:
            if self.control is not None:
                return
            ours, theirs = socket.socketpair()
            ours.setblocking(False)  # `_fork` sends on it from the event loop
            reader, writer = await asyncio.open_connection(sock=ours)
            host = None
            try:
                with theirs:
                    host = self.host = await asyncio.create_subprocess_exec(
                        *command(child_host.run, self.python, self.name),
                        stdin=theirs.fileno(),
                        stdout=asyncio.subprocess.DEVNULL,
                        stderr=asyncio.subprocess.PIPE,
                        env=environment(self.python),
                        start_new_session=True,  # Ctrl-C at the terminal must reach the driver only
                    )
                assert host.stderr is not None
                copies = copy_output(host.stderr, self.log_path, f"{self.name} processes")
                self._beside.append(asyncio.create_task(copies, name=f"output of {self.name} processes"))
                writer.write(pickle.dumps((child_host.run, (self.load, self.arguments, self.is_loaded_once))))
                async with timeout(self.start_limit_s):
                    line = await reader.readline()
                self._check_loaded(json.loads(line) if line else None)
                self.control, self._commands = ours, writer
            except TimeoutError:
                raise self._too_slow() from None
            except OSError as error:  # out of memory, processes or file descriptors
                raise ProcessEnded(f"a {self.name} process cannot be started: {error}") from error
            finally:
                if self.control is None:
                    writer.close()
                    if host is not None:
                        with contextlib.suppress(ProcessLookupError):
                            host.kill()
            listens = self._listen(reader, writer)
            self._beside.append(asyncio.create_task(listens, name=f"{self.name} processes"))

    async def take(self, *descriptors: int) -> Process:
        """A process that has nothing to do. `descriptors`: of files that it gets. Raises ProcessEnded if none
        can be started."""
        if self._idle:
            return self._idle.pop()
        await self.start()
        ours, theirs = socket.socketpair()
        process = Process(*await asyncio.open_connection(sock=ours, limit=LINE_LIMIT_BYTES))
        self._open.add(process)
        try:
            try:
                with theirs:
                    async with timeout(FORK_LIMIT_S):
                        while not self._fork(theirs.fileno(), *descriptors):  # noqa: ASYNC110
                            await asyncio.sleep(FULL_PAUSE_S)
                process.pid = (await process.answer(FORK_LIMIT_S))["pid"]
                self._alive[process.pid] = process
                loaded = await process.answer(self.start_limit_s)
            except TimeoutError:
                raise self._too_slow() from None
            except ProcessEnded as ended:
                raise ProcessEnded(f"the {self.name} process ended while it started: {ended}") from None
            self._check_loaded(loaded)
            process.places = loaded["places"]
        finally:
            if not process.places:
                self.kill(process)
                self._close_socket(process)
        return process

    def _check_loaded(self, answer: Answer | None) -> None:
        if answer is None:
            raise ProcessEnded(f"the {self.name} process ended while it started")
        if "failed" in answer:
            raise ProcessEnded(answer["failed"])

    def _too_slow(self) -> ProcessEnded:
        return ProcessEnded(f"the {self.name} process did not start within {self.start_limit_s:g} s")

    def _fork(self, *descriptors: int) -> bool:
        """Have the host fork a process that gets these; False if the host's socket is full. Raises
        ProcessEnded if the host has ended."""
        if self.control is None or self._commands is None:
            raise ProcessEnded(f"the host of the {self.name} processes has ended")
        if self._commands.transport.get_write_buffer_size():
            return False
        try:
            socket.send_fds(self.control, [child_host.FORK + b"\n"], descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ProcessEnded(f"the host of the {self.name} processes does not listen: {error}") from error
        return True

    async def give_back(self, process: Process, limit_s: float) -> None:
        """End what the process does. It is taken again if nothing of that is left, and killed otherwise."""
        is_clean = False
        try:
            with contextlib.suppress(TimeoutError, ProcessEnded):
                if not process.num_owed and len(self._idle) < MOST_IDLE:
                    process.ask("finish")
                    is_clean = (await process.answer(limit_s)).get("clean", False)
        finally:
            if is_clean:
                self._idle.append(process)
            else:
                self.kill(process)

    def kill(self, process: Process) -> None:
        """Kill the process with all that it has started."""
        if process.pid in self._alive and self._commands is not None:
            send(self._commands, child_host.KILL + b"%d\n" % process.pid)

    async def close(self) -> None:
        """End all processes: the host kills them when its socket closes."""
        self._alive, self._idle = {}, []
        self._drop_host()
        if self.host is not None:
            try:
                async with timeout(END_LIMIT_S):
                    await self.host.wait()
            except TimeoutError:
                kill_group(self.host.pid)
        if self._beside:  # the last words, unless a process that has escaped holds the pipe open
            await asyncio.wait(self._beside, timeout=DEATH_LIMIT_S)
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        for process in list(self._open):
            self._close_socket(process)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Note the processes that end. When the host itself ends, all of them do."""
        try:
            with contextlib.suppress(OSError):  # the host had ended before a kill command reached it
                while line := await reader.readline():
                    ended = json.loads(line)
                    self._has_ended(ended["pid"], ended["code"])
        finally:
            self._drop_host()
            writer.close()
            for pid in list(self._alive):
                self._has_ended(pid, -signal.SIGKILL)

    def _has_ended(self, pid: int, returncode: int) -> None:
        process = self._alive.pop(pid, None)
        if process is not None:
            self._idle = [other for other in self._idle if other is not process]
            process.ended.set_result(returncode)
            asyncio.get_running_loop().call_later(LAST_ANSWERS_S, self._close_socket, process)

    def _close_socket(self, process: Process) -> None:
        self._open.discard(process)
        process.writer.transport.abort()

    def _drop_host(self) -> None:
        control, self.control = self.control, None
        if control is not None:
            with contextlib.suppress(OSError):  # it has ended already
                control.shutdown(socket.SHUT_RDWR)


def environment_processes(tool_class: ToolClass, import_limit_s: float) -> Processes:
    """Of a user's environment class: it is imported once, for episodes start all the time."""
    return Processes(
        name="environment",
        load=Player,
        arguments=(tool_class,),
        start_limit_s=import_limit_s,
        is_loaded_once=True,
    )


async def copy_output(printed: asyncio.StreamReader, path: Path | None, who: str) -> None:
    """Copy to a file, made when something is printed, or to our standard error: LOGGED_BYTES at first, then
    LOGGED_BYTES_PER_S, so that no foreign code can fill a disk. The rest is dropped and counted.

    A process that prints faster than this reads has to wait, within the limits of its work.
    """

    def write(text: bytes) -> int:
        """How many bytes were taken: none if the output is gone, so that no process waits for it."""
        try:
            if path is None:
                return os.write(2, text)
            with path.open("ab", buffering=0) as file:
                return file.write(text)
        except OSError:
            return 0

    clock = asyncio.get_running_loop().time
    budget, num_dropped, since_s = float(LOGGED_BYTES), 0, clock()
    while chunk := await printed.read(CHUNK_BYTES):
        budget, since_s = min(LOGGED_BYTES, budget + (clock() - since_s) * LOGGED_BYTES_PER_S), clock()
        num_shown = write(chunk[: max(0, int(budget))])
        budget -= num_shown
        if num_shown and num_dropped:
            logger.warning("left out %s bytes that %s have printed", f"{num_dropped:,}", who)
            num_dropped = 0
        num_dropped += len(chunk) - num_shown
        if len(chunk) == CHUNK_BYTES:
            await asyncio.sleep(CHUNK_PAUSE_S)
    if num_dropped:
        logger.warning("left out %s bytes that %s have printed", f"{num_dropped:,}", who)
