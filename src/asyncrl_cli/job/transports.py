"""Both ends of `weights.transport`: who sends for rank 0, and how a worker gets a version's buckets by their refs.

`object-store` keeps buckets as Ray objects, `disk` as files; `nccl` and `ipc` leave them on rank 0 (weights/direct.py).
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from asyncrl_cli.weights.transports import Sender

if TYPE_CHECKING:
    from asyncrl_cli.weights.buckets import Bucket, Manifest

GETS_AHEAD = 2
"""Buckets that are fetched, or wait in memory, while an earlier one is verified and copied."""


class ObjectStoreSender(Sender):
    """The objects live as long as somebody holds their refs: the driver does, until no worker can want the version."""

    def put(self, bucket: Bucket) -> Any:
        return ray.put(bucket)


class HeldRefs(list[Any]):
    """A version's refs as the driver holds them: while they live it may be wanted, and the next gather tells rank 0 so."""


def arriving(manifest: Manifest, refs: Sequence[Any]) -> Iterator[Bucket]:
    """In a thread: the buckets in the order in which they were sent, each verified. Those of the object store are mapped.

    Raises DamagedWeights, at the bucket that is damaged or at the end if some are missing.
    """
    from asyncrl_cli.weights.buckets import verified

    with ThreadPoolExecutor(GETS_AHEAD, thread_name_prefix="get") as gets:
        yield from verified(_in_order(gets, refs), manifest)


def _in_order(gets: ThreadPoolExecutor, refs: Sequence[Any]) -> Iterator[Bucket]:
    """The next get begins when a bucket is taken, so that a slow taker has no more than GETS_AHEAD of them waiting."""
    submits = (gets.submit(_get, ref) for ref in refs)
    ahead = deque(islice(submits, GETS_AHEAD))
    while ahead:
        ahead[0].result()
        ahead.extend(islice(submits, 1))
        yield ahead.popleft().result()


def _get(ref: Any) -> Bucket:
    return ray.get(ref) if isinstance(ref, ray.ObjectRef) else ref.read()


def clear(weights_dir: Path) -> None:
    """Remove what this attempt, or one that was killed, has left. Nobody reads it any more. May take long: in a thread."""
    shutil.rmtree(weights_dir, ignore_errors=True)
    if weights_dir.exists():
        shutil.rmtree(weights_dir, ignore_errors=True)  # rank 0, which was just killed, renamed something after it was listed
