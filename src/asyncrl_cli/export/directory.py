"""Writing the directory: file by file under a hidden name, flushed, then renamed; whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from asyncrl_cli.checkpoint.files import fsync_directory
from asyncrl_cli.errors import AsyncrlError, RefusedError
from asyncrl_cli.weights.buckets import torch_dtype
from asyncrl_cli.weights.disk import sync_files
from asyncrl_cli.weights.model_files import copy_model_files, weight_file, write_index, write_weights

Read = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
Progress = Callable[[str, int, int], None]
MB = 10**6


def check_target(target: Path) -> None:
    """RefusedError if something is there already."""
    if target.exists() and not target.is_dir():
        raise RefusedError(f"{target} is a file", hint="--out DIR names a directory that is not there yet, or is empty")
    if target.is_dir() and any(target.iterdir()):
        raise RefusedError(f"{target} exists and is not empty", hint="--out DIR names another directory: nothing is overwritten")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    files: tuple[str, ...]
    parameters: int
    num_bytes: int


def write_directory(
    target: Path,
    sizes: Mapping[str, int],
    read: Read,
    *,
    dtype: str,
    model_files: Path,
    max_file_bytes: int,
    progress: Progress,
) -> Written:
    """`sizes`: elements of every tensor; `read` gives some of them, floating ones in any dtype. One file's tensors are in
    memory at a time.

    Raises:
        AsyncrlError: if the disk does not take it; nothing is left then.
    """
    plan = plan_files(sizes, torch_dtype(dtype).itemsize, max_file_bytes)
    names = [weight_file(index, len(plan)) for index in range(len(plan))]
    num_bytes, total_mb = 0, max(sum(sizes.values()) * torch_dtype(dtype).itemsize // MB, 1)
    with _appearing(target) as working:
        copy_model_files(model_files, working, dtype)
        for name, tensors in zip(names, plan, strict=True):
            progress(f"writing {target.name} (MB)", num_bytes // MB, total_mb)
            num_bytes += _write_file(working / name, read(tensors), torch_dtype(dtype))
        write_index(working, {tensor: name for name, tensors in zip(names, plan, strict=True) for tensor in tensors}, num_bytes)
    return Written(files=tuple(names), parameters=sum(sizes.values()), num_bytes=num_bytes)


def plan_files(sizes: Mapping[str, int], value_bytes: int, max_file_bytes: int) -> list[list[str]]:
    """Tensors in order, as many per file as fit; one that is larger goes alone."""
    files: list[list[str]] = []
    filled_bytes = 0
    for name, elements in sizes.items():
        num_bytes = elements * value_bytes
        if not files or filled_bytes + num_bytes > max_file_bytes:
            files.append([])
            filled_bytes = 0
        files[-1].append(name)
        filled_bytes += num_bytes
    return files


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> int:
    cast = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous() for name, t in tensors.items()}
    write_weights(cast, path)
    return sum(tensor.nbytes for tensor in cast.values())


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A hidden neighbour of `target`, which takes its name at the end of the block, or is removed."""
    target = target.absolute()
    working = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir()
        yield working
        sync_files(working)
        working.rename(target)
        fsync_directory(target.parent)
    except (OSError, SafetensorError) as error:  # a disk that is full while safetensors writes is the latter
        why = getattr(error, "strerror", None) or str(error)
        raise AsyncrlError(f"{target} cannot be written: {why}", hint="--out DIR names another place for it") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)
