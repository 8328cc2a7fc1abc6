"""A trainer rank's end of `weights.transport`: it sends its buckets of a version, and workers fetch them by
their refs (host_process.py). Runs in the trainer's processes (rank_host.py); only with `object-store` do
ranks other than 0 have buckets to send.

    overlap     gather | bucket 0 | bucket 1 | bucket 2 | probes |
                                  | send 0   | send 1   | send 2 |  (a thread)   publish: waits for the rest
    no overlap  gather | bucket 0 | bucket 1 | bucket 2 | probes |               publish: sends 0, 1, 2

With deltas and `weights.mode = "async"` nothing overlaps, whatever `weights.overlap` says: comparing with the
version before would slow the gather down (rank_host.py).

Either way the same buckets arrive, in the same order. `object-store` keeps buckets as Ray objects, `disk` as
files; `nccl` and `ipc` leave them on rank 0 (weights/senders.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef

from asyncrl_cli.weights.versions import Manifest, Sender, send

if TYPE_CHECKING:
    from asyncrl_cli.weights.buckets import Bucket, Packing
    from asyncrl_cli.weights.deltas import Delta

    OnFull = Callable[[Packing, int], None]


class ObjectStoreSender:
    """A `Sender` of Ray objects, which stay on this node until a worker asks for them. The driver keeps them
    alive by their refs, until no worker can want the version any more: nothing else is to be done."""

    def begin(self, version: int, num_buckets: int) -> None: ...

    def finish(self, manifest: Manifest) -> None: ...

    def keep(self, wanted: Collection[int]) -> None: ...

    def put(self, bucket: Bucket) -> ObjectRef:
        return ray.put(bucket)

    def put_delta(self, delta: Delta, whole: ObjectRef) -> ObjectRef:
        return ray.put(delta)


class Sending:
    """Gives each gathered bucket its fingerprint and hands it to the transport's `sender`.

    The sender is called in the order begin, put ..., finish, all in one thread. If a send fails, the publish
    of its version raises the error. `in_memory`: what the sender drops are buckets, which the next gather
    fills again.
    """

    def __init__(self, sender: Sender, *, overlap: bool, in_memory: bool = False) -> None:
        self._sender = sender
        self._overlap = overlap
        self._in_memory = in_memory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        self.begun: dict[int, list[Future[Any]]] = {}

    def of(self, version: int, wanted: Collection[int] = ()) -> OnFull:
        """The function that gather calls with each bucket of `version` it has filled, in order.

        Drops a version that was begun and never published (a run that stops), and all older versions except
        `wanted`.
        """
        sends = [self._thread.submit(self._sender.keep, wanted)]
        if self._in_memory:
            sends[0].result()  # or the gather would take new memory, which takes longer than filling it
        self.begun = {version: sends}

        def seal_and_put(packing: Packing, index: int) -> Any:
            if index == 0:
                self._sender.begin(version, len(packing.buckets))
            return self._sender.put(packing.seal_bucket(index))

        if not self._overlap:
            return lambda packing, index: None
        return lambda packing, index: sends.append(self._thread.submit(seal_and_put, packing, index))

    def sent(self, manifest: Manifest, buckets: Sequence[Bucket]) -> list[object]:
        """The refs of the version's `buckets`, in order. Without overlap the buckets are sent here."""
        refs = [one.result() for one in self.begun.pop(manifest.version, [])][1:]  # the first is `keep`
        if not refs:
            return self._thread.submit(send, self._sender, manifest, buckets).result()
        assert len(refs) == len(buckets), (
            f"{len(refs)} of {len(buckets)} buckets of {manifest.version} were sent"
        )
        self._thread.submit(self._sender.finish, manifest).result()
        return refs
