"""torch.distributed for the trainer (process groups, device meshes, sums over ranks), and AdamW on sharded parameters with global
gradient clipping and a learning rate schedule."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from asyncrl_cli.profile.schema import TrainerSection

MOMENTS = ("exp_avg", "exp_avg_sq")
CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


class Ranks:
    """This rank's place among the others. One per process; `close` it before another is made.

    `mesh` is where parameters are sharded (gloo on CPU, nccl on CUDA).
    """

    def __init__(self, *, rank: int, world_size: int, device: torch.device, init_method: str, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = indexed(device)
        if device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        world = dist.group.WORLD
        assert world is not None
        self.mesh = DeviceMesh.from_group(world, device.type, mesh=list(range(world_size)))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
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

    def close(self) -> None:
        dist.destroy_process_group()


def indexed(device: torch.device) -> torch.device:
    """`cuda` as `cuda:0`, because torch needs an index. (Ray lets each rank see its own GPU only, as number 0.)"""
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def learning_rate(trainer: TrainerSection, optimizer_steps: int, total_optimizer_steps: int) -> float:
    """Learning rate of the next optimizer step, after `optimizer_steps` were made: linear warm-up, then the schedule.

    `linear` and `cosine` fall from `lr` at the first step after the warm-up to zero one step after the run's last.
    """
    if optimizer_steps < trainer.warmup_steps:
        return trainer.lr * (optimizer_steps + 1) / trainer.warmup_steps
    if trainer.lr_schedule == "constant":
        return trainer.lr
    progress = min((optimizer_steps - trainer.warmup_steps) / max(total_optimizer_steps - trainer.warmup_steps, 1), 1.0)
    if trainer.lr_schedule == "linear":
        return trainer.lr * (1.0 - progress)
    return trainer.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


class PolicyOptimizer:
    """AdamW on this rank's shards. `steps_made` counts the run's optimizer steps, across resumes, without skipped ones; learning
    rate and bias correction depend on it. `skipped_in_a_row` counts steps skipped since the last one made; 0 after a resume."""

    def __init__(
        self, section: TrainerSection, ranks: Ranks, parameters: dict[str, DTensor], *, total_optimizer_steps: int
    ) -> None:
        self._section = section
        self._total_steps = total_optimizer_steps
        self._ranks = ranks
        self._parameters = parameters
        self._adamw = torch.optim.AdamW(
            parameters.values(),
            lr=learning_rate(section, 0, total_optimizer_steps),
            betas=section.betas,
            weight_decay=section.weight_decay,
            fused=True,
        )
        self.steps_made = 0
        self.skipped_in_a_row = 0
        for parameter in parameters.values():
            # Created here, not at the first step, so that there is a state to save at step 0, and to load into after a restart.
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=ranks.device),
                **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS},
            }

    def step(self) -> tuple[float, float]:
        """Clip, step, clear the gradients. Returns (global gradient norm before clipping, learning rate).

        A norm that is not finite (all ranks see the same one) skips the step: weights, moments and counters stay as they are.
        """
        gradients = [_local(p.grad) for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._ranks.world_size > 1:  # with one rank keep the plain norm: squaring would change its last bit
            norm = self._ranks.sum(norm.square()).sqrt()
        norm_value = norm.item()
        rate = learning_rate(self._section, self.steps_made, self._total_steps)
        if not math.isfinite(norm_value):
            self._adamw.zero_grad(set_to_none=True)
            self.skipped_in_a_row += 1
            return norm_value, rate
        torch._foreach_mul_(gradients, (self._section.grad_clip / (norm + CLIP_EPSILON)).clamp(max=1.0))
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.steps_made += 1
        self.skipped_in_a_row = 0
        return norm_value, rate

    def moments(self) -> dict[str, torch.Tensor]:
        """This rank's shards of both moments, by `<moment>/<parameter>`."""
        return {
            f"{moment}/{name}": _local(self._adamw.state[parameter][moment])
            for name, parameter in self._parameters.items()
            for moment in MOMENTS
        }

    def restore_steps(self, steps_made: int) -> None:
        """Set the counters; the moments are written in place through `moments`."""
        self.steps_made = steps_made
        for parameter in self._parameters.values():
            self._adamw.state[parameter]["step"].fill_(float(steps_made))


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    return cast(DTensor, tensor).to_local()
