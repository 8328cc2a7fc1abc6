"""The trainer's side: each rank holds what it sends of the newest version. Rank 0 sends whole versions by
`weights.transport` (each rank its own rows with `object-store`: job/rank_sending.py), and keeps some for
audits. The other side is receivers.py.

    disk        a directory per version, which transformers and vLLM open:

                <root>/version-000012/   model*.safetensors, one file per bucket; config, tokenizer
                                         manifest.json: {"schema_version": 1, "version": 12,
                                                         "files": {"model.safetensors": FINGERPRINT}}

    nccl, ipc   rank 0 holds the bytes in memory (HeldVersions) until a worker that has paused its engine
                asks for them, and sends them from its GPU beside training (engines/vllm/rank_zero.py)

With `nccl` and `ipc` the worker asks, because only it knows when its engine has paused. So rank 0 prepares
nothing on its GPU in advance, and no transfer waits for a worker that drains.

On disk, a version is written under a hidden name and then renamed, so it appears whole or not at all. Other
trainers may write manifest.json, too: FINGERPRINT is the file's xxh3_64 in 16 hex digits, as in `xxhsum -H3`.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from safetensors import SafetensorError

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.base.storage import remove_tree, sync_files
from asyncrl_cli.models.model_files import WEIGHTS, copy_model_files, write_index, write_weights
from asyncrl_cli.weights.buckets import Bucket, BucketFile, Layout, Packing, torch_dtype, view_of
from asyncrl_cli.weights.deltas import Delta, DeltaRef, difference
from asyncrl_cli.weights.versions import (
    MANIFEST,
    SCHEMA_VERSION,
    Manifest,
    Ref,
    Sender,
    file_fingerprint,
    kept_versions,
    send,
    version_directory,
)


class Publication(NamedTuple):
    """What this rank sends of the newest version. `packing` does not change once it is filled, so any thread
    may read it.

    `manifest` has no fingerprints yet. Its `previous_logprobs` are not saved, and are empty for a process's
    first version.
    """

    manifest: Manifest
    packing: Packing

    def sealed(self) -> tuple[Manifest, list[Bucket]]:
        """Manifest and buckets with their fingerprints. Reads all bytes: call it beside training."""
        buckets = self.packing.seal()
        return replace(self.manifest, fingerprints=tuple(bucket.fingerprint for bucket in buckets)), buckets


@dataclass(eq=False)
class DiskSender(Sender):
    """`root` must be the same directory on all nodes; configuration and tokenizer are copied from
    `model_dir`.

    With `durable`, files are flushed to disk before a version appears; otherwise a power cut may leave a
    damaged version.
    """

    root: Path
    model_dir: Path
    durable: bool = False

    def begin(self, version: int, num_buckets: int) -> None:
        self._final = version_directory(self.root, version)
        self._working = self.root / f".{self._final.name}.writing"
        self._num_buckets = num_buckets
        self._put: list[BucketFile] = []
        shutil.rmtree(self._working, ignore_errors=True)
        with self._named_errors():
            self._working.mkdir(parents=True)

    def put(self, bucket: Bucket) -> BucketFile:
        index, total = len(self._put), self._num_buckets
        name = WEIGHTS if total == 1 else f"model-{index + 1:05d}-of-{total:05d}.safetensors"
        tensors = {entry.spec.name: view_of(bucket.data, entry) for entry in bucket.entries}
        with self._named_errors():
            write_weights(tensors, self._working / name)
        self._put.append(BucketFile(path=self._final / name, entries=bucket.entries))
        return self._put[-1]

    def finish(self, manifest: Manifest) -> None:
        """Complete the version's directory and rename it. Replaces an older copy: a resumed run publishes a
        version again."""
        file_of = {entry.spec: file.path.name for file in self._put for entry in file.entries}
        # Parameters, which share a dtype, come before buffers.
        dtype = next((spec.dtype for spec in file_of if torch_dtype(spec.dtype).is_floating_point), None)
        with self._named_errors():
            copy_model_files(self.model_dir, self._working, dtype)
            names = {spec.name: file for spec, file in file_of.items()}
            write_index(self._working, names, manifest.num_bytes)
            write_manifest(self._working, manifest.version)
            if self.durable:
                sync_files(self._working)
            remove_tree(self._final)
            self._working.rename(self._final)

    def keep(self, wanted: Collection[int]) -> None:
        for version in kept_versions(self.root):
            if version not in wanted:
                remove_tree(version_directory(self.root, version))

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            without = "keep_versions=0" if self.durable else "transport=object-store"
            hint = f"check its free space and permissions, or --set weights.{without}"
            raise AsyncrlError(f"a version cannot be written to {self.root}: {error}", hint=hint) from error


def write_manifest(directory: Path, version: int) -> None:
    """Describe the weight files of a directory, for `receivers.read_version`."""
    paths = sorted(directory.glob("*.safetensors"))
    files = {path.name: file_fingerprint(path.read_bytes()) for path in paths}
    content = {"schema_version": SCHEMA_VERSION, "version": version, "files": files}
    (directory / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def keep_version(
    root: Path,
    manifest: Manifest,
    buckets: Sequence[Bucket],
    model_dir: Path,
    keep_versions: int | Literal["all"],
) -> None:
    """Write a version for audits and tests. Of this and older versions, keep the newest `keep_versions` and
    remove the rest."""
    send(DiskSender(root, model_dir, durable=True), manifest, buckets)
    if keep_versions != "all":
        upto = [version for version in kept_versions(root) if version <= manifest.version]
        for old in upto[:-keep_versions]:
            remove_tree(version_directory(root, old))


class DeltaTransport(Sender, Protocol):
    """A sender that can send a delta beside its bucket, whose ref is `whole`."""

    def put_delta(self, delta: Delta, whole: Any) -> Ref: ...


class DeltaSender(Sender):
    """Sends by `sender` and, beside each bucket, what has changed since the version before, if that is
    smaller. For this it keeps the buckets of the finished versions that workers may want, and compares with
    the newest of them."""

    def __init__(self, sender: DeltaTransport) -> None:
        self._sender = sender
        self._held: dict[int, list[Bucket]] = {}
        self._begun: list[Bucket] = []

    def begin(self, version: int, num_buckets: int) -> None:
        self._sender.begin(version, num_buckets)
        self._begun = []

    def put(self, bucket: Bucket) -> Ref | DeltaRef:
        full, place = self._sender.put(bucket), len(self._begun)
        self._begun.append(bucket)
        if not self._held:
            return full
        base, buckets = max(self._held.items(), key=itemgetter(0))
        if (delta := difference(bucket, buckets[place], base)) is None:
            return full
        return DeltaRef(full=full, delta=self._sender.put_delta(delta, full), base=base)

    def finish(self, manifest: Manifest) -> None:
        self._sender.finish(manifest)
        self._held[manifest.version] = self._begun

    def keep(self, wanted: Collection[int]) -> None:
        self._held = {version: held for version, held in self._held.items() if version in wanted}
        self._sender.keep(wanted)


class HeldVersions(Sender):
    """For `nccl` and `ipc`: keeps the host buckets of published versions until `keep` drops them. A bucket's
    ref is only its layout."""

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
        assert manifest.version == self._begun, f"{self._begun} was begun, {manifest.version} is finished"

    def keep(self, wanted: Collection[int]) -> None:
        """Drop all other versions. The memory of one that is being sent is freed when the transfer ends."""
        with self._lock:
            self._buckets = {version: held for version, held in self._buckets.items() if version in wanted}

    def tensors(self, version: int, names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name for vLLM, tensor in host memory) for each of `names` (first name -> name for vLLM), in the
        layouts' order.

        Raises:
            ValueError: before the first tensor is read, if the version is not held or lacks one of the names.
        """
        with self._lock:
            buckets = list(self._buckets.get(version, ()))
            held = sorted(self._buckets)
        placed = [(bucket, entry) for bucket in buckets for entry in bucket.entries]
        found = [(bucket, entry) for bucket, entry in placed if entry.spec.name in names]
        if not buckets or len(found) != len(names):
            what = f"{len(found)} of {len(names)} requested tensors of version {version}"
            raise ValueError(f"rank 0 holds only {what} (versions held: {held})")
        return ((names[entry.spec.name], view_of(bucket.data, entry)) for bucket, entry in found)
