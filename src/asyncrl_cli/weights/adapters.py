"""LoRA adapters on their way to the workers: merged by rank 0, or sent alone and merged by each worker
(`lora.sync = "adapter"`).

    rank 0   A and B of each layer, float32 -> buckets
    worker   BaseFiles.whole(buckets): the base model's files and the adapters -> buckets of whole weights -> engine, as ever

For each version, a worker reads the base model's files again, tensor by tensor, and keeps no copy. The result
is what rank 0 would have sent, so engines and probes need not know of adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open

from asyncrl_cli.base.errors import ConfigError, first_names
from asyncrl_cli.models.saved_form import SavedForm, skeleton
from asyncrl_cli.profile.schema import LoraSection, Profile
from asyncrl_cli.weights.buckets import Bucket, Packing, Spec, dtype_name, plan_layout, unpack
from asyncrl_cli.weights.model_files import tensor_files

ADAPTER = ".lora_"
"""Part of the name of every adapter parameter, and of no other parameter."""


def adapter_names(weight: str) -> tuple[str, str]:
    """The names of the parameters A and B of a weight."""
    stem = weight.removesuffix(".weight") + ADAPTER
    return f"{stem}A.weight", f"{stem}B.weight"


def scale_of(lora: LoraSection) -> float:
    return lora.alpha / lora.rank


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale * B A, in float32."""
    return torch.addmm(weight.float(), b, a, alpha=scale)


class BaseFiles:
    """The files of the base model with which a worker's engine started."""

    def __init__(self, profile: Profile, model_dir: Path) -> None:
        """Raises ConfigError if tensors have other names or shapes in the model's files than in memory, or
        are missing there."""
        self._scale = scale_of(profile.lora)
        form = SavedForm(skeleton(model_dir, trust_remote_code=profile.model.trust_remote_code))
        required, known, files = form.required, form.known, tensor_files(model_dir)
        if form.converts or (missing := sorted(required.keys() - files.keys())):
            why = "are joined in memory" if form.converts else f"lack {first_names(missing)}"
            raise ConfigError(
                f'lora.sync = "adapter": the tensors of {model_dir} {why}, so workers cannot merge adapters '
                "into them",
                hint="--set lora.sync=merged",
            )
        self._files = {name: path for name, path in files.items() if name in known}
        self._specs = {
            name: Spec(
                name=name,
                dtype=profile.model.dtype if name in required else dtype_name(known[name].dtype),
                shape=shape,
            )
            for name in self._files
            for shape in [tuple(known[name].shape)]
        }

    def whole(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yield all weights, a bucket per tensor, once all adapters have arrived. Buckets of whole weights,
        which another trainer may send through the gateway, pass unchanged. Raises ValueError if an adapter
        belongs to no weight."""
        arriving = iter(buckets)
        first = next(arriving, None)
        if first is None:
            return
        every: Iterator[Bucket] = chain([first], arriving)
        if any(ADAPTER in entry.spec.name for entry in first.entries):
            every = self._merged(dict(chain.from_iterable(unpack(bucket).items() for bucket in every)))
        yield from every

    def _merged(self, adapters: Mapping[str, torch.Tensor]) -> Iterator[Bucket]:
        own = {name for weight in self._files for name in adapter_names(weight)}
        if foreign := sorted(adapters.keys() - own):
            raise ValueError(
                f"adapters arrived for weights that the base model does not have: {first_names(foreign)}"
            )
        for name, path in self._files.items():
            # per tensor: pages that were read stay mapped while it is open
            with safe_open(path, framework="pt") as file:
                weight, (a, b) = file.get_tensor(name), adapter_names(name)
            if a in adapters:
                weight = merged(weight, adapters[a], adapters[b], self._scale)
            packing = Packing(plan_layout([self._specs[name]], 1))
            packing.put(name, weight)
            yield from packing.buckets
