"""What a Hugging Face directory holds beside its tensors: configuration, tokenizer, names of its weight files, their index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.storage import naming

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
RUN_COPY = "model"
"""Below a run's directory: a copy of all but the weights of its model directory, so that an export needs nothing else."""
WEIGHTS = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
DTYPE_KEYS = ("dtype", "torch_dtype")


def copy_model_files(model_dir: Path, target: Path, dtype: str | None = None) -> None:
    """Copy everything but weights to an existing directory. `dtype`: of the weights that will lie there; the copied configuration
    names it, because transformers and vLLM open them in that dtype."""
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, target / path.name)
    config = target / CONFIG
    if dtype is not None and config.exists():
        content = _with_dtype(json.loads(config.read_text(encoding="utf-8")), dtype)
        config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def keep_model_files(model_dir: Path, run_dir: Path) -> None:
    """The run's own copy, made once."""
    if not (run_dir / RUN_COPY).exists():
        working = run_dir / f".{RUN_COPY}.tmp"
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir()
        copy_model_files(model_dir, working)
        working.rename(run_dir / RUN_COPY)


def write_weights(tensors: Mapping[str, torch.Tensor], path: Path, **header: str) -> None:
    """A safetensors file with its directory's permissions. (safetensors itself lets only the writer read it.)"""
    from safetensors.torch import save_file

    with naming(path):
        save_file(dict(tensors), path, metadata={"format": "pt", **header})
    path.chmod(path.parent.stat().st_mode & 0o666)


def weight_file(index: int, num_files: int) -> str:
    """The name of the file of that index (from 0) of so many."""
    return WEIGHTS if num_files == 1 else f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"


def write_index(directory: Path, file_of: Mapping[str, str], num_bytes: int) -> None:
    """Which tensor lies in which file; a directory with one file has no index."""
    if len(set(file_of.values())) > 1:
        content = {"metadata": {"total_size": num_bytes}, "weight_map": dict(file_of)}
        (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Set once at the top, under the name that transformers writes, and in each part of the model that has it."""
    parts = {key: _with_dtype(value, dtype) if _says_dtype(value) else value for key, value in config.items()}
    return {**{key: value for key, value in parts.items() if key not in DTYPE_KEYS}, "dtype": dtype}


def _says_dtype(value: Any) -> bool:
    return isinstance(value, dict) and any(key in value for key in DTYPE_KEYS)
