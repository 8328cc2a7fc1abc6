"""How rank 0 sends a version to the workers: the protocol of all transports.

    rank 0   begin(version) -> put(bucket) -> ref ... -> finish(manifest)     a Sender; `keep` ends older versions
    driver   carries (manifest, refs) to every worker
    worker   ref -> bucket ..., and `buckets.verified` compares fingerprints

The Sender of `object-store` is in job/transports.py (its refs are Ray's), of `disk` in disk.py, of `nccl` and `ipc` in held.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl_cli.weights.versions import Manifest

if TYPE_CHECKING:  # it needs torch
    from asyncrl_cli.weights.buckets import Bucket


class Sender(Protocol):
    """Rank 0's end of a transport. One version at a time, one call at a time, in any thread."""

    def begin(self, version: int, num_buckets: int) -> None:
        """Start a version. Discards one that was not finished."""

    def put(self, bucket: Bucket) -> Any:
        """Returns a ref with which workers get this bucket once the version is finished. Call it in the layout's order."""

    def finish(self, manifest: Manifest) -> None:
        """Complete the version after its last bucket."""

    def keep(self, wanted: Collection[int]) -> None:
        """Drop all versions but `wanted`: no worker will ask for another one."""


def send(sender: Sender, manifest: Manifest, buckets: Sequence[Bucket]) -> list[Any]:
    sender.begin(manifest.version, len(buckets))
    refs = [sender.put(bucket) for bucket in buckets]
    sender.finish(manifest)
    return refs
