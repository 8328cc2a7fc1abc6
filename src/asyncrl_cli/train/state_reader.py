"""The trainer's state, read from disk without executing anything in it.

torch writes `.metadata` as a pickle, and a pickle can call anything. Here only the classes that torch writes can be loaded, the
result is checked, and only files of the directory itself are read: a checkpoint that somebody else has made is treated as data.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.safe_files import MAX_JSON_BYTES, open_regular, reason

METADATA = ".metadata"


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"{name} is no layout")
    return layout


class _Frozen(type):
    """A pickle can set attributes of any object it holds; set on a class they would last for the whole process. These refuse."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it would change the class {cls.__name__}")


def _maker(kind: Any) -> type:
    """What a pickle gets in place of the class `kind`: a class whose instances are those of `kind`."""
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
"""All that torch writes into the metadata of tensors, besides dtypes."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in WRITTEN:
            return WRITTEN[module, name]
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no trainer state needs")


class StateReader(FileSystemReader):
    """torch's reader of a checkpoint's directory, with metadata that are only data."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """RefusedError unless it describes tensors in files of this directory."""
        path = self._directory / METADATA
        try:
            with open_regular(path, max_bytes=MAX_JSON_BYTES) as file:
                found = _Unpickler(file).load()
            _check(found, self._directory)
        except Exception as error:  # an unpickler of what is no pickle raises anything
            raise RefusedError(f"{path} cannot be read: {reason(error)}", hint="take another checkpoint") from error
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


def read_tensors(tensors: dict[str, Any], directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill `tensors` from `directory`: a collective of `group`, or without one by this process alone.

    Raises RefusedError if a file is gone or damaged, also on another rank.
    """
    try:
        with warnings.catch_warnings():
            if group is None:  # it also warns where one process is what was asked for
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
    """Raises for anything but tensors in files of `directory`: torch unpickles other items in full, and reads any path."""
    if not all(
        type(item) is TensorStorageMetadata and type(item.size) is torch.Size for item in found.state_dict_metadata.values()
    ):
        raise ValueError("its items are not all tensors")
    for name in sorted({place.relative_path for place in found.storage_data.values()}):
        if Path(name).name != name:
            raise ValueError(f"{name!r:.80} is not the name of a file in its directory")
        open_regular(directory / name).close()
