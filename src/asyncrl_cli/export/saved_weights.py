"""Weights at rest, read without ranks: a trainer's checkpoint, or safetensors files of one version.

Tensors go by their first names, tied ones once; `shapes` are those of all. `read` takes some names at a time, so that a model
larger than the memory can be copied; it raises RefusedError if a file is damaged or gone.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.train.state_reader import StateReader, read_tensors
from asyncrl_cli.train.trainer_state import read_counters

WEIGHT_PREFIX = "weight/"


class TrainerWeights:
    """The float32 master weights of a checkpoint, written by any number of ranks."""

    def __init__(self, directory: Path) -> None:
        read_counters(directory)
        items = StateReader(directory).read_metadata().state_dict_metadata
        self._saved = {key.removeprefix(WEIGHT_PREFIX): item for key, item in items.items() if key.startswith(WEIGHT_PREFIX)}
        self.shapes = {name: tuple(item.size) for name, item in self._saved.items()}
        self._directory = directory

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        tensors = {f"{WEIGHT_PREFIX}{n}": torch.empty(self.shapes[n], dtype=self._saved[n].properties.dtype) for n in names}
        read_tensors(tensors, self._directory)
        return {key.removeprefix(WEIGHT_PREFIX): tensor for key, tensor in tensors.items()}


class FileWeights:
    """One version in safetensors files: a kept one, or the published weights inside of a checkpoint."""

    def __init__(self, paths: Collection[Path]) -> None:
        self._path_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
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


SavedWeights = TrainerWeights | FileWeights


def _gone(path: Path, error: Exception) -> RefusedError:
    return RefusedError(
        f"weights in {path} cannot be read: {error}",
        hint="a live run may have replaced them: export again, or take another checkpoint or --version",
    )
