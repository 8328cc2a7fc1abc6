"""The trainer's side: each rank holds what it sends of the newest version. Rank 0 sends whole versions by
`weights.transport` (each rank its own rows with `object-store`: job/rank_sending.py), and keeps some for
audits. The other side is receivers.py.

    kept        a directory per version, which transformers and vLLM open:

                <root>/version-000012/   model*.safetensors, one file per bucket; config, tokenizer
                                         manifest.json: {"schema_version": 1, "version": 12,
                                                         "files": {"model.safetensors": FINGERPRINT}}

    disk, directory   directory_buckets.py

    nccl, ipc   rank 0 holds the bytes in memory (HeldVersions) until a worker that has paused its engine
                asks for them, and sends them from its GPU beside training (engines/vllm/rank_zero.py)

With `nccl` and `ipc` the worker asks, because only it knows when its engine has paused. So rank 0 prepares
nothing on its GPU in advance, and no transfer waits for a worker that drains.

A kept version is written under a hidden name and then renamed, so it appears whole or not at all. Other
trainers may write manifest.json, too: FINGERPRINT is the file's xxh3_64 in 16 hex digits, as in `xxhsum -H3`.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from safetensors import SafetensorError

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.base.storage import remove_tree, sync_files
from asyncrl_cli.models.model_files import copy_model_files, weights_file, write_index, write_weights
from asyncrl_cli.weights.buckets import Bucket, Layout, Packing, Spec, torch_dtype, view_of
from asyncrl_cli.weights.deltas import Delta, DeltaRef, difference
from asyncrl_cli.weights.versions import (
    MANIFEST,
    SCHEMA_VERSION,
    Manifest,
    Ref,
    Sender,
    file_fingerprint,
    kept_versions,
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
    """Write a version for audits and tests, with configuration and tokenizer from `model_dir`. Of this and
    older versions, keep the newest `keep_versions` and remove the rest. Replaces an older copy: a resumed run
    publishes a version again. Raises AsyncrlError if it cannot be written."""
    final, file_of = version_directory(root, manifest.version), dict[Spec, str]()
    working = root / f".{final.name}.writing"
    try:
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(parents=True)
        for index, bucket in enumerate(buckets):
            name = weights_file(index, len(buckets))
            tensors = {entry.spec.name: view_of(bucket.data, entry) for entry in bucket.entries}
            write_weights(tensors, working / name)
            file_of |= dict.fromkeys((entry.spec for entry in bucket.entries), name)
        # Parameters, which share a dtype, come before buffers.
        dtype = next((spec.dtype for spec in file_of if torch_dtype(spec.dtype).is_floating_point), None)
        copy_model_files(model_dir, working, dtype)
        write_index(working, {spec.name: file for spec, file in file_of.items()}, manifest.num_bytes)
        write_manifest(working, manifest.version)
        sync_files(working)
        remove_tree(final)
        working.rename(final)
    except (OSError, SafetensorError) as error:
        hint = "check its free space and permissions, or --set weights.keep_versions=0"
        raise AsyncrlError(f"a version cannot be written to {root}: {error}", hint=hint) from error
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
