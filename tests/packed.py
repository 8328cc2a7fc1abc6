"""Named tensors as the buckets in which they travel, from one rank or from several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from asyncrl_cli.weights.buckets import Bucket, Packing, Spec, Unpacked, dtype_name, plan_layout


def pack(tensors: Mapping[str, torch.Tensor], bucket_size_bytes: int) -> list[Bucket]:
    """Each in its own dtype. Names of the very same tensor object share one entry."""
    specs = specs_of(tensors)
    packing = Packing(plan_layout(specs, bucket_size_bytes))
    for spec in specs:
        packing.put(spec.name, tensors[spec.name].detach())
    return packing.seal()


def pack_rows(tensors: Mapping[str, torch.Tensor], bucket_size_bytes: int, ranks: int) -> list[list[Bucket]]:
    """Each rank's buckets. A rank has the rows that `torch.chunk` gives it, as with FSDP2, and rank 0 tensors
    without rows."""
    specs, sent = specs_of(tensors), []
    for rank in range(ranks):
        own: dict[str, torch.Tensor] = {}
        layout = []
        for spec in specs:
            chunks = tensors[spec.name].chunk(ranks) if spec.shape and spec.shape[0] else [tensors[spec.name]]
            if rank < len(chunks):
                own[spec.name] = chunks[rank]
                begin = sum(len(chunk) for chunk in chunks[:rank])
                layout.append(spec.rows(begin, len(chunks[rank])) if len(chunks) > 1 else spec)
        packing = Packing(plan_layout(layout, bucket_size_bytes))
        for name, rows in own.items():
            packing.put(name, rows)
        sent.append(packing.seal())
    return sent


def copied(buckets: Iterable[Bucket]) -> dict[str, torch.Tensor]:
    """All tensors of these buckets by name, in new memory."""
    return {name: tensor.clone() for name, tensor in Unpacked(buckets).items()}


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
