"""An actor's process: its log file and its compute threads. (Its title in `ps` is Ray's: class and method.)"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path


def set_up_process(*, threads: int, log_path: Path | None) -> None:
    """Call it first, before torch is imported: OpenMP reads its variable once. Ray sets it to the actor's num_cpus."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if log_path is not None:
        _log_to(log_path)


def _log_to(path: Path) -> None:
    """Everything the process says, also from native code and in its last moments, goes to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True)
    logging.captureWarnings(True)
