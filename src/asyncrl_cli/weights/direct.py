"""Weights that go from rank 0's GPU straight into vLLM's processes: `weights.transport = "nccl"` and `"ipc"`.

    rank 0   keeps the gathered buckets (HeldVersions): what travels as a bucket's ref is its layout, without a byte
    driver   carries (manifest, layouts), and says with each gather which versions are still wanted
    worker   prefetch: notes the layouts (AnnouncedWeights). load: pauses its engine, then asks rank 0 for the bytes (RankZero)
    rank 0   sends exactly that version to exactly that worker, in a thread beside training: engines/vllm/{nccl,ipc}.py

The worker asks, because it alone knows when its engine has paused. So rank 0 keeps nothing ready on its GPU, and no transfer waits
for a worker that drains.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from asyncrl_cli.weights.buckets import Bucket, Entry, Spec, torch_dtype, view_of
from asyncrl_cli.weights.manifest import Manifest
from asyncrl_cli.weights.transports import Sender

Layout = tuple[Entry, ...]


class HeldVersions(Sender):
    """Rank 0's `Sender`: the host buckets of published versions, until `keep` leaves them out."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[Bucket]] = {}
        self._begun = -1
        self._lock = threading.Lock()

    def begin(self, version: int, num_buckets: int) -> None:
        with self._lock:
            self._begun = version
            self._buckets[version] = []

    def put(self, bucket: Bucket) -> Layout:
        with self._lock:
            self._buckets[self._begun].append(bucket)
        return bucket.entries

    def finish(self, manifest: Manifest) -> None:
        assert manifest.version == self._begun, f"version {self._begun} was begun, {manifest.version} is finished"

    def keep(self, wanted: Collection[int]) -> None:
        """One that is being sent goes when it is sent."""
        with self._lock:
            self._buckets = {version: buckets for version, buckets in self._buckets.items() if version in wanted}

    def tensors(self, version: int, names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """In the order of the layouts: the name that vLLM loads, the tensor in host memory.

        Raises:
            ValueError: at once, if the version is not held or has no tensor of one of the names.
        """
        with self._lock:
            buckets = list(self._buckets.get(version, ()))
            held = sorted(self._buckets)
        found = [(bucket, entry) for bucket in buckets for entry in bucket.entries if entry.spec.name in names]
        if not buckets or len(found) != len(names):
            raise ValueError(f"{len(found)} of {len(names)} tensors of version {version} are held by rank 0 (it holds {held})")
        return ((names[entry.spec.name], view_of(bucket.data, entry)) for bucket, entry in found)


class AnnouncedWeights(dict[str, torch.Tensor]):
    """A version by its layouts: all names, aliases too, to tensors of the right shape and dtype that have no memory."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self.specs: tuple[Spec, ...] = tuple(entry.spec for layout in layouts for entry in layout)
        for spec in self.specs:
            self |= dict.fromkeys(spec.names, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta"))

    def chosen(self, required: Collection[str]) -> list[tuple[str, Spec]]:
        """What an engine is to load: each tensor once, by the first of its names that is required; the others are left out."""
        return [(name, spec) for spec in self.specs if (name := spec.name_among(required)) is not None]
