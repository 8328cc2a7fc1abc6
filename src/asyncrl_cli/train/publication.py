"""The newest gathered version on rank 0: its buckets and manifest, and how they are stored in a checkpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.weights.buckets import Bucket, Manifest, Packing, Spec, plan_layout
from asyncrl_cli.weights.disk import sync_files

PUBLISHED_FILE = "published.safetensors"


@dataclass(slots=True)
class Publication:
    """One version. `packing` is never written to once it is filled, so any thread may read it.

    `manifest` has no fingerprints: `sealed` adds them. Its `previous_logprobs` are empty for the first version of a process, and
    not in checkpoints.
    """

    manifest: Manifest
    packing: Packing
    _sealed: tuple[Manifest, list[Bucket]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sealed(self) -> tuple[Manifest, list[Bucket]]:
        """Manifest and buckets. The first call computes the fingerprints (all bytes are read once)."""
        with self._lock:
            if self._sealed is None:
                buckets = self.packing.seal()
                fingerprints = tuple(bucket.fingerprint for bucket in buckets)
                self._sealed = (replace(self.manifest, fingerprints=fingerprints), buckets)
            return self._sealed

    def save(self, directory: Path) -> None:
        manifest = self.manifest
        header = {
            "format": "pt",
            "version": str(manifest.version),
            "temperature": repr(manifest.temperature),
            "probes": json.dumps({"tokens": manifest.probe_tokens, "logprobs": manifest.probe_logprobs}),
        }
        save_file(self.packing.tensors(), directory / PUBLISHED_FILE, metadata=header)
        sync_files(directory)


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
            packing.put(spec.name, saved.get_tensor(spec.name))
    probes = json.loads(header["probes"])
    manifest = Manifest(
        version=int(header["version"]),
        num_bytes=packing.num_bytes,
        fingerprints=(),
        temperature=float(header["temperature"]),
        probe_tokens=tuple(map(tuple, probes["tokens"])),
        probe_logprobs=tuple(map(tuple, probes["logprobs"])),
    )
    return Publication(manifest, packing)
