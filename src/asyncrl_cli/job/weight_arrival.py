"""The receivers' end of `weights.transport`: buckets that arrive from rank 0 (rank_sending.py), by their
refs. Runs in rollout workers, and in the processes of the scorer `prox`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.weights.versions import Manifest

if TYPE_CHECKING:
    from asyncrl_cli.weights.buckets import Bucket

    Whole = Callable[[Iterator[Bucket]], Iterator[Bucket]]

Refs = Sequence[Any]
"""Of a version's buckets, in order, as its sender made them: Ray's ObjectRefs, files, or (`nccl`, `ipc`)
layouts."""
GETS_AHEAD = 2
"""How many buckets may be in transfer or wait in memory while an earlier one is verified and copied."""


def arriving(manifest: Manifest, refs: Refs) -> Iterator[Bucket]:
    """The buckets in the order in which they were sent, each verified. Blocks, so call it in a thread.
    Buckets from the object store are memory-mapped, not copied.

    Raises DamagedWeights: at a damaged bucket, or at the end if some are missing.
    """
    from asyncrl_cli.weights.receivers import verified

    with ThreadPoolExecutor(GETS_AHEAD, thread_name_prefix="get") as gets:
        yield from verified(_in_order(gets, refs), manifest)


def _in_order(gets: ThreadPoolExecutor, refs: Refs) -> Iterator[Bucket]:
    """The next fetch begins when a bucket is taken, so that a slow consumer has at most GETS_AHEAD buckets
    waiting."""

    def get(ref: Any) -> Bucket:
        bucket: Bucket = ray.get(ref) if isinstance(ref, ray.ObjectRef) else ref.read()
        return bucket

    submits = (gets.submit(get, ref) for ref in refs)
    ahead = deque(islice(submits, GETS_AHEAD))
    while ahead:
        ahead[0].result()
        ahead.extend(islice(submits, 1))
        yield ahead.popleft().result()


def merging(profile: Profile, place: ProcessPlace) -> Whole:
    """How a receiver converts the buckets that arrive: with `lora.sync = "adapter"` it makes whole weights of
    them."""
    if profile.lora.sync == "merged":
        return iter
    from asyncrl_cli.weights.receivers import BaseFiles

    return BaseFiles(profile, Path(place.model_dir)).whole
