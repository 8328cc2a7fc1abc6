"""A small process that outlives the driver and ends what the driver has started: even kill -9 leaves nothing
behind.

Ray's own fate sharing is not enough: after a SIGKILL of the driver its agents live on for about a minute
(they wait for a GCS that is gone), and its files stay in the temporary directory forever. The reaper holds
the reading end of a pipe. Every second it notes the driver's descendants. When the pipe closes, because the
session ended (the driver says goodbye first) or the driver died, it gives the descendants `GRACE_S` to end,
kills the rest, and removes the directory and Python's shared-memory files that they left (vLLM's processes
communicate through these; Python's resource tracker, which would remove them, is killed as well). If the
driver died, the reaper prints an error, which names a Ray daemon only if that ended first: Ray silently ends
a driver whose raylet is gone.

Runs as a script in a process of its own: `python -P reaper.py DRIVER_PID DIRECTORY [SPARED_PID ...]`. The
driver starts it by `reaper_handle.py`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

LOOK_EVERY_S = 1.0
DAEMONS_EVERY_S = 0.1
GRACE_S = 3.0
GIVE_UP_S = 10.0
REMOVE_S = 3.0
GOODBYE = b"."
"""What the driver writes to the pipe at an orderly end: the reaper then prints no error."""
KILLED = "this run's process was killed and could not report why"
HINT = (
    "`asyncrl status` says how to resume from the last checkpoint, if there is one; if memory ran out, "
    "`dmesg` says so"
)
DAEMONS = "raylet", "gcs_server"
"""Ray's daemons, by process name. The kernel kills them when the driver's main thread ends: often before the
pipe closes."""
TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"
SHARED_MEMORY = "/dev/shm/psm_"

Processes = set[psutil.Process]
"""psutil compares processes by pid and start time, so a reused pid is never hit."""


def living(processes: Iterable[psutil.Process]) -> Processes:
    """The processes that have not ended; a zombie counts as ended."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def families(pids: Iterable[int]) -> Processes:
    """The processes that still exist, with all their descendants."""
    found: Processes = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found |= {root, *root.children(recursive=True)}
    return found


def shared_memory_of(process: psutil.Process) -> set[str]:
    """Files of Python's shared memory that a process holds open."""
    with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
        return {file.path for file in process.open_files() if file.path.startswith(SHARED_MEMORY)}
    return set()


def name_of(process: psutil.Process) -> str:
    """Empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return ""


def heard(seconds: float) -> bytes | None:
    """The next byte from the driver; empty if the pipe is closed, None if nothing comes within `seconds`."""
    return os.read(sys.stdin.fileno(), 1) if select.select([sys.stdin], [], [], seconds)[0] else None


def first_gone(daemons: Mapping[str, psutil.Process], driver_pid: int) -> str:
    """The name of a daemon that ended before the driver; empty if none did, or if the driver has ended,
    too."""
    there = living(daemons.values())
    gone = next((name for name in DAEMONS if name in daemons and daemons[name] not in there), "")
    with contextlib.suppress(psutil.NoSuchProcess):
        # Asked last: a daemon that is gone while the driver lives was not killed with it.
        return gone if psutil.Process(driver_pid).status() != psutil.STATUS_ZOMBIE else ""
    return ""


def watch(driver_pid: int, spared: Iterable[int] = ()) -> tuple[str, Processes, set[str]]:
    """Watch until the driver ends. Returns why it ended (empty if it said goodbye), the processes still
    alive, and all shared memory seen.

    `spared`: pids of processes that the driver started before the session (such as Python's resource
    tracker). They do not belong to the session, and a driver that continues after its session needs them.
    """
    seen: Processes = set()
    memory: set[str] = set()
    daemons: dict[str, psutil.Process] = {}
    ends = select.poll()  # of the daemons: noticed at once, for Ray may end the driver 50 ms later
    ends.register(sys.stdin, select.POLLIN)
    gone = ""
    word = None
    while word is None:
        next_look_s = time.monotonic() + LOOK_EVERY_S
        while (word := heard(0.0)) is None and time.monotonic() < next_look_s:
            for descriptor, _ in ends.poll(DAEMONS_EVERY_S * 1000):
                if descriptor != sys.stdin.fileno():
                    ends.unregister(descriptor)
                    os.close(descriptor)
            gone = gone or first_gone(daemons, driver_pid)
        started = families([driver_pid]) - families(spared)
        seen = living(seen | {process for process in started if process.pid not in (driver_pid, os.getpid())})
        for process in seen:
            if (name := name_of(process)) in DAEMONS and name not in daemons:
                daemons[name] = process
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    ends.register(os.pidfd_open(process.pid), select.POLLIN)
        memory.update(*map(shared_memory_of, seen))
    why = f"ray's {gone} has ended, and with it this run's process" if gone else KILLED
    return "" if word == GOODBYE else why, seen, memory


def remove_shared_memory(names: set[str]) -> None:
    """Remove the files, except those that another process still holds open: they may not be the session's."""
    for name in names.difference(*map(shared_memory_of, psutil.process_iter())):
        with contextlib.suppress(OSError):  # already gone, or not ours to remove: go on with the others
            Path(name).unlink()


def remove_directory(directory: str, spared: Iterable[int]) -> None:
    """Remove the session's directory for good. A worker that Ray started after the last look has lost its
    parents, and would make files there again: every process that has the session's token is killed."""
    until_s = time.monotonic() + REMOVE_S
    while True:
        members = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
                token = process.environ().get(TOKEN_VARIABLE, "")
                if process.pid not in spared and token.startswith(f"{directory}/"):
                    members.add(process)
        for process in (members := living(members)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(directory, ignore_errors=True)
        if not (members or os.path.lexists(directory)) or time.monotonic() > until_s:
            return
        time.sleep(0.05)


def main(driver_pid: int, directory: str, spared: Iterable[int]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    last_word, seen, memory = watch(driver_pid, spared)
    if not last_word:
        heard(GRACE_S)  # wait until it closes the pipe or ends
    else:
        with contextlib.suppress(OSError):  # nobody reads it any more
            sys.stderr.write(f"error: {last_word}\nhint: {HINT}\n")
            sys.stderr.flush()
    kill_s = time.monotonic() + GRACE_S  # until then they may end by themselves
    while (seen := living(seen)) and time.monotonic() < kill_s + GIVE_UP_S:
        if time.monotonic() >= kill_s:
            seen |= families(process.pid for process in seen)  # with what they started meanwhile
            for process in seen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.1)
    remove_shared_memory(memory)
    remove_directory(directory, {driver_pid, os.getpid(), *spared})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], [int(pid) for pid in sys.argv[3:]])
