"""The way of a version from rank 0 to the workers, as a port of two ends: a bucket becomes a ref, a ref becomes a bucket.

    rank 0   send(sender, manifest, buckets):        begin(version) -> put(bucket) -> ref ... -> finish(manifest)
    driver   carries (manifest, refs) to every worker
    worker   Receiver.get(manifest, ref) -> bucket ..., and `buckets.verified` compares fingerprints

`object-store` lives in job/transports.py (its refs are Ray's), `disk` in weights/disk.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from asyncrl_cli.weights.buckets import Bucket, Manifest


class Sender(Protocol):
    """Rank 0's end. One version at a time, one call at a time, in any thread."""

    def begin(self, version: int) -> None:
        """Forgets a version that was not finished."""

    def put(self, bucket: Bucket) -> Any:
        """What a worker gets this bucket by, once the version is finished. In the order of the layout."""

    def finish(self, manifest: Manifest) -> None:
        """All buckets of the version are put."""


class Receiver(Protocol):
    """A worker's end. In any threads, several at once."""

    def get(self, manifest: Manifest, ref: Any) -> Bucket:
        """One bucket of the version; its bytes are not compared yet.

        Raises:
            DamagedWeights: if what the ref leads to cannot be read, or belongs to another version than the manifest's.
        """


def send(sender: Sender, manifest: Manifest, buckets: Sequence[Bucket]) -> list[Any]:
    sender.begin(manifest.version)
    refs = [sender.put(bucket) for bucket in buckets]
    sender.finish(manifest)
    return refs
