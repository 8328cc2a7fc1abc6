"""The driver's log of one attempt."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """On a full disk lines are lost in silence: Python would print a traceback for each. A run's own files report the disk."""


@contextlib.contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Everything that asyncrl and its libraries log goes into the file."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("asyncrl").setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        with contextlib.suppress(OSError):  # its last line, on a full disk
            handler.close()
