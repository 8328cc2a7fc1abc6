"""Writes versions as ordinary Hugging Face directories: for `weights.transport = "disk"` and for `weights.keep_versions`.

    <root>/version-000012/   model*.safetensors, one file per bucket; config, tokenizer: transformers and vLLM open it;
                             manifest.json (published.py)

A version is written under a hidden name and then renamed, so it appears whole or not at all. The files have no checksums: a
worker compares what it reads with the fingerprints in the manifest that the driver sends.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.storage import remove_tree, sync_files
from asyncrl_cli.weights.buckets import Bucket, DamagedWeights, Entry, dtype_name, parameter_dtype, unpack, view_of
from asyncrl_cli.weights.model_files import copy_model_files, weight_file, write_index, write_weights
from asyncrl_cli.weights.published import write_manifest
from asyncrl_cli.weights.sending import Sender, send
from asyncrl_cli.weights.versions import Manifest

_VERSION_NAME = re.compile(r"version-(\d{6,})")


def version_directory(root: Path, version: int) -> Path:
    return root / f"version-{version:06d}"


def kept_versions(root: Path) -> list[int]:
    """Versions on disk, ascending."""
    names = (entry.name for entry in root.iterdir()) if root.is_dir() else ()
    return sorted(int(match[1]) for name in names if (match := _VERSION_NAME.fullmatch(name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFile:
    """A bucket's ref: its file once the version is finished, and the layout of the tensors in it."""

    path: Path
    entries: tuple[Entry, ...]

    def read(self) -> Bucket:
        """Read the bucket. Raises DamagedWeights if the file cannot be read, or holds other tensors."""
        data = np.zeros(self.entries[-1].end_bytes, dtype=np.uint8)
        try:
            with safe_open(self.path, framework="pt") as file:
                for entry in self.entries:
                    tensor = file.get_tensor(entry.spec.name)
                    if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (entry.spec.shape, entry.spec.dtype):
                        raise self._refused(f"{entry.spec.name} has another shape or dtype than was published")
                    view_of(data, entry).copy_(tensor)
        except FileNotFoundError:
            raise self._refused("it is not there (is the run directory the same on all nodes?)") from None
        except (SafetensorError, OSError) as error:
            raise self._refused(f"it cannot be read: {error}") from error
        return Bucket(data=data, entries=self.entries)

    def _refused(self, why: str) -> DamagedWeights:
        hint = "the worker keeps its old weights; `asyncrl resume` publishes anew"
        return DamagedWeights(f"weights in {self.path} are refused: {why}", hint=hint)


class DiskSender(Sender):
    """Rank 0's end. `root` must be the same directory on all nodes; configuration and tokenizer are copied from `model_dir`.

    With `durable`, files are flushed to the disk before a version appears; without, a version may be damaged after a power cut.
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
            write_weights({entry.spec.name: tensors[entry.spec.name] for entry in bucket.entries}, self._working / name)
        self._put.append(BucketFile(path=self._final / name, entries=bucket.entries))
        return self._put[-1]

    def finish(self, manifest: Manifest) -> None:
        """Complete the version's directory and rename it. Replaces an older copy: a resumed run publishes a version again."""
        file_of = {entry.spec: file.path.name for file in self._put for entry in file.entries}
        with self._telling():
            copy_model_files(self._model_dir, self._working, parameter_dtype(file_of))
            write_index(self._working, {spec.name: file for spec, file in file_of.items()}, manifest.num_bytes)
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
                hint=f"look at its free space and permissions, or --set weights.{without}",
            ) from error


def keep_version(
    root: Path, manifest: Manifest, buckets: Sequence[Bucket], model_dir: Path, keep_versions: int | Literal["all"]
) -> None:
    """Write a version for audits and tests. Of this and older versions, keep the newest `keep_versions` and remove the rest."""
    send(DiskSender(root, model_dir, durable=True), manifest, buckets)
    if keep_versions != "all":
        for old in [version for version in kept_versions(root) if version <= manifest.version][:-keep_versions]:
            remove_tree(version_directory(root, old))
