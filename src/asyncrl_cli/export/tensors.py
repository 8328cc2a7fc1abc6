"""The tensors of an export: read from a trainer's checkpoint (written by any number of ranks) or from a
published version, merged with LoRA's adapters, and written as a model's directory or as peft's adapter.
Imports torch and transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from asyncrl_cli.base.errors import AsyncrlError, RefusedError, first_names
from asyncrl_cli.base.storage import appearing_directory
from asyncrl_cli.export.source import Source
from asyncrl_cli.models.model_directory import resolve_model
from asyncrl_cli.models.model_files import (
    CONFIG,
    check_model_directory,
    copy_model_files,
    write_index,
    write_weights,
)
from asyncrl_cli.models.saved_form import (
    ADAPTER,
    SavedForm,
    adapter_names,
    merged,
    persistent_buffers,
    scale_of,
    skeleton,
)
from asyncrl_cli.tasks.task import load_task
from asyncrl_cli.train.trainer_state import CRITIC, PUBLISHED, SavedState
from asyncrl_cli.weights.buckets import torch_dtype

MB = 10**6
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
WEIGHT_PREFIX = "weight/"
Read = Callable[[Collection[str]], Mapping[str, torch.Tensor]]
"""Reads some tensors by name, so that a model larger than memory can be copied. RefusedError if a file is
damaged or gone."""


class Written(NamedTuple):
    """The names of the weight files, and the parameters and bytes in them."""

    files: tuple[str, ...]
    parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Shapes of all tensors by name, and how to read some of them. Tied tensors appear once, under their
    first name."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Read


def saved_weights(source: Source) -> SavedWeights:
    """The policy's float32 master weights or the published version in a checkpoint, written by any number of
    ranks, or one version in safetensors files. Raises RefusedError if a file is damaged."""
    shapes: dict[str, tuple[int, ...]] = {}
    if source.files:
        path_of: dict[str, Path] = {}
        for path in source.files:
            with _opened(path) as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
            path_of |= {name: path for name in shapes if name not in path_of}

        def read(names: Collection[str]) -> dict[str, torch.Tensor]:
            with ExitStack() as stack:
                paths = {path_of[name] for name in names}
                files = {path: stack.enter_context(_opened(path)) for path in paths}
                return {name: files[path_of[name]].get_tensor(name) for name in names}

    else:
        saved, prefix = SavedState(source.path), PUBLISHED if source.is_published else WEIGHT_PREFIX
        for key, shape in saved.shapes.items():
            name = key.removeprefix(prefix)
            if name != key and not name.startswith(CRITIC):
                shapes[name] = shape

        def read(names: Collection[str]) -> dict[str, torch.Tensor]:
            keys = {name: f"{prefix}{name}" for name in names}
            tensors = {name: torch.empty(shapes[name], dtype=saved.dtype(key)) for name, key in keys.items()}
            for name, tensor in tensors.items():
                saved.read(keys[name], tensor)
            return tensors

    return SavedWeights(shapes, read)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file. RefusedError if it cannot be opened, or read during the block."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        hint = "a live run may have replaced them: export again, or take another checkpoint or --version"
        raise RefusedError(f"weights in {path} cannot be read: {error}", hint=hint) from error


def merged_weights(source: Source, adapters: SavedWeights, given: Path | None) -> SavedWeights:
    """The whole model's weights by their names in memory, with LoRA's adapters merged. The base model is in
    `given`, or else in `model.path`. A published version (`--version`) already has the whole, merged weights.

    Raises what `resolve_model` raises, and RefusedError if the base model lacks a weight with an adapter or
    has another shape.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    profile, shapes = source.profile, adapters.shapes
    task = load_task(profile, source.run_dir)
    base_dir = given or resolve_model(profile, task)
    check_model_directory(base_dir)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        base_dir, dtype="auto", trust_remote_code=profile.model.trust_remote_code
    )
    base = dict(model.named_parameters()) | persistent_buffers(model)
    adapted = {name.partition(ADAPTER)[0] + ".weight" for name in shapes}
    for name in sorted(adapted):
        a, b = adapter_names(name)
        if name not in base or base[name].shape != (shapes[b][0], shapes[a][1]):
            why = f"{base_dir} is not the run's base model: {name} is missing or has another shape"
            raise RefusedError(why, hint="name the base model's directory with --model DIR")

    def read(names: Collection[str]) -> dict[str, torch.Tensor]:
        tensors = {name: base[name].detach() for name in names}
        for name in adapted.intersection(names):
            a, b = adapter_names(name)
            sides = adapters.read([a, b])
            tensors[name] = merged(tensors[name], sides[a], sides[b], scale_of(profile.lora))
        return tensors

    return SavedWeights({name: tuple(tensor.shape) for name, tensor in base.items()}, read)


def write_adapter(source: Source, target: Path, dtype_name: str) -> Written:
    """Write LoRA's adapters as `peft.PeftModel.from_pretrained` reads them."""
    lora, dtype, weights = source.profile.lora, torch_dtype(dtype_name), saved_weights(source)
    names = list(weights.shapes)
    tensors = {f"{PEFT_PREFIX}{name}": tensor.to(dtype) for name, tensor in weights.read(names).items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source.profile.model.path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.partition(ADAPTER)[0].rpartition(".")[2] for name in names}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with _appearing(target) as working:
        write_weights(tensors, working / ADAPTER_WEIGHTS)
        (working / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Written(
        (ADAPTER_WEIGHTS,), sum(map(torch.numel, tensors.values())), sum(t.nbytes for t in tensors.values())
    )


def write_model(
    source: Source,
    target: Path,
    model_files: Path,
    base_model: Path | None,
    dtype_name: str,
    max_file_bytes: int,
    progress: Callable[..., None],
) -> Written:
    """Write a model's directory. Holds one file's tensors at a time. `base_model`: that of LoRA's adapters,
    if it is not where the profile says."""
    dtype = torch_dtype(dtype_name)
    form = SavedForm(skeleton(model_files, trust_remote_code=source.profile.model.trust_remote_code))
    weights = saved_weights(source)
    if source.has_adapters:
        weights = merged_weights(source, weights, base_model)
    sizes, read = _fitted(form, weights, model_files)
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda elements: elements * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    num_bytes, total_mb = 0, max(sum(sizes.values()) * dtype.itemsize // MB, 1)
    with _appearing(target) as working:
        copy_model_files(model_files, working, str(dtype).removeprefix("torch."))
        for name, names in split.filename_to_tensors.items():
            progress(f"writing {target.name} ({total_mb:,} MB)", num_bytes // MB, total_mb)
            cast = {
                name: (t.to(dtype) if t.is_floating_point() else t).contiguous()
                for name, t in read(names).items()
            }
            write_weights(cast, working / name)
            num_bytes += sum(tensor.nbytes for tensor in cast.values())
        write_index(working, split.tensor_to_filename, num_bytes)
    return Written(tuple(split.filename_to_tensors), sum(sizes.values()), num_bytes)


def _fitted(form: SavedForm, weights: SavedWeights, model_files: Path) -> tuple[dict[str, int], Read]:
    """The number of elements of every tensor that the files will hold, in the model's order, and a function
    that reads tensors.

    If transformers splits or joins tensors between memory (a trainer's weights) and files (published
    weights), all of them are read and held at once, because one tensor of a file may be made of several.
    Raises RefusedError unless names and shapes match the model's parameters and persistent buffers (tied ones
    once).
    """
    shapes, in_files = weights.shapes, form.to_files(form.memory)
    is_as_in_files = shapes.keys() == in_files.keys()
    tensors = in_files if is_as_in_files else form.memory
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = {
        "missing": [name for name in expected if name not in shapes],
        "unknown": [name for name in shapes if name not in expected],
        "of another shape": [name for name in shapes if name in expected and shapes[name] != expected[name]],
    }
    if found := "; ".join(f"{what}: {first_names(names)}" for what, names in problems.items() if names):
        hint = "give a directory with config.json and the tokenizer: --model DIR"
        raise RefusedError(f"the weights do not fit {model_files / CONFIG}: {found}", hint=hint)
    if is_as_in_files or not form.converts:
        return {name: tensor.numel() for name, tensor in in_files.items()}, weights.read
    whole = form.to_files(weights.read(list(form.memory)))
    sizes = {name: tensor.numel() for name, tensor in whole.items()}
    return sizes, lambda names: {name: whole[name] for name in names}


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A directory that is renamed to `target` when it is complete. Raises AsyncrlError if it cannot be
    written."""
    try:
        with appearing_directory(target.absolute()) as working:
            yield working
    except (OSError, SafetensorError) as error:  # safetensors raises its own error on a full disk
        why = getattr(error, "strerror", None) or str(error)
        hint = "choose another place with --out DIR"
        raise AsyncrlError(f"{target} cannot be written: {why}", hint=hint) from error
