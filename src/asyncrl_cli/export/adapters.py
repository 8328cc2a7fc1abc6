"""LoRA checkpoints hold only adapters. They are merged into the base model's weights, or written in peft's
format.

A published version (`--version`) already has the whole, merged weights.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.export.saved_weights import SavedWeights
from asyncrl_cli.export.source import Source
from asyncrl_cli.models.inspection import check_model_directory
from asyncrl_cli.models.model_directory import resolve_model
from asyncrl_cli.models.saved_form import ADAPTER, adapter_names, merged, scale_of
from asyncrl_cli.tasks.task import load_task
from asyncrl_cli.weights.model_files import write_weights

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."


def merged_weights(source: Source, given: Path | None) -> SavedWeights:
    """The whole model's weights by their names in memory. The base model is in `given`, or else in
    `model.path`.

    Raises what `resolve_model` raises, and RefusedError if the base model lacks a weight with an adapter or
    has another shape.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from asyncrl_cli.models.saved_form import persistent_buffers

    profile = source.profile
    base_dir = given or resolve_model(profile, load_task(profile, source.run_dir))
    check_model_directory(base_dir)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        base_dir, dtype="auto", trust_remote_code=profile.model.trust_remote_code
    )
    base = dict(model.named_parameters()) | persistent_buffers(model)
    adapted = {name.partition(ADAPTER)[0] + ".weight" for name in source.weights.shapes}
    if wrong := [
        name
        for name in sorted(adapted)
        if name not in base or base[name].shape != _adapted_shape(source, name)
    ]:
        raise RefusedError(
            f"{base_dir} is not the run's base model: {wrong[0]} is missing or has another shape",
            hint="name the base model's directory with --model DIR",
        )

    def read(names: Collection[str]) -> dict[str, torch.Tensor]:
        return {
            name: _merged(source, name, base[name].detach()) if name in adapted else base[name].detach()
            for name in names
        }

    return SavedWeights({name: tuple(tensor.shape) for name, tensor in base.items()}, read)


def _adapted_shape(source: Source, name: str) -> tuple[int, int]:
    a, b = adapter_names(name)
    return source.weights.shapes[b][0], source.weights.shapes[a][1]


def _merged(source: Source, name: str, weight: torch.Tensor) -> torch.Tensor:
    a, b = adapter_names(name)
    adapter = source.weights.read([a, b])
    return merged(weight, adapter[a], adapter[b], scale_of(source.profile.lora))


def write_adapter(source: Source, dtype: torch.dtype, directory: Path) -> tuple[tuple[str], int, int]:
    """Write what `peft.PeftModel.from_pretrained` reads. Returns the weight file's name, and the parameters
    and bytes in it."""
    lora, names = source.profile.lora, list(source.weights.shapes)
    tensors = {
        f"{PEFT_PREFIX}{name}": tensor.to(dtype) for name, tensor in source.weights.read(names).items()
    }
    write_weights(tensors, directory / ADAPTER_WEIGHTS)
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
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return (
        (ADAPTER_WEIGHTS,),
        sum(map(torch.numel, tensors.values())),
        sum(tensor.nbytes for tensor in tensors.values()),
    )
