"""Ends processes on a node for good. Runs there as a task, because a dead actor is not a dead engine process:
vLLM's end themselves when the actor has, and hold their device until then."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.job.ray.reaper import living

ProcessStart = tuple[int, int]
"""A process: its id, and when it began, because ids are used again. In clock ticks since its node booted: a
step of the node's clock would change the time of day at which it began."""
LOOK_EVERY_S = 0.1


def starts_of(processes: Iterable[psutil.Process]) -> list[ProcessStart]:
    """Those of them that still exist."""
    found = []
    for pid in (process.pid for process in processes):
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            # `starttime`, field 22 of proc_pid_stat(5); field 2, a name in brackets, may hold any characters
            found.append((pid, int(stat.rpartition(b")")[2].split()[19])))
    return found


def end_processes(processes: Sequence[ProcessStart], timeout_s: float) -> None:
    """Kill these processes, and wait until they have gone. Raises ExecutorFailed after `timeout_s`."""
    left, until_s = set[psutil.Process](), time.monotonic() + timeout_s
    for start in processes:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(start[0])
            if starts_of([process]) == [start]:
                left.add(process)
                process.kill()
    while left := living(left):
        if time.monotonic() > until_s:
            pids = ", ".join(sorted(str(process.pid) for process in left))
            why = f"{timeout_s:g} s after it was killed, a device may still be in use by process {pids}"
            raise ExecutorFailed(why, hint="`nvidia-smi` and `dmesg` on its node may say why")
        time.sleep(LOOK_EVERY_S)
