"""torch.distributed for the trainer (process groups, device meshes, sums over ranks), and AdamW on sharded
parameters with global gradient clipping, a learning rate schedule, and moments that can be offloaded to the
host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from asyncrl_cli.profile.schema import ProcessPlace, Profile, TrainerSection
from asyncrl_cli.train import MOMENTS_SLICE_BYTES
from asyncrl_cli.train.first_meeting import first_collective, met

MOMENTS = ("exp_avg", "exp_avg_sq")
CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


class Ranks:
    """One process's rank among the processes of its role (`place.workers`). One per process; `close` it
    before making another.

    Ranks wait for each other at most `trainer.meeting_timeout_s` at the start, and `trainer.step_timeout_s`
    later. Parameters are sharded over `mesh`, which has all ranks (gloo on CPU, nccl on CUDA). Each
    `sequence_size` neighbouring ranks have the same trajectories and divide their tokens (unpadded.py);
    `sequence` is this rank's group of neighbours, or None if it is alone. On a CPU, torch computes with
    `place.threads` threads from here on.
    """

    def __init__(
        self, profile: Profile, place: ProcessPlace, *, rank: int, init_method: str, sequence_size: int = 1
    ) -> None:
        self.rank = rank
        self.world_size = world_size = place.workers
        self.device = device = own_device(place)
        timeout_s, meeting_s = profile.trainer.step_timeout_s, profile.trainer.meeting_timeout_s
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = met(init_method, rank=rank, world_size=world_size, timeout_s=meeting_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        # gloo connects all ranks here; NCCL does in the first collective.
        first_s = timeout_s if backend == "nccl" else min(meeting_s, timeout_s)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=first_s)
        )
        first_collective(device, store, rank=rank, world_size=world_size, timeout_s=meeting_s)
        _set_pg_timeout(timedelta(seconds=timeout_s))
        world = dist.group.WORLD
        assert world is not None
        self.mesh = DeviceMesh.from_group(world, device.type, mesh=list(range(world_size)))
        self.sequence_size = sequence_size
        self.sequence: dist.ProcessGroup | None = None
        self._data = world
        if sequence_size > 1:
            grid = torch.arange(world_size).view(-1, sequence_size)
            groups = DeviceMesh(device.type, grid, mesh_dim_names=("data", "sequence"))
            self._data, self.sequence = groups.get_group("data"), groups.get_group("sequence")
            for group in (self._data, self.sequence):
                _set_pg_timeout(timedelta(seconds=timeout_s), group)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum, in place, a value that each rank computed from its trajectories. Ranks that share trajectories
        count once."""
        if self.world_size > self.sequence_size:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._data)
        return tensor

    def sum_shards(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum, in place, a value that each rank computed from its shards of the parameters."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def synchronize(self) -> None:
        """Wait for queued device work, so that seconds measured on the host are the device's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release_cache(self) -> None:
        """Return freed device memory, which torch keeps for itself, to the device: another process takes its
        turn there."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        dist.destroy_process_group()


def own_device(place: ProcessPlace) -> torch.device:
    """This process's device. On a CPU, torch computes with `place.threads` threads from here on. `cuda`
    becomes `cuda:0`, because torch needs an index. (With Ray, each process sees only its own GPU, as number
    0.)"""
    if place.device == "cpu":
        torch.set_num_threads(place.threads)
    return torch.device("cuda:0" if place.device == "cuda" else place.device)


def learning_rate(trainer: TrainerSection, optimizer_steps: int, total_optimizer_steps: int) -> float:
    """Learning rate of the next optimizer step after `optimizer_steps` steps: linear warm-up, then the
    schedule.

    `linear` and `cosine` fall from `lr` at the first step after the warm-up to zero one step after the run's
    last.
    """
    if optimizer_steps < trainer.warmup_steps:
        return trainer.lr * (optimizer_steps + 1) / trainer.warmup_steps
    if trainer.lr_schedule == "constant":
        return trainer.lr
    progress = min(
        (optimizer_steps - trainer.warmup_steps) / max(total_optimizer_steps - trainer.warmup_steps, 1), 1.0
    )
    if trainer.lr_schedule == "linear":
        return trainer.lr * (1.0 - progress)
    return trainer.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class MomentsSlice:
    """Parameters that are stepped together, by name, and the AdamW of these alone."""

    parameters: dict[str, DTensor]
    adamw: torch.optim.AdamW

    def moments(self) -> dict[str, torch.Tensor]:
        """This rank's shards on its device, by `<moment>/<parameter>`."""
        states = {name: self.adamw.state[parameter] for name, parameter in self.parameters.items()}
        return {
            f"{moment}/{name}": _local(state[moment]) for name, state in states.items() for moment in MOMENTS
        }


class PolicyOptimizer:
    """AdamW on this rank's shards. `steps_made` counts the run's optimizer steps across resumes, without
    skipped ones; learning rate and bias correction depend on it. `skipped_in_a_row` counts the steps skipped
    since the last one made; 0 after a resume.

    With offloaded moments the step goes slice by slice, so that only one slice's moments are on the device at
    a time.
    """

    def __init__(
        self,
        section: TrainerSection,
        ranks: Ranks,
        parameters: dict[str, DTensor],
        *,
        total_optimizer_steps: int,
    ) -> None:
        self._section = section
        self._total_steps = total_optimizer_steps
        self._ranks = ranks
        self._parameters = parameters
        self._on_host: dict[str, torch.Tensor] | None = {} if _offloads(section, ranks) else None
        self.steps_made = 0
        self.skipped_in_a_row = 0
        self._slices = [
            self._slice(part)
            for part in _sliced(parameters, math.inf if self._on_host is None else MOMENTS_SLICE_BYTES)
        ]
        self._ranks.synchronize()

    def _slice(self, parameters: dict[str, DTensor]) -> MomentsSlice:
        section, rate = self._section, learning_rate(self._section, 0, self._total_steps)
        adamw = torch.optim.AdamW(
            parameters.values(), lr=rate, betas=section.betas, weight_decay=section.weight_decay, fused=True
        )
        for parameter in parameters.values():
            # Created here, not at the first step, so that step 0 has a state to save, and a resume has one to
            # load into.
            adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=self._ranks.device),
                **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS},
            }
        made = MomentsSlice(parameters, adamw)
        if self._on_host is not None:
            moments = made.moments()
            self._on_host |= {
                key: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for key, t in moments.items()
            }
            self._to_host(moments, self._on_host)
        return made

    def step(self) -> tuple[float, float]:
        """Clip the gradients, step, and clear them. Returns (global gradient norm before clipping, learning
        rate).

        The step is skipped if the norm (the same on all ranks) is not finite: weights, moments and counters
        do not change.
        """
        gradients = [_local(p.grad) for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        # with one rank keep the plain norm: squaring would change its last bit
        if self._ranks.world_size > 1:
            norm = self._ranks.sum_shards(norm.square()).sqrt()
        norm_value = norm.item()
        rate = learning_rate(self._section, self.steps_made, self._total_steps)
        if not math.isfinite(norm_value):
            for part in self._slices:
                part.adamw.zero_grad(set_to_none=True)
            self.skipped_in_a_row += 1
            return norm_value, rate
        torch._foreach_mul_(gradients, (self._section.grad_clip / (norm + CLIP_EPSILON)).clamp(max=1.0))
        del gradients  # or no slice's gradients would be freed before the last one's step
        for part in self._slices:
            self._step(part, rate)
        if self._on_host is not None:
            self._ranks.synchronize()  # the host's copies are complete
            self._ranks.release_cache()
        self.steps_made += 1
        self.skipped_in_a_row = 0
        return norm_value, rate

    def _step(self, part: MomentsSlice, rate: float) -> None:
        """Copies and step are queued in order on the device's stream: the host need not wait between them."""
        part.adamw.param_groups[0]["lr"] = rate
        moments = part.moments() if self._on_host is not None else {}
        for key, local in moments.items():
            local.untyped_storage().resize_(self._on_host[key].nbytes)
            local.copy_(self._on_host[key], non_blocking=True)
        part.adamw.step()
        part.adamw.zero_grad(set_to_none=True)
        if self._on_host is not None:
            self._to_host(moments, self._on_host)

    def moments(self) -> dict[str, torch.Tensor]:
        """This rank's shards of both moments, by `<moment>/<parameter>`: the host copies if they are
        offloaded."""
        return (
            {k: t for part in self._slices for k, t in part.moments().items()}
            if self._on_host is None
            else self._on_host
        )

    @staticmethod
    def _to_host(moments: dict[str, torch.Tensor], on_host: dict[str, torch.Tensor]) -> None:
        for key, local in moments.items():
            on_host[key].copy_(local, non_blocking=True)
            local.untyped_storage().resize_(0)

    def restore_steps(self, steps_made: int) -> None:
        """Set the counters; the moments are written in place through `moments`."""
        self.steps_made = steps_made
        for part in self._slices:
            for state in part.adamw.state.values():
                state["step"].fill_(float(steps_made))


def _sliced(parameters: dict[str, DTensor], limit_bytes: float) -> Iterator[dict[str, DTensor]]:
    """The parameters in order, cut where the moments of a slice would exceed the limit. One parameter may
    exceed it alone."""
    part: dict[str, DTensor] = {}
    num_bytes = 0
    for name, parameter in parameters.items():
        moments_bytes = len(MOMENTS) * _local(parameter).nbytes
        if part and num_bytes + moments_bytes > limit_bytes:
            yield part
            part, num_bytes = {}, 0
        part[name] = parameter
        num_bytes += moments_bytes
    yield part


def _offloads(section: TrainerSection, ranks: Ranks) -> bool:
    """Whether moments wait on the host between optimizer steps. On a CPU they are there anyway."""
    return section.offload_optimizer and ranks.device.type != "cpu"


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    return cast(DTensor, tensor).to_local()
