"""How a process of ours is set up: its log file, compute threads and memory. (Ray sets its title in `ps`: class and method.)"""

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
"""The largest that glibc takes: blocks above it still come from the kernel and go back at once."""
KEPT_BYTES = 2**30
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
GC_THRESHOLDS = (200_000, 20, 100)


def set_up_process(*, threads: int, log_path: Path | None) -> None:
    """Call it first, before torch is imported: OpenMP reads its variables once. Ray sets it to the actor's num_cpus."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # By default OpenMP's threads spin while they wait for one that a neighbour keeps off its core: measured beside one busy process
    # on two cores, two threads 10 to 60 times slower than with this. On idle cores it costs nothing that could be measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    keep_freed_memory()
    yield_to_computing()
    if log_path is not None:
        _log_to(log_path)


def keep_freed_memory() -> None:
    """Where the C library is glibc: memory that is freed stays with the process, up to `KEPT_BYTES`.

    A forward pass on a CPU allocates and frees the same megabytes over and over. By default glibc hands them back to the
    kernel each time, which then fills them with zeros again, page by page: measured, half of a decode step's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def collect_garbage_seldom() -> None:
    """For a process that keeps many small objects (a loop's groups) and makes hardly any cycles.

    With Python's own thresholds the collector looks through all of them again and again: measured, half of the loop's time per
    group with 32,768 running trajectories, an eighth with a tenth of them.
    """
    gc.set_threshold(*GC_THRESHOLDS)


def yield_to_computing() -> None:
    """On Linux: a thread of this process that wakes up, for a message or a poll, waits for its turn and pushes nobody off a core.

    A busy run has as many computing threads as cores, and hundreds of wake-ups per second; each would take a core from a forward
    pass, and the caches with it. Alone on its cores a process is as fast as before. Where it is not allowed nothing changes.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _log_to(path: Path) -> None:
    """Everything the process says, also from native code and in its last moments, goes to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr, force=True)
    logging.captureWarnings(True)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """On a full disk lines are lost in silence: Python would print a traceback for each. A run's own files report the disk."""


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """The driver's log of one attempt: everything that asyncrl and its libraries log goes into the file."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("asyncrl").setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        with suppress(OSError):  # its last line, on a full disk
            handler.close()
