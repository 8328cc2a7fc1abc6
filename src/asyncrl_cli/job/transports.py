"""Both ends of `weights.transport`: how rank 0 sends a version's buckets, and how a worker gets them by their refs.

    overlap       gather | bucket 0 | bucket 1 | bucket 2 | probes |
                                    | send 0   | send 1   | send 2 |    (a thread)        publish: waits for the rest
    no overlap    gather | bucket 0 | bucket 1 | bucket 2 | probes |                      publish: send 0, send 1, send 2

Either way the same buckets arrive, in the same order. `object-store` keeps buckets as Ray objects, `disk` as files; `nccl` and
`ipc` leave them on rank 0 (weights/held.py).
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

from asyncrl_cli.weights.versions import Manifest, Sender, send

if TYPE_CHECKING:
    from asyncrl_cli.weights.buckets import Bucket, Packing

    OnFull = Callable[[Packing, int], None]

GETS_AHEAD = 2
"""Buckets that are fetched, or wait in memory, while an earlier one is verified and copied."""


class ObjectStoreSender(Sender):
    """The objects live as long as somebody holds their refs: the driver does, until no worker can want the version."""

    def put(self, bucket: Bucket) -> Any:
        return ray.put(bucket)


class HeldRefs(list[Any]):
    """A version's refs as the driver holds them: while they live it may be wanted, and the next gather tells rank 0 so."""


class Sending:
    """Rank 0: each gathered bucket gets its fingerprint and goes to the `sender`, the transport's end.

    The sender's calls come in the order begin, put ..., finish, all in one thread. A failed send is raised by the publish of
    its version.
    """

    def __init__(self, sender: Sender, *, overlap: bool) -> None:
        self._sender = sender
        self._overlap = overlap
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        self._begun: dict[int, list[Future[Any]]] = {}

    def of(self, version: int, wanted: Collection[int] = ()) -> OnFull:
        """What to call with each bucket of `version` that a gather has filled, in their order.

        Lets go of a version that was begun and never published (a run that stops), and of all older ones but those `wanted`.
        """
        sends = [self._thread.submit(self._sender.keep, wanted)]
        self._begun = {version: sends}
        if not self._overlap:
            return lambda packing, index: None
        return lambda packing, index: sends.append(self._thread.submit(self._seal_and_put, version, packing, index))

    def sent(self, manifest: Manifest, buckets: Sequence[Bucket]) -> list[Any]:
        """What the sender returned for each of the version's `buckets`; puts those that no gather has put."""
        refs = [one.result() for one in self._begun.pop(manifest.version, [])][1:]  # the first is `keep`
        if not refs:
            return self._thread.submit(send, self._sender, manifest, buckets).result()
        assert len(refs) == len(buckets), f"{len(refs)} of {len(buckets)} buckets of version {manifest.version} were sent"
        self._thread.submit(self._sender.finish, manifest).result()
        return refs

    def _seal_and_put(self, version: int, packing: Packing, index: int) -> Any:
        if index == 0:
            self._sender.begin(version, len(packing.buckets))
        return self._sender.put(packing.seal_bucket(index))


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
