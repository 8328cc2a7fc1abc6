"""A rollout worker's environment processes: one per running episode, forked from a zygote, reused after a
clean end.

    take ─> EnvironmentProcess ─ask, answer─> ... ─give_back─> idle ─> take ...
                                     └─ hung, died, stopped ─> kill

Nothing here blocks the event loop or needs a thread. What the processes print goes to this process's log, at
a bounded rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

from asyncrl_cli.base.child_process import command, environment, how_it_ended, kill_group, send
from asyncrl_cli.base.timeouts import timeout
from asyncrl_cli.sandbox import zygote
from asyncrl_cli.sandbox.printed import copy_output, to_stderr
from asyncrl_cli.tasks.tool_class import ToolClass

MOST_IDLE = 64
LINE_LIMIT_BYTES = 16 * 2**20
"""More than a text of MAX_TEXT_CHARS takes as JSON."""
START_LIMIT_S, DEATH_LIMIT_S, END_LIMIT_S = 30.0, 2.0, 5.0
FULL_PAUSE_S = 0.01
"""The zygote's socket holds some 280 commands. If it is full, `take` tries again after this pause."""


class ProcessEnded(Exception):
    """The process has died, or no process can be started; `str(error)` says how or why."""


@dataclass(slots=True, eq=False)
class EnvironmentProcess:
    """Runs one environment at a time. `num_owed`: how many answers are still to come; the first one is its
    pid."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int = 0
    num_owed: int = 1
    _ended: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def ask(self, *request: Any, num_answers: int = 1) -> None:
        """Send a request. If it cannot be pickled, raises that error and sends nothing."""
        send(self.writer, pickle.dumps(request, protocol=5))
        self.num_owed += num_answers

    async def answer(self, limit_s: float) -> dict[str, Any]:
        """The next answer. Raises TimeoutError or ProcessEnded."""
        async with timeout(limit_s):
            try:
                line = await self.reader.readline()
                answer = json.loads(line) if line.endswith(b"\n") else None
            except ValueError as error:  # a tool wrote to the socket
                raise ProcessEnded(f"an unreadable answer ({error})") from error
            except OSError:  # a tool or the end of the process closed the socket
                answer = None
        if not isinstance(answer, dict):
            raise ProcessEnded(await self._how_it_ended())
        self.num_owed -= 1
        return answer

    async def _how_it_ended(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with timeout(DEATH_LIMIT_S):
                return how_it_ended(await asyncio.shield(self._ended))
        return "its socket closed"

    def has_ended(self, returncode: int) -> None:
        """Stop reading: a process that it started may still hold its socket open."""
        if not self._ended.done():
            self._ended.set_result(returncode)
        self.reader.feed_eof()


@dataclass(slots=True, eq=False)
class EnvironmentProcesses:
    """The processes of one rollout worker. `import_limit_s`: how long the import of the class may take."""

    tool_class: ToolClass
    import_limit_s: float
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _control: socket.socket | None = None
    _zygote: asyncio.subprocess.Process | None = None
    _beside: list[asyncio.Task[None]] = field(default_factory=list)
    _idle: list[EnvironmentProcess] = field(default_factory=list)
    _alive: dict[int, EnvironmentProcess] = field(default_factory=dict)
    _commands: asyncio.StreamWriter | None = None
    """For the zygote, over `_control`."""

    async def start(self) -> None:
        """Start the zygote, if there is none. Raises ProcessEnded if the class cannot be imported."""
        async with self._starting:
            if self._control is None:
                await self._start()

    async def take(self) -> EnvironmentProcess:
        """A process without an environment. Raises ProcessEnded if none can be started."""
        if self._idle:
            return self._idle.pop()
        await self.start()
        ours, theirs = socket.socketpair()
        process = EnvironmentProcess(*await asyncio.open_connection(sock=ours, limit=LINE_LIMIT_BYTES))
        try:
            with theirs:
                async with timeout(START_LIMIT_S):
                    while not self._fork(theirs.fileno()):  # noqa: ASYNC110
                        await asyncio.sleep(FULL_PAUSE_S)
            process.pid = (await process.answer(START_LIMIT_S))["pid"]
        except (TimeoutError, ProcessEnded) as error:
            raise ProcessEnded(f"no environment process could be started: {error or 'no answer'}") from None
        finally:
            if not process.pid:
                process.writer.close()
        self._alive[process.pid] = process
        return process

    async def give_back(self, process: EnvironmentProcess, limit_s: float) -> None:
        """End the process's episode. It serves another one if nothing of this one is left, and is killed
        otherwise."""
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

    def kill(self, process: EnvironmentProcess) -> None:
        """Kill the process with all that it has started."""
        process.writer.close()
        if self._alive.pop(process.pid, None) is not None and self._commands is not None:
            send(self._commands, zygote.KILL + b"%d\n" % process.pid)

    async def close(self) -> None:
        """End all processes: the zygote kills them when its socket closes."""
        for process in self._alive.values():
            process.writer.close()
        self._alive, self._idle = {}, []
        self._drop_zygote()
        if self._zygote is not None:
            try:
                async with timeout(END_LIMIT_S):
                    await self._zygote.wait()
            except TimeoutError:
                kill_group(self._zygote.pid)
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)  # `_fork` sends on it from the event loop
        with theirs:
            self._zygote = await asyncio.create_subprocess_exec(
                *command(zygote.run),
                stdin=theirs,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=environment(),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        output = asyncio.create_task(
            copy_output(self._zygote.stderr, to_stderr, "environments"), name="environments' output"
        )
        self._beside.append(output)
        writer.write(pickle.dumps((zygote.run, (self.tool_class,))))
        said = {"failed": "its start was cancelled"}
        try:
            async with timeout(self.import_limit_s):
                said = json.loads(
                    await reader.readline() or b'{"failed": "its process ended while it was imported"}'
                )
        except TimeoutError:
            said = {"failed": f"it was not imported within {self.import_limit_s:g} s"}
        finally:
            if "failed" in said:
                writer.close()
                with contextlib.suppress(ProcessLookupError):
                    self._zygote.kill()
        if "failed" in said:
            raise ProcessEnded(f"{self.tool_class.code.name}: {said['failed']}")
        self._control, self._commands = ours, writer
        self._beside.append(asyncio.create_task(self._listen(reader, writer), name="environment processes"))

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Note the processes that end. When the zygote itself ends, all of them do."""
        try:
            with contextlib.suppress(OSError):  # the zygote had ended before a kill command reached it
                while line := await reader.readline():
                    ended = json.loads(line)
                    if (process := self._alive.pop(ended["pid"], None)) is not None:
                        process.has_ended(ended["code"])
                        self._idle = [other for other in self._idle if other is not process]
        finally:
            self._drop_zygote()
            writer.close()
            for process in self._alive.values():
                process.has_ended(-signal.SIGKILL)
            self._alive, self._idle = {}, []

    def _drop_zygote(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            with contextlib.suppress(OSError):  # it has ended already
                control.shutdown(socket.SHUT_RDWR)

    def _fork(self, fd: int) -> bool:
        """Have the zygote fork a process that talks over `fd`; False if the zygote's socket is full. Raises
        ProcessEnded if the zygote has ended."""
        if self._control is None or self._commands is None:
            raise ProcessEnded("the parent of the environment processes has ended")
        if self._commands.transport.get_write_buffer_size():
            return False
        try:
            socket.send_fds(self._control, [zygote.FORK + b"\n"], [fd])
        except BlockingIOError:
            return False
        except OSError as error:
            raise ProcessEnded(f"the parent of the environment processes does not listen: {error}") from error
        return True
