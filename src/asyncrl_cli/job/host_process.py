"""What the processes of rank_host.py and of rollout_host.py have in common: their set-up (compute threads,
memory, log file), and the receivers' end of `weights.transport`: buckets that arrive from rank 0
(rank_sending.py), by their refs, in rollout workers and in the processes of the scorer `prox`.

The driver imports this module, too: it imports neither Ray nor torch."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.weights.versions import Manifest

if TYPE_CHECKING:
    from asyncrl_cli.weights.buckets import Bucket
    from asyncrl_cli.weights.receivers import SharedWeights

    Whole = Callable[[Iterator[Bucket]], Iterator[Bucket]]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""mallopt(3)."""
MMAP_THRESHOLD_BYTES = 32 * 2**20
"""The largest value that glibc accepts. Larger blocks still come from the kernel and go back at once."""
KEPT_BYTES = 2**30
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
Refs = Sequence[Any]
"""Of a version's buckets, in order, as its sender made them: Ray's ObjectRefs, files, or (`nccl`, `ipc`)
layouts."""
GETS_AHEAD = 2
"""How many buckets may be in transfer or wait in memory while an earlier one is verified and copied."""


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
    if sys.platform == "linux":
        # Threads of this process that wake up (for a message or a poll) do not preempt running ones. A busy
        # run has as many computing threads as cores, and hundreds of wake-ups per second; each would take a
        # core from a forward pass, and its caches. A process alone on its cores is not slowed down.
        with suppress(OSError):  # the system refuses: nothing changes
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
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


def arriving(
    manifest: Manifest,
    refs: Refs,
    base: SharedWeights | None = None,
    count: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[Bucket]:
    """The buckets in the order in which they were sent, each verified. Blocks, so call it in a thread.
    Buckets from the object store are memory-mapped, not copied. `base`: the version to which deltas are
    applied. `count(num_bytes)` is called for each bucket or delta that is fetched.

    Raises DamagedWeights: at a damaged bucket, or at the end if some are missing.
    """
    from asyncrl_cli.weights.receivers import verified

    with ThreadPoolExecutor(GETS_AHEAD, thread_name_prefix="get") as gets:
        yield from verified(_in_order(gets, refs, base, count), manifest)


def _in_order(
    gets: ThreadPoolExecutor, refs: Refs, base: SharedWeights | None, count: Callable[[int], None]
) -> Iterator[Bucket]:
    """The next fetch begins when a bucket is taken, so that a slow consumer has at most GETS_AHEAD buckets
    waiting."""
    import ray

    from asyncrl_cli.weights.deltas import DeltaRef, applied

    def fetched(ref: Any) -> Any:
        return ray.get(ref) if isinstance(ref, ray.ObjectRef) else ref.read()

    def get(ref: Any) -> Bucket:
        if isinstance(ref, DeltaRef):
            if base is not None and base.version == ref.base:
                delta = fetched(ref.delta)
                count(delta.sent_bytes)
                return applied(delta, base)
            ref = ref.full
        bucket: Bucket = fetched(ref)
        count(len(bucket.data))
        return bucket

    submits = (gets.submit(get, ref) for ref in refs)
    ahead = deque(islice(submits, GETS_AHEAD))
    while ahead:
        ahead[0].result()
        ahead.extend(islice(submits, 1))
        yield ahead.popleft().result()


def merging(profile: Profile, place: ProcessPlace) -> Whole:
    """How a receiver that needs whole weights converts the buckets that arrive: with `lora.sync = "adapter"`
    it merges them into the base model's."""
    if profile.lora.sync == "merged":
        return iter
    from asyncrl_cli.weights.receivers import BaseFiles

    return BaseFiles(profile, Path(place.model_dir)).whole
