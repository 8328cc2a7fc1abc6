"""Named tensors as the buckets in which they travel."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrl_cli.weights.buckets import Bucket, Packing, Spec, dtype_name, plan_layout


def pack(tensors: Mapping[str, torch.Tensor], bucket_size_bytes: int) -> list[Bucket]:
    """Each in its own dtype. Names of the very same tensor object share one entry."""
    specs = specs_of(tensors)
    packing = Packing(plan_layout(specs, bucket_size_bytes))
    for spec in specs:
        packing.put(spec.name, tensors[spec.name].detach())
    return packing.seal()


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[Spec]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return [
        Spec(
            name=first,
            dtype=dtype_name(tensors[first].dtype),
            shape=tuple(tensors[first].shape),
            aliases=tuple(others),
        )
        for first, *others in names.values()
    ]
