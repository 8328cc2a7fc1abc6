"""Versions as directories that workers read: `weights.transport = "disk"`.

    <run>/weights/version-000012/   model*.safetensors, one file per bucket; config, tokenizer: transformers and vLLM open it
                                    weights.json: fingerprints, probes, and where each tensor lies in its bucket

A version is written under a hidden name and appears by a rename, with its manifest or not at all. Nothing waits for the disk
itself: after a power cut nobody reads these files again, for a resume clears them and publishes anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.weights.buckets import Bucket, DamagedWeights, Entry, Manifest, Spec, dtype_name, parameter_dtype, view_of
from asyncrl_cli.weights.kept import version_directory
from asyncrl_cli.weights.model_files import copy_model_files, weight_file, write_index, write_weights

SCHEMA_VERSION = 2
KIND = "asyncrl-weights"
MANIFEST = "weights.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFile:
    """A bucket's ref: where it lies once its version is finished."""

    directory: Path
    index: int


class DiskSender:
    """Rank 0's end. `root` must be the same directory on all nodes; `model_dir` gives configuration and tokenizer."""

    def __init__(self, root: Path, model_dir: Path) -> None:
        self._root = root
        self._model_dir = model_dir
        self._version = -1
        self._put: list[Bucket] = []

    def begin(self, version: int) -> None:
        self._version, self._put = version, []
        shutil.rmtree(self._working, ignore_errors=True)
        with _told(self._root):
            self._working.mkdir(parents=True)

    def put(self, bucket: Bucket) -> BucketFile:
        index = len(self._put)
        tensors = {entry.spec.name: view_of(bucket.data, entry) for entry in bucket.entries}
        with _told(self._root):
            write_weights(tensors, self._part(index))
        self._put.append(bucket)
        return BucketFile(directory=version_directory(self._root, self._version), index=index)

    def finish(self, manifest: Manifest) -> None:
        """A version that is there already (a resumed run publishes it again) is replaced."""
        assert manifest.version == self._version, f"version {self._version} was begun, {manifest.version} is finished"
        assert len(self._put) == len(manifest.fingerprints), f"{len(self._put)} of {len(manifest.fingerprints)} buckets were put"
        with _told(self._root):
            copy_model_files(self._model_dir, self._working, parameter_dtype(self._put))
            files = [weight_file(index, len(self._put)) for index in range(len(self._put))]
            for index, file in enumerate(files):
                self._part(index).rename(self._working / file)
            file_of = {e.spec.name: file for file, b in zip(files, self._put, strict=True) for e in b.entries}
            write_index(self._working, file_of, manifest.num_bytes)
            (self._working / MANIFEST).write_text(_to_text(manifest, files, self._put), encoding="utf-8")
            final = version_directory(self._root, self._version)
            remove_version(final)
            self._working.rename(final)
        self._put = []

    def _part(self, index: int) -> Path:
        """A bucket's file until their number is known, which is part of its name."""
        return self._working / f"part-{index:05d}"

    @property
    def _working(self) -> Path:
        return self._root / f".{version_directory(self._root, self._version).name}.writing"


class DiskReceiver:
    """A worker's end."""

    def get(self, manifest: Manifest, ref: BucketFile) -> Bucket:
        """Looks at the directory's manifest each time: it takes milliseconds, a bucket's bytes take longer."""
        file, entries = _layout_of(ref.directory, manifest)[ref.index]
        return _read_bucket(ref.directory / file, entries)


def remove_version(directory: Path) -> None:
    """Gone by a rename, for a half-removed directory must not be taken for a damaged one. One that is not there is fine."""
    hidden = directory.with_name(f".{directory.name}.removing")
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        directory.rename(hidden)
    except FileNotFoundError:
        return
    shutil.rmtree(hidden, ignore_errors=True)


def _layout_of(directory: Path, announced: Manifest) -> list[tuple[str, tuple[Entry, ...]]]:
    """File and entries of every bucket, from a manifest that is whole and the announced one."""
    content = _read_manifest(directory)
    found = _manifest_of(content)
    if found != announced:
        raise _refused(directory, f"{MANIFEST} is that of another publication (version {found.version} there)", announced.version)
    return [(bucket["file"], tuple(_entry_of(*tensor) for tensor in bucket["tensors"])) for bucket in content["buckets"]]


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        content = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _refused(directory, f"{MANIFEST} is not there (is the run directory the same on all nodes?)") from None
    except (OSError, ValueError) as error:
        raise _refused(directory, f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("kind") != KIND or content.get("schema_version") != SCHEMA_VERSION:
        raise _refused(directory, f"{MANIFEST} is not a manifest of weights of schema {SCHEMA_VERSION}")
    if content.pop("self_sha256", None) != _digest(content):
        raise _refused(directory, f"{MANIFEST} was altered: its own checksum does not match")
    return content


def _read_bucket(path: Path, entries: tuple[Entry, ...]) -> Bucket:
    data = np.zeros(entries[-1].end_bytes, dtype=np.uint8)
    try:
        with safe_open(path, framework="pt") as file:
            for entry in entries:
                tensor = file.get_tensor(entry.spec.name)
                if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (entry.spec.shape, entry.spec.dtype):
                    raise _refused(path, f"{entry.spec.name} has another shape or dtype than was published")
                view_of(data, entry).copy_(tensor)
    except (SafetensorError, OSError) as error:
        raise _refused(path, f"cannot be read: {error}") from error
    return Bucket(data=data, entries=entries, fingerprint=None)


def _to_text(manifest: Manifest, files: Sequence[str], buckets: Sequence[Bucket]) -> str:
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "version": manifest.version,
        "num_bytes": manifest.num_bytes,
        "temperature": manifest.temperature,
        "probe_tokens": manifest.probe_tokens,
        "probe_logprobs": manifest.probe_logprobs,
        "previous_logprobs": manifest.previous_logprobs,
        "buckets": [
            {"file": file, "fingerprint": f"{fingerprint:016x}", "tensors": [_tensor_line(entry) for entry in bucket.entries]}
            for file, fingerprint, bucket in zip(files, manifest.fingerprints, buckets, strict=True)
        ],
    }
    return json.dumps({**content, "self_sha256": _digest(content)}) + "\n"


def _manifest_of(content: dict[str, Any]) -> Manifest:
    return Manifest(
        version=content["version"],
        num_bytes=content["num_bytes"],
        fingerprints=tuple(int(bucket["fingerprint"], 16) for bucket in content["buckets"]),
        temperature=content["temperature"],
        probe_tokens=tuple(tuple(tokens) for tokens in content["probe_tokens"]),
        probe_logprobs=tuple(tuple(logprobs) for logprobs in content["probe_logprobs"]),
        previous_logprobs=tuple(tuple(logprobs) for logprobs in content["previous_logprobs"]),
    )


def _tensor_line(entry: Entry) -> list[Any]:
    spec = entry.spec
    return [spec.name, spec.dtype, spec.shape, spec.aliases, entry.offset_bytes]


def _entry_of(name: str, dtype: str, shape: Sequence[int], aliases: Sequence[str], offset_bytes: int) -> Entry:
    return Entry(spec=Spec(name=name, dtype=dtype, shape=tuple(shape), aliases=tuple(aliases)), offset_bytes=offset_bytes)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def _told(root: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise AsyncrlError(
            f"a version cannot be written to {root}: {error}",
            hint="look at its free space and permissions, or --set weights.transport=object-store",
        ) from error


def _refused(path: Path, why: str, version: int | None = None) -> DamagedWeights:
    wanted = "" if version is None else f" of version {version}"
    return DamagedWeights(
        f"weights{wanted} in {path} are refused: {why}", hint="the worker keeps its old weights; `asyncrl resume` publishes anew"
    )
