"""Trainer state on the host and on disk: what a resume needs to go on bit for bit.

    <directory>/  .metadata, *.distcp       torch distributed checkpoint: weights, moments, window's first weights, RNG
                  trainer.json              counters, written by rank 0
                  published.safetensors     the published version's weights, if it is not the trainer's own

A checkpoint of N ranks loads on any number of ranks: the shards are DTensors. (RNG states follow their rank; the
trainer itself draws no random numbers.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.errors import AsyncrlError, RefusedError
from asyncrl_cli.safe_files import Count, load_json
from asyncrl_cli.storage import naming, sync_files
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.state_reader import StateReader, read_tensors
from asyncrl_cli.weights.buckets import Packing, Spec, plan_layout
from asyncrl_cli.weights.versions import Manifest

COUNTERS_FILE = "trainer.json"
PUBLISHED_FILE = "published.safetensors"
HostState = dict[str, torch.Tensor]
"""One rank's share, all on the host: shards, wrapped as DTensors on the host mesh, and `rng/...`, the rank's random state."""


class Counters(TypedDict):
    """`trainer.json`, as rank 0 writes it. `has_window_first`: 1 if the window's first weights are among the tensors."""

    schema_version: Literal[1]
    ranks: Count
    step: Count
    optimizer_steps: Count
    has_window_first: Count


def to_host(ranks: Ranks, like: dict[str, DTensor], local_tensors: dict[str, torch.Tensor]) -> HostState:
    """Copy this rank's shards and its random state to the host.

    Keys of `local_tensors` end in a parameter's name, which tells shape and sharding.
    """
    state: HostState = {key: _host_shard(ranks, like[key.split("/", 1)[1]], local) for key, local in local_tensors.items()}
    state[f"rng/cpu/{ranks.rank}"] = torch.get_rng_state()
    if ranks.device.type == "cuda":
        state[f"rng/cuda/{ranks.rank}"] = torch.cuda.get_rng_state(ranks.device)
    return state


def write_state(ranks: Ranks, state: HostState, counters: Mapping[str, int], directory: Path) -> None:
    """Write and fsync. A collective over `host_group` only, so it may run in a thread beside training.

    Raises OSError with what the system said, where a rank could not write.
    """
    directory.mkdir(parents=True, exist_ok=True)
    writer = _Writer(directory, sync_files=True)
    try:
        dcp.save(state, storage_writer=writer, process_group=ranks.host_group)
    except CheckpointException as error:  # not even an Exception, and its text is every rank's traceback
        rank, (first, _) = next(iter(error.failures.items()))
        with naming(directory):
            raise first if isinstance(first, OSError) else AsyncrlError(f"rank {rank} failed: {first}") from error
    if ranks.rank == 0:
        content = Counters(schema_version=1, ranks=ranks.world_size, **counters)
        (directory / COUNTERS_FILE).write_text(json.dumps(content, indent=1) + "\n")
        sync_files(directory)


class _Writer(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """torch ends a half-written file with an error of its own, whose context is the system's: that one is raised."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def read_counters(directory: Path) -> Counters:
    """Raises RefusedError if this is no trainer state, or one of another schema."""
    return load_json(directory / COUNTERS_FILE, Counters, hint="take another checkpoint")


def saved_keys(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every saved tensor."""
    return {key: tuple(item.size) for key, item in StateReader(directory).read_metadata().state_dict_metadata.items()}


def read_state(ranks: Ranks, state: HostState, directory: Path) -> None:
    """Fill `state` from disk, and go on with the random state found there. A collective.

    RefusedError if a shard is not there, or of another shape.
    """
    saved = saved_keys(directory)
    lacking = {key for key, tensor in state.items() if saved.get(key) != tuple(tensor.shape)}
    for key in sorted(lacking):
        if not key.startswith("rng/"):
            raise RefusedError(
                f"{directory}: checkpoint is of another model: {key} is {saved.get(key, 'absent')}, "
                f"the model has {tuple(state[key].shape)}",
                hint="resume with the profile and the model that wrote it",
            )
    found = {key: tensor for key, tensor in state.items() if key not in lacking}
    read_tensors(found, directory, ranks.host_group)
    for key, tensor in found.items():
        if key.startswith("rng/cpu/"):
            torch.set_rng_state(tensor)
        elif key.startswith("rng/cuda/"):
            torch.cuda.set_rng_state(tensor)


def _host_shard(ranks: Ranks, parameter: DTensor, local: torch.Tensor) -> DTensor:
    host = torch.empty(local.shape, dtype=local.dtype).copy_(local)
    return DTensor.from_local(
        host, ranks.host_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class Publication(NamedTuple):
    """The newest gathered version, on rank 0. `packing` is never written to once it is filled, so any thread may read it.

    `manifest` has no fingerprints yet. Its `previous_logprobs` are empty for the first version of a process, and not saved.
    """

    manifest: Manifest
    packing: Packing


def save_publication(publication: Publication, directory: Path) -> None:
    """Write and fsync."""
    manifest = publication.manifest
    header = {
        "format": "pt",
        "version": str(manifest.version),
        "temperature": repr(manifest.temperature),
        "probes": json.dumps({"tokens": manifest.probe_tokens, "logprobs": manifest.probe_logprobs}),
    }
    save_file(publication.packing.tensors(), directory / PUBLISHED_FILE, metadata=header)
    sync_files(directory)


def load_publication(directory: Path, specs: Sequence[Spec], bucket_size_bytes: int) -> Publication | None:
    """The saved version, packed as a gather would pack it; None if there is none. RefusedError if it is of another model."""
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
