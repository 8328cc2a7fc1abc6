"""A small process that outlives the driver and ends what the driver has started: even kill -9 leaves nothing behind.

Ray's own fate sharing is not enough: after a SIGKILL of the driver its agents live on for about a minute (they wait
for a GCS that is gone), and its files in the temporary directory for ever. The reaper holds the reading end of a pipe.
Every second it notes the driver's descendants (pid and start time, so that a reused pid is never hit). When the pipe
closes, because the session ended (the driver says goodbye first) or the driver died (the reaper prints an error then), it gives
the descendants `GRACE_S` to end, kills the rest, and removes the directory and Python's shared-memory files that they left (vLLM's
processes communicate through these; Python's resource tracker, which would remove them, is killed as well).

Runs as a script with the standard library alone: `python -I reaper.py DRIVER_PID DIRECTORY SINCE`. Linux only (/proc). The class
`Reaper` starts it from the driver.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

LOOK_EVERY_S = 1.0
GRACE_S = 3.0
GIVE_UP_S = 10.0
END_TIMEOUT_S = 20.0
GOODBYE = b"."
"""What the driver writes to the pipe at an orderly end: the reaper then prints no error."""
LAST_WORD = """\
error: this run's process was killed and could not report why
hint: `asyncrl resume RUN` continues from the last checkpoint, if the run had one; if memory was short, `dmesg` says so
"""
SHARED_MEMORY = "/dev/shm/psm_"

Seen = dict[int, int]
"""Start time by pid, in kernel ticks: pid and start time together identify a process."""


def started_at(pid: int) -> int | None:
    """Start time of a living process; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def children(pid: int) -> list[int]:
    """Pids of the children of all of a process's threads."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.extend(int(child) for child in (task / "children").read_bytes().split())
    except OSError:
        pass  # the process ended while we looked
    return found


def look(root: int, seen: Seen, since: int = 0) -> None:
    """Add the living descendants of `root` to `seen`, except this process and those started before `since`, with all of theirs."""
    pending = children(root)
    while pending:
        pid = pending.pop()
        start = started_at(pid)
        if pid == os.getpid() or start is None or start < since:
            continue
        seen[pid] = start
        pending.extend(children(pid))


def shared_memory_of(pid: int) -> set[str]:
    """Files of Python's shared memory that a process holds open."""
    found = set()
    with contextlib.suppress(OSError):  # the process ends while we look
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the process has just closed this file
                found.add(os.readlink(file))
    return {name for name in found if name.startswith(SHARED_MEMORY) and not name.endswith(" (deleted)")}


def living(seen: Seen) -> Seen:
    return {pid: start for pid, start in seen.items() if started_at(pid) == start}


def heard(seconds: float) -> bytes | None:
    """The next byte from the driver; empty if the pipe is closed, None if nothing comes within `seconds`."""
    return os.read(sys.stdin.fileno(), 1) if select.select([sys.stdin], [], [], seconds)[0] else None


def watch(driver_pid: int, since: int = 0) -> tuple[bool, Seen, set[str]]:
    """Watch until the driver ends. Returns whether it said goodbye, which processes live on, and all shared memory seen.

    `since`: when the session's first reaper started, before anything else of the session. What the driver started earlier (Python's
    resource tracker, say) is not the session's, and a driver that goes on after its session needs it.
    """
    since = since or started_at(os.getpid()) or 0
    seen: Seen = {}
    memory: set[str] = set()
    while (word := heard(LOOK_EVERY_S)) is None:
        seen = living(seen)
        look(driver_pid, seen, since)
        memory.update(*map(shared_memory_of, seen))
    if started_at(driver_pid) is not None:
        look(driver_pid, seen, since)
    memory.update(*map(shared_memory_of, seen))
    return word == GOODBYE, living(seen), memory


def reap(seen: Seen) -> None:
    """Wait `GRACE_S` for the processes to end by themselves, then kill them and what they started meanwhile."""
    kill_s = time.monotonic() + GRACE_S
    while (seen := living(seen)) and time.monotonic() < kill_s + GIVE_UP_S:
        if time.monotonic() >= kill_s:
            for pid in list(seen):
                look(pid, seen)
            for pid in seen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def remove_shared_memory(names: set[str]) -> None:
    """Remove the files, except those that another process still holds open: they may not be the session's."""
    everyone = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    for name in names.difference(*map(shared_memory_of, everyone)):
        with contextlib.suppress(OSError):  # already gone, or not ours to remove: go on with the others
            Path(name).unlink()


def main(driver_pid: int, directory: str, since: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    said_goodbye, seen, memory = watch(driver_pid, since)
    if said_goodbye:
        heard(GRACE_S)  # wait until it closes the pipe or ends
    else:
        with contextlib.suppress(OSError):  # nobody reads it any more
            sys.stderr.write(LAST_WORD)
            sys.stderr.flush()
    reap(seen)
    remove_shared_memory(memory)
    shutil.rmtree(directory, ignore_errors=True)


_pipe: int | None = None
"""In the driver: the file descriptor of the pipe to the current reaper."""


class Reaper:
    """The driver's handle on the reaper process, which cleans up after the driver."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process = self._start(since=0)
        self._since = started_at(self._process.pid) or 0

    def mend(self) -> None:
        """If the reaper is dead, start another, which also covers everything started since the first one."""
        if self._process.poll() is not None:
            self._close_pipe()
            self._process = self._start(self._since)

    def end(self) -> None:
        """Say goodbye, and return when the reaper has cleaned up and ended."""
        self.mend()
        say_goodbye()
        self._close_pipe()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self, since: int) -> subprocess.Popen[bytes]:
        global _pipe
        words = [sys.executable, "-I", __file__, str(os.getpid()), str(self._directory), str(since)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        assert process.stdin is not None
        _pipe = process.stdin.fileno()
        return process

    def _close_pipe(self) -> None:
        global _pipe
        assert self._process.stdin is not None
        _pipe = None  # the descriptor's number may soon belong to another file
        self._process.stdin.close()


def say_goodbye() -> None:
    """In the driver: announce an orderly end. Safe in a signal handler."""
    if _pipe is not None:
        with contextlib.suppress(OSError):  # the reaper is dead itself
            os.write(_pipe, GOODBYE)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
