"""Ends processes on a node for good. Runs there as a task, because a dead actor is not a dead engine process:
vLLM's end themselves when the actor has, and hold their device until then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.job.ray.reaper import living

Began = tuple[int, float]
"""A process: its id, and when it began, because ids are used again."""
LOOK_EVERY_S = 0.1


def end_processes(processes: Sequence[Began], timeout_s: float) -> None:
    """Kill these processes, and wait until they have gone. Raises ExecutorFailed after `timeout_s`."""
    left, until_s = set[psutil.Process](), time.monotonic() + timeout_s
    for pid, began_s in processes:
        with suppress(psutil.NoSuchProcess):
            if (process := psutil.Process(pid)).create_time() == began_s:
                left.add(process)
                process.kill()
    while left := living(left):
        if time.monotonic() > until_s:
            pids = ", ".join(sorted(str(process.pid) for process in left))
            why = f"{timeout_s:g} s after it was killed, a device may still be in use by process {pids}"
            raise ExecutorFailed(why, hint="`nvidia-smi` and `dmesg` on its node may say why")
        time.sleep(LOOK_EVERY_S)
