"""Set-up of a process that hosts a rank or a rollout worker: compute threads, memory, log file. Runs in
rank_host.py's and rollout_host.py's processes."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""mallopt(3)."""
MMAP_THRESHOLD_BYTES = 32 * 2**20
"""The largest value that glibc accepts. Larger blocks still come from the kernel and go back at once."""
KEPT_BYTES = 2**30
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_process(*, threads: int, log_path: Path | None) -> None:
    """Call this before torch is imported: OpenMP reads its variables once. `threads` replaces Ray's value,
    num_cpus."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # By default OpenMP's threads spin while they wait for one another. Beside a busy process, which keeps one
    # of them off its core, two threads on two cores were 10 to 60 times slower than with this setting. On
    # idle cores no cost could be measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    keep_freed_memory()
    _yield_to_computing()
    if log_path is None:
        return
    # All output of the process, also from native code and during a crash, goes to one file.
    log_path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr, force=True)
    logging.captureWarnings(True)


def keep_freed_memory() -> None:
    """With glibc: keep freed memory in the process, up to `KEPT_BYTES`.

    A forward pass on a CPU allocates and frees the same megabytes over and over. By default glibc hands them
    back to the kernel each time, which then fills them with zeros again, page by page: measured, half of a
    decode step's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


@contextmanager
def no_collection_while_starting() -> Iterator[None]:
    """Keep Python's garbage collector away while a worker imports libraries and loads its model, and from all
    of that afterwards.

    The objects made then stay for good. Scanning them for garbage again and again took an eighth of the time
    of importing torch and transformers (a seventh of vLLM's).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def _yield_to_computing() -> None:
    """On Linux: threads of this process that wake up (for a message or a poll) do not preempt running
    threads.

    A busy run has as many computing threads as cores, and hundreds of wake-ups per second; each would take a
    core from a forward pass, and its caches. A process alone on its cores is not slowed down. If the system
    refuses the setting, nothing changes.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
