"""How rank 0 sends a version to the workers: the protocol of all transports.

    rank 0   begin(version) -> put(bucket) -> ref ... -> finish(manifest)     a Sender; `keep` ends older versions
    driver   carries (manifest, refs) to every worker
    worker   ref -> bucket ..., and `buckets.verified` checks fingerprints

The Sender of `object-store` is in job/transports.py (its refs are Ray's), of `disk` in disk.py, of `nccl` and
`ipc` in held.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl_cli.weights.versions import Manifest

if TYPE_CHECKING:  # it needs torch
    from asyncrl_cli.weights.buckets import Bucket


class Sender(Protocol):
    """Rank 0's end of a transport. Handles one version and one call at a time; calls may come from any
    thread."""

    def begin(self, version: int, num_buckets: int) -> None:
        """Start a version. Discards an unfinished one."""

    def put(self, bucket: Bucket) -> Any:
        """Send a bucket, in the order of the layout. Returns a ref with which workers get it once the version
        is finished."""

    def finish(self, manifest: Manifest) -> None:
        """Complete the version after its last bucket."""

    def keep(self, wanted: Collection[int]) -> None:
        """Drop all versions except `wanted`: no worker will ask for any other."""


def send(sender: Sender, manifest: Manifest, buckets: Sequence[Bucket]) -> list[Any]:
    sender.begin(manifest.version, len(buckets))
    refs = [sender.put(bucket) for bucket in buckets]
    sender.finish(manifest)
    return refs
