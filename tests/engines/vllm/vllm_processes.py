"""Finds vLLM's processes by what started them.

Not by the titles that they give themselves ("VLLM::EngineCore"): setproctitle finds a process's command line
from the first variable of its environment, and leaves everything as it is where that variable was set anew.
Ray starts its workers with their environment in a random order, so now and then that is the case.
"""

from __future__ import annotations

import psutil


def engine_processes(pid: int) -> dict[str, psutil.Process]:
    """Those of a process's newest engine: EngineCore, and below it Worker_TP0, Worker_TP1 ... where several
    share a model."""
    cores = spawned_by(pid)
    if not cores:
        return {}
    return {"EngineCore": cores[-1]} | {
        f"Worker_TP{rank}": worker for rank, worker in enumerate(spawned_by(cores[-1].pid))
    }


def spawned_by(pid: int) -> list[psutil.Process]:
    """In the order of their start; none if the process has ended."""
    try:
        return sorted(
            filter(_is_spawned, psutil.Process(pid).children()),
            key=lambda child: (child.create_time(), child.pid),
        )
    except psutil.NoSuchProcess:
        return []


def _is_spawned(process: psutil.Process) -> bool:
    """A process that `multiprocessing` has spawned, by its command line, or one with vLLM's own title."""
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:  # a child that another test has left, dead and not waited for
        return False
    return "multiprocessing.spawn" in words or words.startswith("VLLM::")
