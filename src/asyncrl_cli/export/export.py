"""`asyncrl export`, as a function: find the weights, check them against the configuration, write the directory.

find_source ──> find_model_files ──> skeleton, check_fit ──> files of at most so many bytes ──> Exported

The directory is written under a hidden name, flushed and renamed: it is whole or not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError

from asyncrl_cli.errors import AsyncrlError, RefusedError
from asyncrl_cli.export.model_files import check_fit, find_model_files
from asyncrl_cli.export.saved_weights import SavedWeights
from asyncrl_cli.export.source import Source, find_source
from asyncrl_cli.models.check import check_config
from asyncrl_cli.storage import appearing_directory
from asyncrl_cli.weights.buckets import torch_dtype
from asyncrl_cli.weights.model_files import copy_model_files, write_index, write_weights

if TYPE_CHECKING:
    from asyncrl_cli.models.saved_form import SavedForm

MB = 10**6
Dtype = Literal["float32", "bfloat16"]
Read = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""Some tensors by name, floating ones in any dtype."""
Progress = Callable[..., None]
"""Called with (what is being done) or (what is being done, done so far, of how many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    path: Path
    source: Source
    dtype: str
    parameters: int
    num_bytes: int
    files: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """`version` is null if the trainer has trained on since `after_version`."""
        return {
            "path": str(self.path),
            "run": self.source.run,
            "source": str(self.source.path),
            "version": self.source.version,
            "after_version": self.source.after_version,
            "step": self.source.step,
            "dtype": self.dtype,
            "parameters": self.parameters,
            "num_bytes": self.num_bytes,
            "files": list(self.files),
            "passed_over": list(self.source.passed_over),
        }


def export(
    argument: str,
    *,
    runs_dir: Path,
    version: int | None = None,
    out: Path | None = None,
    dtype: Dtype | None = None,
    model: Path | None = None,
    max_file_bytes: int,
    progress: Progress = lambda *_: None,
) -> Exported:
    """`dtype` None: the one in which the trainer publishes. `out` None: below `exports/` in the run's directory.

    Raises:
        ConfigError, RefusedError, PreflightError: see `find_source`, `find_model_files`, `check_fit`; or `out` is not empty.
        AsyncrlError: if the directory cannot be written; nothing is left then.
    """
    if out is not None:
        _check_target(out)  # before every byte of the checkpoint is read
    source = find_source(argument, runs_dir, version, progress)
    name = source.path.name if version is None else f"version-{version:06d}"
    target = out or (Path(f"{source.run}-{name}") if source.run_dir is None else source.run_dir / "exports" / name)
    _check_target(target)
    model_files = find_model_files(source.run_dir, source.profile, model)
    progress("reading the configuration")
    check_config(model_files)
    from asyncrl_cli.models.saved_form import SavedForm, skeleton  # imports transformers: seconds that an error above does not cost

    form = SavedForm(skeleton(model_files, trust_remote_code=source.profile.model.trust_remote_code))
    tensors, is_as_in_files = check_fit(form, source.weights.shapes, model_files)
    sizes, read = _as_in_files(None if is_as_in_files else form, tensors, source.weights)
    chosen = dtype or source.profile.model.dtype
    files, num_bytes = _write(target, model_files, sizes, read, torch_dtype(chosen), max_file_bytes, progress)
    return Exported(
        path=target, source=source, dtype=chosen, parameters=sum(sizes.values()), num_bytes=num_bytes, files=tuple(files)
    )


def _write(
    target: Path,
    model_files: Path,
    sizes: Mapping[str, int],
    read: Read,
    dtype: torch.dtype,
    max_file_bytes: int,
    progress: Progress,
) -> tuple[list[str], int]:
    """Names of the weight files and bytes of all tensors. One file's tensors are in memory at a time."""
    split = split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=lambda elements: elements * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    num_bytes, total_mb = 0, max(sum(sizes.values()) * dtype.itemsize // MB, 1)
    try:
        with appearing_directory(target.absolute()) as working:
            copy_model_files(model_files, working, str(dtype).removeprefix("torch."))
            for name, names in split.filename_to_tensors.items():
                progress(f"writing {target.name} (MB)", num_bytes // MB, total_mb)
                cast = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous() for name, t in read(names).items()}
                write_weights(cast, working / name)
                num_bytes += sum(tensor.nbytes for tensor in cast.values())
            write_index(working, split.tensor_to_filename, num_bytes)
    except (OSError, SafetensorError) as error:  # a disk that is full while safetensors writes is the latter
        why = getattr(error, "strerror", None) or str(error)
        raise AsyncrlError(f"{target} cannot be written: {why}", hint="--out DIR names another place for it") from error
    return list(split.filename_to_tensors), num_bytes


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise RefusedError(f"{target} is a file", hint="--out DIR names a directory that is not there yet, or is empty")
    if target.is_dir() and any(target.iterdir()):
        raise RefusedError(f"{target} exists and is not empty", hint="--out DIR names another directory: nothing is overwritten")


def _as_in_files(form: SavedForm | None, tensors: Mapping[str, torch.Tensor], weights: SavedWeights) -> tuple[dict[str, int], Read]:
    """Elements of every tensor that the files shall hold, and how to read some of them.

    Where transformers splits or joins tensors between memory and files, all of them are read and held at once: a tensor of a
    file may come of several. Else (also with no `form`: they are as in files) they are read as they are asked for.
    """
    if form is None or not form.converts:
        return {name: tensor.numel() for name, tensor in tensors.items()}, weights.read
    whole = form.to_files(weights.read(list(tensors)))
    return {name: tensor.numel() for name, tensor in whole.items()}, lambda names: {name: whole[name] for name in names}
