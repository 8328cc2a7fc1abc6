"""Weights at rest, read without ranks: a trainer's checkpoint, or safetensors files of one version.

Tensors go by their first names, tied ones once. `read` takes some names at a time, so that a model larger than the memory
can be copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.train.trainer_state import read_counters

WEIGHT_PREFIX = "weight/"


class SavedWeights(Protocol):
    """`shapes`: of every tensor."""

    shapes: Mapping[str, tuple[int, ...]]

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """RefusedError if a file is damaged or gone."""


class TrainerWeights:
    """The float32 master weights of a checkpoint, written by any number of ranks."""

    def __init__(self, directory: Path) -> None:
        read_counters(directory)
        try:
            items = FileSystemReader(directory).read_metadata().state_dict_metadata
        except OSError as error:
            raise _gone(directory, error) from error
        found = {key.removeprefix(WEIGHT_PREFIX): item for key, item in items.items() if key.startswith(WEIGHT_PREFIX)}
        self._saved = {name: item for name, item in found.items() if isinstance(item, TensorStorageMetadata)}
        self.shapes = {name: tuple(item.size) for name, item in self._saved.items()}
        self._directory = directory

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        tensors = {f"{WEIGHT_PREFIX}{n}": torch.empty(self.shapes[n], dtype=self._saved[n].properties.dtype) for n in names}
        try:
            with warnings.catch_warnings():
                # It also warns where one process is what was asked for.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
                dcp.load(tensors, storage_reader=FileSystemReader(self._directory), no_dist=True)
        except OSError as error:
            raise _gone(self._directory, error) from error
        return {key.removeprefix(WEIGHT_PREFIX): tensor for key, tensor in tensors.items()}


class FileWeights:
    """One version in safetensors files: a kept one, or the published weights inside of a checkpoint."""

    def __init__(self, paths: Collection[Path]) -> None:
        self._path_of: dict[str, Path] = {}
        self.shapes = {}
        for path in sorted(paths):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - no mapping
                        self.shapes[name] = tuple(file.get_slice(name).get_shape())
                        self._path_of[name] = path
            except (SafetensorError, OSError) as error:
                raise _gone(path, error) from error

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        try:
            with ExitStack() as stack:
                files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in {self._path_of[n] for n in names}}
                return {name: files[self._path_of[name]].get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise _gone(self._path_of[next(iter(names))].parent, error) from error


def _gone(path: Path, error: Exception) -> RefusedError:
    return RefusedError(
        f"weights in {path} cannot be read: {error}",
        hint="a live run may have replaced them: export again, or take another checkpoint or --version",
    )
