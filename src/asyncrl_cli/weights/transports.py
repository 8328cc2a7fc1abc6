"""The way of a version from rank 0 to the workers: a bucket becomes a ref, and a ref becomes a bucket again.

    rank 0   begin(version) -> put(bucket) -> ref ... -> finish(manifest)     a Sender; `keep` ends older versions
    driver   carries (manifest, refs) to every worker
    worker   ref -> bucket ..., and `buckets.verified` compares fingerprints

`object-store` lives in job/transports.py (its refs are Ray's), `disk` in disk.py, `nccl` and `ipc` in direct.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from asyncrl_cli.weights.buckets import Bucket, Manifest


class Sender(Protocol):
    """Rank 0's end. One version at a time, one call at a time, in any thread."""

    def begin(self, version: int, num_buckets: int) -> None:
        """Forgets a version that was not finished."""

    def put(self, bucket: Bucket) -> Any:
        """What a worker gets this bucket by, once the version is finished. In the order of the layout."""

    def finish(self, manifest: Manifest) -> None:
        """All buckets of the version are put."""

    def keep(self, wanted: Collection[int]) -> None:
        """No worker can want another version any more: let go of all others."""


def send(sender: Sender, manifest: Manifest, buckets: Sequence[Bucket]) -> list[Any]:
    sender.begin(manifest.version, len(buckets))
    refs = [sender.put(bucket) for bucket in buckets]
    sender.finish(manifest)
    return refs
