"""Both ends of `weights.transport`: rank 0 sends a version's buckets, and workers fetch them by their refs.

    overlap       gather | bucket 0 | bucket 1 | bucket 2 | probes |
                                    | send 0   | send 1   | send 2 |    (a thread)        publish: waits for the rest
    no overlap    gather | bucket 0 | bucket 1 | bucket 2 | probes |                      publish: send 0, send 1, send 2

Either way the same buckets arrive, in the same order. `object-store` keeps buckets as Ray objects, `disk` as
files; `nccl` and `ipc` leave them on rank 0 (weights/senders.py).
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.weights.versions import Manifest, Sender, send

if TYPE_CHECKING:
    from asyncrl_cli.weights.buckets import Bucket, Packing

    OnFull = Callable[[Packing, int], None]
    Whole = Callable[[Iterator[Bucket]], Iterator[Bucket]]

GETS_AHEAD = 2
"""How many buckets may be in transfer or wait in memory while an earlier one is verified and copied."""


class ObjectStoreSender(Sender):
    """Sends buckets as Ray objects. The driver keeps them alive by their refs, until no worker can want the
    version any more."""

    def put(self, bucket: Bucket) -> Any:
        return ray.put(bucket)


class HeldRefs(list[Any]):
    """A version's refs in the driver. While this list lives a worker may want the version, and the next
    gather keeps it."""


class Sending:
    """Rank 0: gives each gathered bucket its fingerprint and hands it to the transport's `sender`.

    The sender is called in the order begin, put ..., finish, all in one thread. If a send fails, the publish
    of its version raises the error.
    """

    def __init__(self, sender: Sender, *, overlap: bool) -> None:
        self._sender = sender
        self._overlap = overlap
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        self._begun: dict[int, list[Future[Any]]] = {}

    def of(self, version: int, wanted: Collection[int] = ()) -> OnFull:
        """The function that gather calls with each bucket of `version` it has filled, in order.

        Drops a version that was begun and never published (a run that stops), and all older versions except
        `wanted`.
        """
        sends = [self._thread.submit(self._sender.keep, wanted)]
        self._begun = {version: sends}
        if not self._overlap:
            return lambda packing, index: None
        return lambda packing, index: sends.append(
            self._thread.submit(self._seal_and_put, version, packing, index)
        )

    def sent(self, manifest: Manifest, buckets: Sequence[Bucket]) -> list[Any]:
        """The refs of the version's `buckets`, in order. Without overlap the buckets are sent here."""
        refs = [one.result() for one in self._begun.pop(manifest.version, [])][1:]  # the first is `keep`
        if not refs:
            return self._thread.submit(send, self._sender, manifest, buckets).result()
        assert len(refs) == len(buckets), (
            f"{len(refs)} of {len(buckets)} buckets of version {manifest.version} were sent"
        )
        self._thread.submit(self._sender.finish, manifest).result()
        return refs

    def _seal_and_put(self, version: int, packing: Packing, index: int) -> Any:
        if index == 0:
            self._sender.begin(version, len(packing.buckets))
        return self._sender.put(packing.seal_bucket(index))


def arriving(manifest: Manifest, refs: Sequence[Any]) -> Iterator[Bucket]:
    """The buckets in the order in which they were sent, each verified. Blocks, so call it in a thread.
    Buckets from the object store are memory-mapped, not copied.

    Raises DamagedWeights: at a damaged bucket, or at the end if some are missing.
    """
    from asyncrl_cli.weights.receivers import verified

    with ThreadPoolExecutor(GETS_AHEAD, thread_name_prefix="get") as gets:
        yield from verified(_in_order(gets, refs), manifest)


def merging(profile: Profile, place: ProcessPlace) -> Whole:
    """How a receiver converts the buckets that arrive: with `lora.sync = "adapter"` it makes whole weights of
    them."""
    if profile.lora.sync == "merged":
        return iter
    from asyncrl_cli.weights.receivers import BaseFiles

    return BaseFiles(profile, Path(place.model_dir)).whole


def _in_order(gets: ThreadPoolExecutor, refs: Sequence[Any]) -> Iterator[Bucket]:
    """The next fetch begins when a bucket is taken, so that a slow consumer has at most GETS_AHEAD buckets
    waiting."""
    submits = (gets.submit(_get, ref) for ref in refs)
    ahead = deque(islice(submits, GETS_AHEAD))
    while ahead:
        ahead[0].result()
        ahead.extend(islice(submits, 1))
        yield ahead.popleft().result()


def _get(ref: Any) -> Bucket:
    return ray.get(ref) if isinstance(ref, ray.ObjectRef) else ref.read()


def clear(weights_dir: Path) -> None:
    """Remove the weight files that this attempt, or an earlier killed one, has left. May take long: call it
    in a thread."""
    shutil.rmtree(weights_dir, ignore_errors=True)
    if weights_dir.exists():
        # rank 0, which was just killed, renamed something after it was listed
        shutil.rmtree(weights_dir, ignore_errors=True)
