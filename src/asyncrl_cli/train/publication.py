"""The newest gathered version on rank 0: its buckets and manifest, and how they are stored in a checkpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.weights.buckets import Bucket, Manifest, Packing, Spec, plan_layout
from asyncrl_cli.weights.disk import sync_files

PUBLISHED_FILE = "published.safetensors"


@dataclass(slots=True)
class Publication:
    """One version. `packing` is never written to once it is filled, so any thread may read it.

    `previous_logprobs`: of the probes by the version before; empty for the first one of a process, and not in checkpoints.
    """

    version: int
    packing: Packing
    temperature: float
    probe_tokens: tuple[tuple[int, ...], ...]
    probe_logprobs: tuple[tuple[float, ...], ...]
    previous_logprobs: tuple[tuple[float, ...], ...] = ()
    _sealed: tuple[Manifest, list[Bucket]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sealed(self) -> tuple[Manifest, list[Bucket]]:
        """Manifest and buckets. The first call computes the fingerprints (all bytes are read once)."""
        with self._lock:
            if self._sealed is None:
                buckets = self.packing.seal()
                self._sealed = (self._manifest(buckets), buckets)
            return self._sealed

    def save(self, directory: Path) -> None:
        probes = {"tokens": self.probe_tokens, "logprobs": self.probe_logprobs}
        header = {
            "format": "pt",
            "version": str(self.version),
            "temperature": repr(self.temperature),
            "probes": json.dumps(probes),
        }
        save_file(self.packing.tensors(), directory / PUBLISHED_FILE, metadata=header)
        sync_files(directory)

    def _manifest(self, buckets: Sequence[Bucket]) -> Manifest:
        return Manifest(
            version=self.version,
            num_bytes=self.packing.num_bytes,
            fingerprints=tuple(bucket.fingerprint for bucket in buckets if bucket.fingerprint is not None),
            temperature=self.temperature,
            probe_tokens=self.probe_tokens,
            probe_logprobs=self.probe_logprobs,
            previous_logprobs=self.previous_logprobs,
        )


def load_publication(directory: Path, specs: Sequence[Spec], bucket_size_bytes: int) -> Publication | None:
    """The saved version, packed as a gather would pack it; None if the checkpoint has none.

    Raises:
        RefusedError: if its tensors are not the model's.
    """
    path = directory / PUBLISHED_FILE
    if not path.exists():
        return None
    packing = Packing(plan_layout(specs, bucket_size_bytes))
    with safe_open(path, framework="pt") as saved:
        if set(saved.keys()) != {spec.name for spec in specs}:
            raise RefusedError(f"{path}: published weights are of another model")
        header = saved.metadata()
        for spec in specs:
            tensor: torch.Tensor = saved.get_tensor(spec.name)
            packing.put(spec.name, tensor)
    probes = json.loads(header["probes"])
    return Publication(
        version=int(header["version"]),
        packing=packing,
        temperature=float(header["temperature"]),
        probe_tokens=tuple(tuple(tokens) for tokens in probes["tokens"]),
        probe_logprobs=tuple(tuple(logprobs) for logprobs in probes["logprobs"]),
    )
