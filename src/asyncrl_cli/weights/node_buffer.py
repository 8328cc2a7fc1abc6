"""One buffer per node and version. The first worker of a node that is told of a version fetches, verifies and
seals it; the others map the same memory.

    worker 1   lock | fetch, verify, seal | note where it is  | unlock | touch
    worker 2   lock ... waits ............................... | open /proc/<pid>/fd/<n> | unlock | touch

To touch maps the pages, which takes long: workers do it side by side, each holding the buffer by then.

What the others trust is the seal: the kernel refuses every write since then, so the bytes are those that were
held against the manifest's fingerprints. They check that the file is sealed and has the version's fingerprint
in its name.

Who waits for whom: a worker waits for the lock, at most `wait_s`, and then fetches for itself alone. The
kernel gives the lock of a worker that dies to the next one, which finds no buffer and fetches. Buffers live
as long as a worker holds them, so one that comes after the others have loaded and let go fetches anew.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

from asyncrl_cli.base.safe_files import parse_json
from asyncrl_cli.weights.buckets import Bucket
from asyncrl_cli.weights.receivers import SharedPlace, SharedWeights
from asyncrl_cli.weights.versions import Manifest

LOOK_S = 0.01
logger = logging.getLogger(__name__)


class NodeBuffer:
    """`path`: a file that exactly the workers of this node share; None for a worker by itself. `keeps`: the
    newest version stays, for the next one's deltas."""

    def __init__(self, path: Path | None, *, keeps: bool, wait_s: float) -> None:
        self._path = path
        self._keeps = keeps
        self._wait_s = wait_s
        self._kept: SharedWeights | None = None

    def weights(
        self, manifest: Manifest, fetch: Callable[[SharedWeights | None], Iterable[Bucket]]
    ) -> SharedWeights:
        """The version, in memory that the node's workers share. Blocks. `fetch(base)` returns its buckets as
        they arrive, all verified once the last has come; `base` is the newest version that is kept here. Its
        errors are raised here, and the next worker tries."""
        file = self._locked(manifest.version)
        try:
            found = None if file is None else self._noted(file)
            if found is None or (found.version, found.fingerprint) != (
                manifest.version,
                manifest.fingerprint,
            ):
                is_newest = found is None or found.version <= manifest.version
                here = [one for one in (found, self._kept) if one is not None and self._keeps]
                older = (one for one in here if one.version < manifest.version)
                base = max(older, key=attrgetter("version"), default=None)
                del found, here
                found = SharedWeights(fetch(base), manifest.version, manifest.fingerprint)
                if file is not None and is_newest:  # others may still look for a newer one
                    os.ftruncate(file, 0)
                    os.pwrite(file, json.dumps(asdict(found.place)).encode(), 0)
        finally:
            if file is not None:
                fcntl.flock(file, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
                os.close(file)
        self._kept = found if self._keeps else None
        found.touch()
        return found

    def _locked(self, version: int) -> int | None:
        """None if the file cannot be locked: then this worker shares nothing."""
        if self._path is None:
            return None
        file, ends_s = None, time.monotonic() + self._wait_s
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return file
                if time.monotonic() > ends_s:
                    raise TimeoutError(f"another worker has been at it for {self._wait_s:g} s")
                time.sleep(LOOK_S)
        except OSError as error:
            if file is not None:
                os.close(file)
            logger.warning("version %d is fetched for this worker alone: %s: %s", version, self._path, error)
            return None

    def _noted(self, file: int) -> SharedWeights | None:
        """The version that the file says is here."""
        with suppress(OSError, ValueError):  # the file is new, a worker died over it, or nobody holds it now
            return SharedWeights.opened(parse_json(os.pread(file, os.fstat(file).st_size, 0), SharedPlace))
        return None
