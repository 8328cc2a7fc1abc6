"""Reads saved weights, without ranks: a trainer's, written by any number of ranks, or those of a published
version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.train.trainer_state import CRITIC, SavedState

WEIGHT_PREFIX = "weight/"
Read = Callable[[Collection[str]], Mapping[str, torch.Tensor]]
"""Reads some tensors by name, so that a model larger than memory can be copied. RefusedError if a file is
damaged or gone."""


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Shapes of all tensors by name, and how to read some of them. Tied tensors appear once, under their
    first name."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Read


def trainer_weights(directory: Path) -> SavedWeights:
    """The policy's float32 master weights in a checkpoint, written by any number of ranks."""
    saved = SavedState(directory)
    weights = {
        key.removeprefix(WEIGHT_PREFIX): shape
        for key, shape in saved.shapes.items()
        if key.startswith(WEIGHT_PREFIX)
    }
    shapes = {name: shape for name, shape in weights.items() if not name.startswith(CRITIC)}

    def read(names: Collection[str]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty(shapes[name], dtype=torch.float32) for name in names}
        for name, tensor in tensors.items():
            saved.read(f"{WEIGHT_PREFIX}{name}", tensor)
        return tensors

    return SavedWeights(shapes, read)


def file_weights(paths: Collection[Path]) -> SavedWeights:
    """One version in safetensors files: a kept version, or the published weights inside a checkpoint."""
    path_of: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(paths):
        with _opened(path) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
        path_of |= {name: path for name in shapes if name not in path_of}

    def read(names: Collection[str]) -> dict[str, torch.Tensor]:
        with contextlib.ExitStack() as stack:
            files = {path: stack.enter_context(_opened(path)) for path in {path_of[name] for name in names}}
            return {name: files[path_of[name]].get_tensor(name) for name in names}

    return SavedWeights(shapes, read)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file. RefusedError if it cannot be opened, or read during the block."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise RefusedError(
            f"weights in {path} cannot be read: {error}",
            hint="a live run may have replaced them: export again, or take another checkpoint or --version",
        ) from error
