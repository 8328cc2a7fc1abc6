"""Kept versions: published weights on disk as ordinary Hugging Face directories, for audits and tests.

    <root>/version-000012/   model.safetensors, config, tokenizer: AutoModelForCausalLM.from_pretrained opens it

A version appears by a rename, complete or not at all.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from asyncrl_cli.weights.buckets import Bucket, parameter_dtype, unpack
from asyncrl_cli.weights.model_files import WEIGHTS, copy_model_files, write_weights

_VERSION_NAME = re.compile(r"version-(\d{6,})")


def version_directory(root: Path, version: int) -> Path:
    return root / f"version-{version:06d}"


def kept_versions(root: Path) -> list[int]:
    """Versions on disk, ascending."""
    names = (entry.name for entry in root.iterdir()) if root.is_dir() else ()
    return sorted(int(match[1]) for name in names if (match := _VERSION_NAME.fullmatch(name)))


def keep(root: Path, version: int, buckets: Sequence[Bucket], model_dir: Path, keep_versions: int | Literal["all"]) -> Path | None:
    """Write a version and remove those beyond the newest `keep_versions`. Returns its directory; None if 0 are kept.

    A version that is there already (a resumed run publishes it again) is replaced.
    """
    if keep_versions == 0:
        return None
    root.mkdir(parents=True, exist_ok=True)
    target = version_directory(root, version)
    temporary = root / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        copy_model_files(model_dir, temporary, parameter_dtype(buckets))
        write_weights(_first_names(buckets), temporary / WEIGHTS, version=str(version))
        sync_files(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if keep_versions != "all":
        for old in [v for v in kept_versions(root) if v <= version][:-keep_versions]:
            shutil.rmtree(version_directory(root, old))
    return target


def sync_files(directory: Path) -> None:
    """fsync every file of a directory and the directory itself."""
    for path in (*sorted(p for p in directory.iterdir() if p.is_file()), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _first_names(buckets: Sequence[Bucket]) -> dict[str, torch.Tensor]:
    # Tied parameters go to disk once (safetensors refuses shared memory); the model's config ties them again.
    firsts: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        tensors = unpack(bucket)
        firsts.update((entry.spec.name, tensors[entry.spec.name]) for entry in bucket.entries)
    return firsts
