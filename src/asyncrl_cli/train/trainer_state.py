"""Trainer state on the host and on disk, from which a run resumes bit for bit. Loading never executes code
from the files.

    <directory>/
      rank-00000.safetensors    one file per rank: its RNG; its rows of weights, moments, the window's first
                                weights, and of the published version, if that is not the trainer's own
      trainer.json              counters, written by rank 0
      critic-00000.safetensors  the same for a critic with its own processes (the ranks' files lack it then);
      critic.json               both kinds load alike, so a resume may move the critic there or back

FSDP2 divides tensors between ranks by rows. The header of a file says which rows it has, so a checkpoint of N
ranks loads on any number of ranks. (Each rank restores its own RNG state; the trainer itself draws no random
numbers.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.safe_files import Count, Finite, load_json, open_regular, parse_json, reason
from asyncrl_cli.base.storage import sync_files
from asyncrl_cli.models.model_files import write_weights
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.sharded_model import first_row
from asyncrl_cli.weights.buckets import Packing, torch_dtype, zeros
from asyncrl_cli.weights.versions import Manifest

COUNTERS_FILE, CRITIC_FILE = "trainer.json", "critic.json"
CRITIC, PUBLISHED = "critic.", "published/"
"""Prefixes of the critic's parameters, and of the published version's tensors, which have their names in
files."""
ANOTHER = "take another checkpoint"
ANOTHER_MODEL = "resume with the profile and the model that wrote it"
FROZEN = {
    "base_logprob": ("a base model", "model.path"),
    "reference_logprob": ("a reference", "ref.path, or model.path,"),
    "teacher_logprob": ("a teacher", "teacher.path"),
}
"""Weights that are never trained or saved, by the counter that identifies them: what they are, and the key
that names them."""


class Counters(TypedDict):
    """`trainer.json`, as rank 0 writes it. `has_window_first`: 1 if the window's first weights are among the
    tensors. `critic_steps`: the critic's optimizer steps, if there is one. `base_logprob`,
    `reference_logprob` and `teacher_logprob`: the mean logprob that LoRA's base model, the reference and the
    teachers give to fixed random tokens. `kl_coef`: the weight of the KL in the reward, if it follows a
    target. `published`: describes the published version, if its weights are among the tensors."""

    schema_version: Literal[2]
    ranks: Count
    step: Count
    optimizer_steps: Count
    has_window_first: Count
    critic_steps: NotRequired[Count]
    base_logprob: NotRequired[Finite]
    reference_logprob: NotRequired[Finite]
    kl_coef: NotRequired[Finite]
    teacher_logprob: NotRequired[Finite]
    published: NotRequired[Manifest]


class CriticCounters(TypedDict):
    """`critic.json`, of a critic with processes of its own."""

    schema_version: Literal[1]
    processes: Count
    critic_steps: Count


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor on the host, from `first_row` on. The whole tensor has `num_rows`."""

    tensor: torch.Tensor
    first_row: int
    num_rows: int

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.tensor.shape[1:])


HostState = dict[str, Rows]
"""One rank's share: `<kind>/<parameter>`, and `rng/...`, the rank's random state."""


def to_host(
    like: dict[str, DTensor],
    local_tensors: dict[str, torch.Tensor],
    take: Callable[[int], NDArray[np.uint8]] = zeros,
) -> HostState:
    """Copy this rank's shards to the host, into memory that `take` returns for a size in bytes.

    Keys of `local_tensors` are `<kind>/<parameter>`. `like` has the parameters, which give shape and
    sharding.
    """
    rows = HostState()
    for key, local in local_tensors.items():
        parameter = like[key.split("/", 1)[1]]
        if local.nbytes:
            copy = torch.from_numpy(take(local.nbytes)).view(local.dtype).view(local.shape)
        else:  # this rank has no rows of it
            copy = torch.empty_like(local, device="cpu")
        rows[key] = Rows(copy.copy_(local, non_blocking=True), first_row(parameter), parameter.shape[0])
    if any(local.is_cuda for local in local_tensors.values()):
        torch.cuda.synchronize()  # copies into pinned memory may still be under way
    return rows


def published_rows(packing: Packing) -> HostState:
    """This rank's rows of a published version, which may not change any more. A scalar is one row."""
    specs, tensors = packing.specs, packing.tensors()
    rows = {name: tensor.view(tensor.shape or (1,)) for name, tensor in tensors.items()}
    return {
        f"{PUBLISHED}{spec.name}": Rows(rows[spec.name], spec.first_row, (*spec.whole.shape, 1)[0])
        for spec in specs
    }


def read_published(packing: Packing, saved: SavedState) -> None:
    """Fill this rank's buckets with the published version. Raises RefusedError if that is of another
    model."""
    for spec in packing.specs:
        key, shape = f"{PUBLISHED}{spec.name}", spec.whole.shape or (1,)
        if (found := saved.shapes.get(key)) != shape:
            why = f"of another model: {key} is {found or 'absent'}, not {shape}"
            raise RefusedError(f"{saved.directory}: checkpoint is {why}", hint=ANOTHER_MODEL)
        rows = torch.empty(spec.shape or (1,), dtype=torch_dtype(spec.dtype))
        saved.read(key, rows, spec.first_row)
        packing.put(spec.name, rows.view(spec.shape))


def random_state(ranks: Ranks) -> HostState:
    """This rank's random state."""
    random = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return {f"rng/{kind}/{ranks.rank}": Rows(values, 0, len(values)) for kind, values in random.items()}


def restore_random_state(ranks: Ranks, saved: SavedState) -> None:
    """Restore this rank's random state, which files of fewer ranks lack."""
    for key, rows in random_state(ranks).items():
        if saved.shapes.get(key) == rows.whole_shape:
            saved.read(key, rows.tensor)
            (torch.cuda if "/cuda/" in key else torch).set_rng_state(rows.tensor)


def rank_file(directory: Path, rank: int, role: str = "rank") -> Path:
    return directory / f"{role}-{rank:05d}.safetensors"


def write_state(
    rank: int,
    state: HostState,
    counters: Counters | CriticCounters,
    directory: Path,
    *,
    is_critics: bool = False,
) -> None:
    """Write this process's file, and on rank 0 the counters, with fsync. Raises OSError if that fails."""
    role, counters_file = ("critic", CRITIC_FILE) if is_critics else ("rank", COUNTERS_FILE)
    directory.mkdir(parents=True, exist_ok=True)
    places = json.dumps({key: (rows.first_row, rows.num_rows) for key, rows in state.items()})
    tensors = {key: rows.tensor for key, rows in state.items()}
    write_weights(tensors, rank_file(directory, rank, role), rows=places)
    if rank == 0:
        (directory / counters_file).write_text(json.dumps(counters, indent=1, default=asdict) + "\n")
    sync_files(directory)


class SavedState:
    """An open trainer state on disk, with the files of a critic in its own processes. `shapes`: of the whole
    tensors. `critic_steps`: the critic's optimizer steps. Raises RefusedError unless all files are there and
    consistent."""

    def __init__(self, directory: Path) -> None:
        self.counters = load_json(directory / COUNTERS_FILE, Counters, hint=ANOTHER)
        self.directory = directory
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[tuple[int, Any]]] = {}
        self.critic_steps = self.counters.get("critic_steps", 0)
        self._open("rank", self.counters["ranks"])
        if (directory / CRITIC_FILE).exists():
            critic = load_json(directory / CRITIC_FILE, CriticCounters, hint=ANOTHER)
            self.critic_steps = critic["critic_steps"]
            self._open("critic", critic["processes"])

    def _open(self, role: str, num_files: int) -> None:
        for number in range(num_files):
            path = rank_file(self.directory, number, role)
            try:
                open_regular(path).close()
                file: Any = safe_open(path, framework="pt")
                places = parse_json((file.metadata() or {}).get("rows", "{}"), dict[str, tuple[Count, Count]])
                if places.keys() != set(file.keys()):
                    raise ValueError("its header does not list its rows")
                for key, (begin, num_rows) in places.items():
                    part = file.get_slice(key)
                    _, *row_shape = part.get_shape()
                    shape = (num_rows, *row_shape)
                    if self.shapes.setdefault(key, shape) != shape:
                        raise ValueError(f"{key} has another shape than in the files of other ranks")
                    self._parts.setdefault(key, []).append((begin, part))
            except (SafetensorError, OSError, ValueError) as error:
                raise RefusedError(f"{path} cannot be read: {reason(error)}", hint=ANOTHER) from error

    def dtype(self, key: str) -> torch.dtype:
        """Of a tensor, in the files."""
        _, part = self._parts[key][0]
        dtype: torch.dtype = part[:0].dtype
        return dtype

    def check_frozen(self, logprobs: Mapping[str, float], most_diff: float) -> None:
        """Raises RefusedError if FROZEN weights are not those that the state was trained with: `logprobs` are
        theirs now, by counter."""
        for name, logprob in logprobs.items():
            before = cast(Mapping[str, float], self.counters).get(name, logprob)
            if abs(logprob - before) > most_diff:
                what, where = FROZEN[name]
                why = f"{self.directory}: was trained with {what} that had other weights"
                hint = f"resume with the model that {where} held when the run began"
                raise RefusedError(why, hint=hint)

    def read(self, key: str, into: torch.Tensor, first_row: int = 0) -> None:
        """Fill `into` with a tensor's rows from `first_row` on. Raises RefusedError if the files lack any of
        these rows."""
        num_read = 0
        for begin, part in self._parts[key]:
            low, high = max(begin, first_row), min(begin + part.get_shape()[0], first_row + len(into))
            if low < high:
                into[low - first_row : high - first_row] = part[low - begin : high - begin]
                num_read += high - low
        if num_read != len(into):
            raise RefusedError(f"{self.directory} has {num_read} of {len(into)} rows of {key}", hint=ANOTHER)


def restore(like: dict[str, DTensor], live: dict[str, torch.Tensor], saved: SavedState) -> None:
    """Fill this rank's live shards from disk, keyed and shaped as in `to_host`. If a tensor is missing or has
    another shape, raises RefusedError and changes nothing."""
    state = to_host(like, live)
    for key, rows in sorted(state.items()):
        if (found := saved.shapes.get(key)) != rows.whole_shape:
            why = f"of another model: {key} is {found or 'absent'}, not {rows.whole_shape}"
            raise RefusedError(f"{saved.directory}: checkpoint is {why}", hint=ANOTHER_MODEL)
        saved.read(key, rows.tensor, rows.first_row)
    for key, tensor in live.items():
        tensor.copy_(state[key].tensor)
