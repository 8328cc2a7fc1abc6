"""Trainer state on the host and on disk, for a resume that continues bit for bit. Reading it never executes code in it.

    <directory>/  .metadata, *.distcp       torch distributed checkpoint: weights, moments, window's first weights, RNG
                  trainer.json              counters, written by rank 0
                  published.safetensors     the published version's weights, if it is not the trainer's own

A checkpoint of N ranks loads on any number of ranks: the shards are DTensors. (RNG states follow their rank; the
trainer itself draws no random numbers.)

torch writes `.metadata` as a pickle, and a pickle can call anything. So only the classes that torch writes are loaded, the
result is checked, and only files in the directory itself are read: another person's checkpoint is safe to open.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.errors import AsyncrlError, RefusedError
from asyncrl_cli.safe_files import MAX_JSON_BYTES, Count, load_json, open_regular, reason
from asyncrl_cli.storage import naming, sync_files
from asyncrl_cli.train.ranks import Ranks

COUNTERS_FILE = "trainer.json"
PUBLISHED_FILE = "published.safetensors"
HostState = dict[str, torch.Tensor]
"""One rank's share, all on the host: shards, wrapped as DTensors on the host mesh, and `rng/...`, the rank's random state."""
METADATA = ".metadata"


class Counters(TypedDict):
    """`trainer.json`, as rank 0 writes it. `has_window_first`: 1 if the window's first weights are among the tensors."""

    schema_version: Literal[1]
    ranks: Count
    step: Count
    optimizer_steps: Count
    has_window_first: Count


def to_host(ranks: Ranks, like: dict[str, DTensor], local_tensors: dict[str, torch.Tensor]) -> HostState:
    """Copy this rank's shards and its random state to the host.

    Keys of `local_tensors` are `<kind>/<parameter>`; shape and sharding are those of the parameter in `like`.
    """
    state: HostState = {key: _host_shard(ranks, like[key.split("/", 1)[1]], local) for key, local in local_tensors.items()}
    state[f"rng/cpu/{ranks.rank}"] = torch.get_rng_state()
    if ranks.device.type == "cuda":
        state[f"rng/cuda/{ranks.rank}"] = torch.cuda.get_rng_state(ranks.device)
    return state


def write_state(ranks: Ranks, state: HostState, counters: Mapping[str, int], directory: Path) -> None:
    """Write and fsync. A collective over `host_group` only, so it may run in a thread beside training.

    Raises the system's OSError if a rank could not write.
    """
    directory.mkdir(parents=True, exist_ok=True)
    writer = _Writer(directory, sync_files=True)
    try:
        dcp.save(state, storage_writer=writer, process_group=ranks.host_group)
    except CheckpointException as error:  # derives from BaseException, and its text is every rank's traceback
        rank, (first, _) = next(iter(error.failures.items()))
        with naming(directory):
            raise first if isinstance(first, OSError) else AsyncrlError(f"rank {rank} failed: {first}") from error
    if ranks.rank == 0:
        content = Counters(schema_version=1, ranks=ranks.world_size, **counters)
        (directory / COUNTERS_FILE).write_text(json.dumps(content, indent=1) + "\n")
        sync_files(directory)


class _Writer(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """If a write fails, torch raises a RuntimeError whose context is the system's OSError; raise the latter."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def read_counters(directory: Path) -> Counters:
    """Read `trainer.json`. RefusedError if this is not a trainer state, or one of another schema."""
    return load_json(directory / COUNTERS_FILE, Counters, hint="take another checkpoint")


def saved_keys(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every saved tensor."""
    return {key: tuple(item.size) for key, item in StateReader(directory).read_metadata().state_dict_metadata.items()}


def read_state(ranks: Ranks, state: HostState, directory: Path) -> None:
    """Fill `state` from disk, and set the random state saved there. A collective.

    RefusedError if a tensor is missing or has another shape.
    """
    saved = saved_keys(directory)
    lacking = {key for key, tensor in state.items() if saved.get(key) != tuple(tensor.shape)}
    for key in sorted(lacking):
        if not key.startswith("rng/"):
            raise RefusedError(
                f"{directory}: checkpoint is of another model: {key} is {saved.get(key, 'absent')}, "
                f"the model has {tuple(state[key].shape)}",
                hint="resume with the profile and the model that wrote it",
            )
    found = {key: tensor for key, tensor in state.items() if key not in lacking}
    read_tensors(found, directory, ranks.host_group)
    for key, tensor in found.items():
        if key.startswith("rng/cpu/"):
            torch.set_rng_state(tensor)
        elif key.startswith("rng/cuda/"):
            torch.cuda.set_rng_state(tensor)


def _host_shard(ranks: Ranks, parameter: DTensor, local: torch.Tensor) -> DTensor:
    host = torch.empty(local.shape, dtype=local.dtype).copy_(local)
    return DTensor.from_local(
        host, ranks.host_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"{name} is no layout")
    return layout


class _Frozen(type):
    """Metaclass of classes whose attributes cannot be set: a pickle could otherwise change a class for the whole process."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"the pickle tries to modify class {cls.__name__}")


def _maker(kind: Any) -> type:
    """A class for a pickle to call in place of `kind`: calling it makes an instance of `kind`."""
    return _Frozen(kind.__name__, (), {"__new__": lambda cls, *args: kind(*args) if args else kind.__new__(kind)})


WRITTEN: Mapping[tuple[str, str], Any] = {
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): _maker(PosixPath),
    ("pathlib._local", "PosixPath"): _maker(PosixPath),  # its name in Python 3.13
    **{
        (kind.__module__, kind.__name__): _maker(kind)
        for kind in (
            torch.Size,
            Metadata,
            MetadataIndex,
            TensorStorageMetadata,
            ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
        )
    },
}
"""Everything, besides dtypes, that torch pickles in the metadata of tensors."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in WRITTEN:
            return WRITTEN[module, name]
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no trainer state needs")


class StateReader(FileSystemReader):
    """torch's reader of a checkpoint's directory, with a safe unpickler for its metadata."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`. RefusedError unless it describes only tensors in files of this directory."""
        path = self._directory / METADATA
        try:
            with open_regular(path, max_bytes=MAX_JSON_BYTES) as file:
                found = _Unpickler(file).load()
            _check(found, self._directory)
        except Exception as error:  # unpickling a malformed file raises anything
            raise RefusedError(f"{path} cannot be read: {reason(error)}", hint="take another checkpoint") from error
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


def read_tensors(tensors: dict[str, Any], directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill `tensors` from `directory`. A collective over `group`; without a group, this process reads alone.

    Raises RefusedError if a file is missing or damaged, also if only another rank found it so.
    """
    try:
        with warnings.catch_warnings():
            if group is None:  # torch warns even though a single process is intended
                warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            dcp.load(tensors, storage_reader=StateReader(directory), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, RefusedError) or not isinstance(first, Exception):
            raise first from None
        raise RefusedError(
            f"trainer state in {directory} cannot be read: {reason(first)}", hint="take another checkpoint"
        ) from error


def _check(found: Any, directory: Path) -> None:
    """ValueError unless all items are tensors in files of `directory`: torch would unpickle other items, and read any path."""
    if not all(
        type(item) is TensorStorageMetadata and type(item.size) is torch.Size for item in found.state_dict_metadata.values()
    ):
        raise ValueError("its items are not all tensors")
    for name in sorted({place.relative_path for place in found.storage_data.values()}):
        if Path(name).name != name:
            raise ValueError(f"{name!r:.80} is not the name of a file in its directory")
        open_regular(directory / name).close()
