"""Versions on disk that say what they are: `manifest.json` beside the weight files, for workers that get them by path.

    {"schema_version": 1, "version": 12, "files": {"model.safetensors": "<xxh3_64 of the file, 16 hex digits>"}}

Our own senders write it, and so may any other trainer: `xxhsum -H3` computes such a fingerprint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from asyncrl_cli.errors import RefusedError, first_names
from asyncrl_cli.safe_files import Count, load_json
from asyncrl_cli.weights.buckets import Bucket, DamagedWeights, Packing, Spec, dtype_name, plan_layout
from asyncrl_cli.weights.versions import Manifest

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """The content of manifest.json."""

    schema_version: int
    version: Count
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class InMemory:
    """A bucket's ref: the bucket itself."""

    bucket: Bucket

    def read(self) -> Bucket:
        return self.bucket


def write_manifest(directory: Path, version: int) -> None:
    """Describe the weight files of a directory."""
    files = {path.name: _fingerprint(path.read_bytes()) for path in sorted(directory.glob("*.safetensors"))}
    content = {"schema_version": SCHEMA_VERSION, "version": version, "files": files}
    (directory / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_version(directory: Path) -> tuple[Manifest, list[InMemory]]:
    """A version and its buckets, one per file, for `Loader.prefetch`. Blocks; takes the memory of the whole version.

    Raises RefusedError for a manifest that cannot be used, DamagedWeights for a file that is missing, unreadable or another one.
    """
    told = load_json(directory / MANIFEST, OnDisk, hint="it names the version and a fingerprint for each weight file")
    if told.schema_version != SCHEMA_VERSION or not told.files or any(Path(name).name != name for name in told.files):
        raise RefusedError(f"{directory / MANIFEST} is refused: schema {told.schema_version}, files {first_names([*told.files])}")
    buckets = [_bucket(directory / name, fingerprint) for name, fingerprint in sorted(told.files.items())]
    fingerprints = tuple(bucket.fingerprint for bucket in buckets)
    num_bytes = sum(len(bucket.data) for bucket in buckets)
    manifest = Manifest(version=told.version, num_bytes=num_bytes, fingerprints=fingerprints, temperature=1.0)
    return manifest, [InMemory(bucket) for bucket in buckets]


def _bucket(path: Path, fingerprint: str) -> Bucket:
    try:
        content = path.read_bytes()
        if (found := _fingerprint(content)) != fingerprint:
            raise DamagedWeights(f"{path} has the fingerprint {found}, its manifest says {fingerprint}")
        return _packed(load_tensors(content))
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedWeights(f"{path} cannot be read: {error}") from error


def _packed(tensors: Mapping[str, torch.Tensor]) -> Bucket:
    specs = [Spec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape)) for name, tensor in tensors.items()]
    packing = Packing(plan_layout(specs, sys.maxsize))
    for name, tensor in tensors.items():
        packing.put(name, tensor)
    return packing.seal()[0]


def _fingerprint(content: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(content):016x}"
