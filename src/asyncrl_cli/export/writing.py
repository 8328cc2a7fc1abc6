"""Writes an export's directory: the model's files or LoRA's adapters. Imports torch and transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError

from asyncrl_cli.base.errors import AsyncrlError, RefusedError, first_names
from asyncrl_cli.base.storage import appearing_directory
from asyncrl_cli.export.adapters import merged_weights, write_adapter
from asyncrl_cli.export.saved_weights import Read, SavedWeights
from asyncrl_cli.export.source import Source
from asyncrl_cli.models.saved_form import SavedForm, skeleton
from asyncrl_cli.weights.buckets import torch_dtype
from asyncrl_cli.weights.model_files import CONFIG, copy_model_files, write_index, write_weights

MB = 10**6


def write_adapters(source: Source, target: Path, dtype_name: str) -> tuple[tuple[str, ...], int, int]:
    """As `write_model`, for the adapters alone."""
    with _writing(target) as working:
        return write_adapter(source, torch_dtype(dtype_name), working)


def write_model(
    source: Source,
    target: Path,
    model_files: Path,
    base_model: Path | None,
    dtype_name: str,
    max_file_bytes: int,
    progress: Callable[..., None],
) -> tuple[tuple[str, ...], int, int]:
    """Write the directory. Returns the weight files' names, and the parameters and bytes in them. Holds one
    file's tensors at a time. `base_model`: that of LoRA's adapters, if it is not where the profile says."""
    dtype = torch_dtype(dtype_name)
    form = SavedForm(skeleton(model_files, trust_remote_code=source.profile.model.trust_remote_code))
    weights = merged_weights(source, base_model) if source.has_adapters else source.weights
    sizes, read = fitted(form, weights, model_files)
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda elements: elements * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    num_bytes, total_mb = 0, max(sum(sizes.values()) * dtype.itemsize // MB, 1)
    with _writing(target) as working:
        copy_model_files(model_files, working, str(dtype).removeprefix("torch."))
        for name, names in split.filename_to_tensors.items():
            progress(f"writing {target.name} (MB)", num_bytes // MB, total_mb)
            cast = {
                name: (t.to(dtype) if t.is_floating_point() else t).contiguous()
                for name, t in read(names).items()
            }
            write_weights(cast, working / name)
            num_bytes += sum(tensor.nbytes for tensor in cast.values())
        write_index(working, split.tensor_to_filename, num_bytes)
    return tuple(split.filename_to_tensors), sum(sizes.values()), num_bytes


@contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """A directory that is renamed to `target` when it is complete. Raises AsyncrlError if it cannot be
    written."""
    try:
        with appearing_directory(target.absolute()) as working:
            yield working
    except (OSError, SafetensorError) as error:  # safetensors raises its own error on a full disk
        why = getattr(error, "strerror", None) or str(error)
        raise AsyncrlError(
            f"{target} cannot be written: {why}", hint="choose another place with --out DIR"
        ) from error


def fitted(form: SavedForm, weights: SavedWeights, model_files: Path) -> tuple[dict[str, int], Read]:
    """The number of elements of every tensor that the files will hold, in the model's order, and a function
    that reads tensors.

    If transformers splits or joins tensors between memory (a trainer's weights) and files (published
    weights), all of them are read and held at once, because one tensor of a file may be made of several.
    Raises RefusedError unless names and shapes match the model's parameters and persistent buffers (tied ones
    once).
    """
    tensors, in_files = form.memory, form.to_files(form.memory)
    is_as_in_files = weights.shapes.keys() == in_files.keys()
    _check_shapes(weights.shapes, in_files if is_as_in_files else tensors, model_files)
    if is_as_in_files or not form.converts:
        return {name: tensor.numel() for name, tensor in in_files.items()}, weights.read
    whole = form.to_files(weights.read(list(tensors)))
    return {name: tensor.numel() for name, tensor in whole.items()}, lambda names: {
        name: whole[name] for name in names
    }


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor], model_files: Path
) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = {
        "missing": [name for name in expected if name not in shapes],
        "unknown": [name for name in shapes if name not in expected],
        "of another shape": [name for name in shapes if name in expected and shapes[name] != expected[name]],
    }
    found = "; ".join(f"{what}: {first_names(names)}" for what, names in problems.items() if names)
    if found:
        raise RefusedError(
            f"the weights do not fit {model_files / CONFIG}: {found}",
            hint="give a directory with config.json and the tokenizer: --model DIR",
        )
