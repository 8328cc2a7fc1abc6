"""Rank 0's sending: each gathered bucket gets its fingerprint and goes to the transport.

    overlap       gather | bucket 0 | bucket 1 | bucket 2 | probes |
                                    | send 0   | send 1   | send 2 |    (a thread)        publish: waits for the rest
    no overlap    gather | bucket 0 | bucket 1 | bucket 2 | probes |                      publish: send 0, send 1, send 2

Either way the same buckets arrive, in the same order. A failed send is raised by the publish of its version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl_cli.weights.transports import Sender, send

if TYPE_CHECKING:
    from asyncrl_cli.weights.buckets import Bucket, Manifest, Packing

    OnFull = Callable[[Packing, int], None]

T = TypeVar("T")


class Sending:
    """`sender`: the transport's end. Its calls come in the order begin, put ..., finish; overlapped, all in one thread."""

    def __init__(self, sender: Sender, *, overlap: bool) -> None:
        self._sender = sender
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send") if overlap else None
        self._begun: dict[int, list[Future[Any]]] = {}

    def of(self, version: int, wanted: Collection[int] = ()) -> OnFull:
        """What to call with each bucket of `version` that a gather has filled, in their order.

        Lets go of a version that was begun and never published (a run that stops), and of all older ones but those `wanted`.
        """
        self._begun.clear()
        if self._thread is None:
            self._sender.keep(wanted)
            return lambda packing, index: None
        thread = self._thread
        sends = self._begun[version] = [thread.submit(self._sender.keep, wanted)]
        return lambda packing, index: sends.append(thread.submit(self._seal_and_put, version, packing, index))

    def sent(self, manifest: Manifest, buckets: Sequence[Bucket]) -> list[Any]:
        """What the sender returned for each of the version's `buckets`; puts those that no gather has begun (a resumed version)."""
        sends = self._begun.pop(manifest.version, None)
        if sends is None:
            return self._in_thread(send, self._sender, manifest, buckets)
        _, *refs = [one.result() for one in sends]
        assert len(refs) == len(buckets), f"{len(refs)} of {len(buckets)} buckets of version {manifest.version} were sent"
        self._in_thread(self._sender.finish, manifest)
        return refs

    def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """Overlapped, in the thread that also begins and puts: the sender gets one call at a time."""
        return call(*args) if self._thread is None else self._thread.submit(call, *args).result()

    def _seal_and_put(self, version: int, packing: Packing, index: int) -> Any:
        if index == 0:
            self._sender.begin(version, len(packing.buckets))
        return self._sender.put(packing.seal_bucket(index))
