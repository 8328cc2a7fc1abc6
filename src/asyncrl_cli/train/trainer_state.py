"""Trainer state on the host and on disk: what a resume needs to go on bit for bit.

    <directory>/  .metadata, *.distcp       torch distributed checkpoint: weights, moments, window's first weights, RNG
                  trainer.json              counters, written by rank 0
                  published.safetensors     the published version's weights, if it is not the trainer's own

A checkpoint of N ranks loads on any number of ranks: the shards are DTensors. (RNG states follow their rank; the
trainer itself draws no random numbers.)
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.tensor import DTensor
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.errors import AsyncrlError, RefusedError
from asyncrl_cli.safe_files import Count, load_json
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.state_reader import StateReader, read_tensors
from asyncrl_cli.weights.disk import sync_files

SCHEMA_VERSION = 1
COUNTERS_FILE = "trainer.json"


class Counters(TypedDict):
    """`trainer.json`, as rank 0 writes it. `has_window_first`: 1 if the window's first weights are among the tensors."""

    schema_version: Literal[1]
    ranks: Count
    step: Count
    optimizer_steps: Count
    has_window_first: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """One rank's share, all on the host. `shards` are wrapped as DTensors on the host mesh; `rng` is this rank's."""

    shards: dict[str, DTensor]
    rng: dict[str, torch.Tensor]
    counters: dict[str, int]


def to_host(
    ranks: Ranks,
    like: dict[str, DTensor],
    local_tensors: dict[str, torch.Tensor],
    counters: dict[str, int],
) -> HostState:
    """Copy shards to the host. Keys of `local_tensors` end in a parameter's name, which tells shape and sharding."""
    shards = {key: _host_shard(ranks, like[key.split("/", 1)[1]], local) for key, local in local_tensors.items()}
    return HostState(shards=shards, rng=_rng_state(ranks), counters=counters)


def write_state(ranks: Ranks, state: HostState, directory: Path) -> None:
    """Write and fsync. A collective over `host_group` only, so it may run in a thread beside training.

    Raises OSError with what the system said, where this rank could not write.
    """
    directory.mkdir(parents=True, exist_ok=True)
    writer = FileSystemWriter(directory, sync_files=True)
    writer.fs = files = _TellingFiles()
    try:
        dcp.save({**state.shards, **state.rng}, storage_writer=writer, process_group=ranks.host_group)
    except CheckpointException as error:  # not even an Exception, and its text is every rank's traceback
        failures = error.failures
        first = files.error or next(iter(failures.values()))[0]
        raise first if isinstance(first, OSError) else AsyncrlError(f"rank {next(iter(failures))} failed: {first}") from error
    if ranks.rank == 0:
        counters = Counters(schema_version=SCHEMA_VERSION, ranks=ranks.world_size, **state.counters)
        (directory / COUNTERS_FILE).write_text(json.dumps(counters, indent=1) + "\n")
        sync_files(directory)


class _TellingFiles(FileSystem):
    """Keeps the first error of a write: torch ends a half-written file with an error of its own, which hides it."""

    error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with io.BufferedWriter(_TellingFile(path, self)) as stream:
            yield stream


class _TellingFile(io.FileIO):
    def __init__(self, path: str | os.PathLike[str], files: _TellingFiles) -> None:
        super().__init__(path, "wb")
        self._files = files

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = os.fspath(self.name)
            self._files.error = self._files.error or error
            raise


def read_counters(directory: Path) -> Counters:
    """Raises RefusedError if this is no trainer state, or one of another schema."""
    return load_json(directory / COUNTERS_FILE, Counters, hint="take another checkpoint")


def saved_keys(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every saved tensor."""
    return {key: tuple(item.size) for key, item in StateReader(directory).read_metadata().state_dict_metadata.items()}


def read_state(ranks: Ranks, state: HostState, directory: Path) -> None:
    """Fill the host tensors of `state` from disk. A collective.

    Raises:
        RefusedError: if the checkpoint lacks a tensor or has it in another shape.
    """
    saved = saved_keys(directory)
    for key, tensor in state.shards.items():
        if saved.get(key) != tuple(tensor.shape):
            raise RefusedError(
                f"{directory}: checkpoint is of another model: {key} is {saved.get(key, 'absent')}, "
                f"the model has {tuple(tensor.shape)}",
                hint="resume with the profile and the model that wrote it",
            )
    rng = {key: tensor for key, tensor in state.rng.items() if saved.get(key) == tuple(tensor.shape)}
    read_tensors({**state.shards, **rng}, directory, ranks.host_group)
    _restore_rng(rng)


def _host_shard(ranks: Ranks, parameter: DTensor, local: torch.Tensor) -> DTensor:
    host = torch.empty(local.shape, dtype=local.dtype).copy_(local)
    return DTensor.from_local(
        host, ranks.host_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _rng_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    rng = {f"rng/cpu/{ranks.rank}": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        rng[f"rng/cuda/{ranks.rank}"] = torch.cuda.get_rng_state(ranks.device)
    return rng


def _restore_rng(rng: dict[str, torch.Tensor]) -> None:
    for key, tensor in rng.items():
        if key.startswith("rng/cuda/"):
            torch.cuda.set_rng_state(tensor)
        else:
            torch.set_rng_state(tensor)
