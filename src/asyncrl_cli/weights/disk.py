"""Versions on disk, as ordinary Hugging Face directories: for `weights.transport = "disk"`, for
`weights.keep_versions`, and for workers that are asked to load a version from a path.

    <root>/version-000012/   model*.safetensors, one file per bucket; config, tokenizer: transformers and vLLM open it
                             manifest.json: {"schema_version": 1, "version": 12, "files": {"model.safetensors": FINGERPRINT}}

A version is written under a hidden name and then renamed, so it appears whole or not at all. With the
transport, a worker checks what it reads against the bucket fingerprints that the driver sends. When loading
from a path, it checks the files against `manifest.json`. Other trainers may write this file, too: FINGERPRINT
is the file's xxh3_64 in 16 hex digits, as in `xxhsum -H3`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors

from asyncrl_cli.base.errors import AsyncrlError, RefusedError, first_names
from asyncrl_cli.base.safe_files import Count, UnsafeFile, load_json, open_regular
from asyncrl_cli.base.storage import remove_tree, sync_files
from asyncrl_cli.weights.buckets import (
    Bucket,
    BucketEntry,
    DamagedWeights,
    Packing,
    Spec,
    dtype_name,
    parameter_dtype,
    plan_layout,
    unpack,
    view_of,
)
from asyncrl_cli.weights.model_files import (
    copy_model_files,
    kept_versions,
    version_directory,
    weight_file,
    write_index,
    write_weights,
)
from asyncrl_cli.weights.sending import Sender, send
from asyncrl_cli.weights.versions import Manifest

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFile:
    """A bucket's ref: the file that it will have once the version is finished, and the layout of the tensors
    in it."""

    path: Path
    entries: tuple[BucketEntry, ...]

    def read(self) -> Bucket:
        """Read the bucket. Raises DamagedWeights if the file cannot be read, or holds other tensors."""
        data = np.zeros(self.entries[-1].end_bytes, dtype=np.uint8)
        try:
            open_regular(self.path).close()  # `safe_open` would wait for a pipe's writer
            with safe_open(self.path, framework="pt") as file:
                for entry in self.entries:
                    tensor = file.get_tensor(entry.spec.name)
                    if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (
                        entry.spec.shape,
                        entry.spec.dtype,
                    ):
                        raise self._refused(
                            f"{entry.spec.name} has another shape or dtype than was published"
                        )
                    view_of(data, entry).copy_(tensor)
        except FileNotFoundError:
            raise self._refused("it is missing (is the run directory the same on all nodes?)") from None
        except (SafetensorError, OSError, UnsafeFile) as error:
            raise self._refused(f"it cannot be read: {error}") from error
        return Bucket(data=data, entries=self.entries)

    def _refused(self, why: str) -> DamagedWeights:
        hint = "the worker keeps its old weights; `asyncrl resume` publishes anew"
        return DamagedWeights(f"weights in {self.path} are refused: {why}", hint=hint)


class DiskSender(Sender):
    """Rank 0's end. `root` must be the same directory on all nodes; configuration and tokenizer are copied
    from `model_dir`.

    With `durable`, files are flushed to disk before a version appears; otherwise a power cut may leave a
    damaged version.
    """

    def __init__(self, root: Path, model_dir: Path, *, durable: bool = False) -> None:
        self._root = root
        self._model_dir = model_dir
        self._durable = durable

    def begin(self, version: int, num_buckets: int) -> None:
        self._final = version_directory(self._root, version)
        self._working = self._root / f".{self._final.name}.writing"
        self._num_buckets = num_buckets
        self._put: list[BucketFile] = []
        shutil.rmtree(self._working, ignore_errors=True)
        with self._telling():
            self._working.mkdir(parents=True)

    def put(self, bucket: Bucket) -> BucketFile:
        name = weight_file(len(self._put), self._num_buckets)
        tensors = unpack(bucket)
        with self._telling():
            write_weights(
                {entry.spec.name: tensors[entry.spec.name] for entry in bucket.entries}, self._working / name
            )
        self._put.append(BucketFile(path=self._final / name, entries=bucket.entries))
        return self._put[-1]

    def finish(self, manifest: Manifest) -> None:
        """Complete the version's directory and rename it. Replaces an older copy: a resumed run publishes a
        version again."""
        file_of = {entry.spec: file.path.name for file in self._put for entry in file.entries}
        with self._telling():
            copy_model_files(self._model_dir, self._working, parameter_dtype(file_of))
            write_index(
                self._working, {spec.name: file for spec, file in file_of.items()}, manifest.num_bytes
            )
            write_manifest(self._working, manifest.version)
            if self._durable:
                sync_files(self._working)
            remove_tree(self._final)
            self._working.rename(self._final)

    def keep(self, wanted: Collection[int]) -> None:
        for version in kept_versions(self._root):
            if version not in wanted:
                remove_tree(version_directory(self._root, version))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            without = "keep_versions=0" if self._durable else "transport=object-store"
            raise AsyncrlError(
                f"a version cannot be written to {self._root}: {error}",
                hint=f"check its free space and permissions, or --set weights.{without}",
            ) from error


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
        for old in [version for version in kept_versions(root) if version <= manifest.version][
            :-keep_versions
        ]:
            remove_tree(version_directory(root, old))


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """The content of manifest.json."""

    schema_version: int
    version: Count
    files: Mapping[str, str]


def write_manifest(directory: Path, version: int) -> None:
    """Describe the weight files of a directory."""
    files = {path.name: _fingerprint(path.read_bytes()) for path in sorted(directory.glob("*.safetensors"))}
    content = {"schema_version": SCHEMA_VERSION, "version": version, "files": files}
    (directory / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_version(directory: Path) -> tuple[Manifest, list[Bucket]]:
    """Read a version and its buckets, one per file, for `Loader.prefetch`. Blocks, and holds the whole
    version in memory.

    Raises RefusedError for an unusable manifest, DamagedWeights for a file that is missing, unreadable or has
    another fingerprint.
    """
    told = load_json(
        directory / MANIFEST, OnDisk, hint="it names the version and a fingerprint for each weight file"
    )
    if (
        told.schema_version != SCHEMA_VERSION
        or not told.files
        or any(Path(name).name != name for name in told.files)
    ):
        raise RefusedError(
            f"{directory / MANIFEST} is refused: schema {told.schema_version}, files "
            f"{first_names([*told.files])}"
        )
    buckets = [_bucket(directory / name, fingerprint) for name, fingerprint in sorted(told.files.items())]
    fingerprints = tuple(bucket.fingerprint for bucket in buckets)
    num_bytes = sum(len(bucket.data) for bucket in buckets)
    manifest = Manifest(version=told.version, num_bytes=num_bytes, fingerprints=fingerprints, temperature=1.0)
    return manifest, buckets


def _bucket(path: Path, fingerprint: str) -> Bucket:
    try:
        with open_regular(path) as file:
            content = file.read()
        if (found := _fingerprint(content)) != fingerprint:
            raise DamagedWeights(f"{path} has the fingerprint {found}, but its manifest says {fingerprint}")
        return _packed(load_tensors(content))
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedWeights(f"{path} cannot be read: {error}") from error


def _packed(tensors: Mapping[str, torch.Tensor]) -> Bucket:
    specs = [
        Spec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    packing = Packing(plan_layout(specs, sys.maxsize))
    for name, tensor in tensors.items():
        packing.put(name, tensor)
    return packing.seal()[0]


def _fingerprint(content: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(content):016x}"
