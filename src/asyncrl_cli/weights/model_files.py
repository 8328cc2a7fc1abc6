"""Hugging Face directories: copies of configuration and tokenizer, weight files and their index. Names and
finds the directories of versions. A library for trainer, workers, driver and export; it does not import
torch."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from asyncrl_cli.base.safe_files import load_json
from asyncrl_cli.base.storage import naming
from asyncrl_cli.models.inspection import WEIGHTS, WeightIndex
from asyncrl_cli.models.shape import tensor_shapes

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
RUN_COPY = "model"
"""Folder in a run's directory with a copy of its model directory without the weights, so that an export needs
nothing else."""
VERSIONS = "versions"
"""Folder in a run's directory with its kept versions."""
PUBLISHED_FILE = "published.safetensors"
"""In a checkpoint: the published version's weights, if they are not the trainer's own."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
MANIFEST, SCHEMA_VERSION = "manifest.json", 1
"""A version's own description in its directory (senders.py)."""
_VERSION_NAME = re.compile(r"version-(\d{6,})")
DTYPE_KEYS = ("dtype", "torch_dtype")


def file_fingerprint(content: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(content):016x}"


def version_directory(root: Path, version: int) -> Path:
    return root / f"version-{version:06d}"


def kept_versions(root: Path) -> list[int]:
    """Versions on disk, ascending."""
    names = (entry.name for entry in root.iterdir()) if root.is_dir() else ()
    return sorted(int(match[1]) for name in names if (match := _VERSION_NAME.fullmatch(name)))


def copy_model_files(model_dir: Path, target: Path, dtype: str | None = None) -> None:
    """Copy everything but weights to an existing directory. `dtype` is that of the weights to be written
    there. It is set in the copied configuration, because transformers and vLLM open weights with the dtype
    that it names."""
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, target / path.name)
    config = target / CONFIG
    if dtype is not None and config.exists():
        content = _with_dtype(json.loads(config.read_text(encoding="utf-8")), dtype)
        config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def keep_model_files(model_dir: Path, run_dir: Path) -> None:
    """Make the run's copy of the model files, unless it exists."""
    if not (run_dir / RUN_COPY).exists():
        working = run_dir / f".{RUN_COPY}.tmp"
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir()
        copy_model_files(model_dir, working)
        working.rename(run_dir / RUN_COPY)


def tensor_files(directory: Path) -> dict[str, Path]:
    """Which weight file holds each tensor. The directory must have been checked before
    (models/inspection.py)."""
    index = directory / f"{WEIGHTS}.index.json"
    if index.exists():
        return {name: directory / file for name, file in load_json(index, WeightIndex)["weight_map"].items()}
    return dict.fromkeys(tensor_shapes(directory / WEIGHTS), directory / WEIGHTS)


def write_weights(tensors: Mapping[str, torch.Tensor], path: Path, **header: str) -> None:
    """Write a safetensors file with the permissions of any new file. (By default, safetensors lets only the
    owner read it.)"""
    from safetensors.torch import save_file

    with naming(path):
        path.touch()
        mode = path.stat().st_mode & 0o777
        save_file(dict(tensors), path, metadata={"format": "pt", **header})
        path.chmod(mode)


def write_index(directory: Path, file_of: Mapping[str, str], num_bytes: int) -> None:
    """Write the index, which names the file of each tensor. A single file needs no index."""
    if len(set(file_of.values())) > 1:
        content = {"metadata": {"total_size": num_bytes}, "weight_map": dict(file_of)}
        index = directory / f"{WEIGHTS}.index.json"
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The configuration with `dtype`, under the key that transformers writes, at the top and in each part
    that names a dtype."""
    parts = {key: value for key, value in config.items() if key not in DTYPE_KEYS}
    for key, value in parts.items():
        if isinstance(value, dict) and value.keys() & set(DTYPE_KEYS):
            parts[key] = _with_dtype(value, dtype)
    return {**parts, "dtype": dtype}
