"""What the policy and the critic have in common in an optimizer step: the microbatches' losses are
aggregated, AdamW steps on sharded parameters (global gradient clipping, a learning rate schedule, moments
that may wait on the host), and metrics are reduced over microbatches, steps and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor

from asyncrl_cli.measure.values import Last, Max, Ratio, Sum, Value
from asyncrl_cli.profile.schema import Profile, TrainerSection
from asyncrl_cli.train import MOMENTS_SLICE_BYTES
from asyncrl_cli.train.batch import Microbatch
from asyncrl_cli.train.losses import Metric
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.step_plan import OptimizerStepPlan

MOMENTS = ("exp_avg", "exp_avg_sq")
CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


class StepResult(NamedTuple):
    """The global gradient norm before clipping, and the learning rate."""

    gradient_norm: float
    learning_rate: float

    @property
    def is_skipped(self) -> bool:
        return not math.isfinite(self.gradient_norm)


@dataclass(frozen=True, slots=True)
class MomentsSlice:
    """Parameters that are stepped together, by name, and the AdamW of these alone."""

    parameters: dict[str, DTensor]
    adamw: torch.optim.AdamW

    def moments(self) -> dict[str, torch.Tensor]:
        """This rank's shards on its device, by `<moment>/<parameter>`."""
        states = [(name, self.adamw.state[parameter]) for name, parameter in self.parameters.items()]
        return {f"{moment}/{name}": _local(state[moment]) for name, state in states for moment in MOMENTS}


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
        self._on_host: dict[str, torch.Tensor] | None = {} if are_offloaded(section, ranks) else None
        self.steps_made = 0
        self.skipped_in_a_row = 0
        limit_bytes = math.inf if self._on_host is None else MOMENTS_SLICE_BYTES
        self.slices = list[MomentsSlice]()
        rate = learning_rate(section, 0, total_optimizer_steps)
        for part in _sliced(parameters, limit_bytes):
            adamw = torch.optim.AdamW(
                part.values(), lr=rate, betas=section.betas, weight_decay=section.weight_decay, fused=True
            )
            for parameter in part.values():
                # Created here, not at the first step, so that step 0 has a state to save, and a resume has
                # one to load into.
                adamw.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=ranks.device),
                    **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS},
                }
            self.slices.append(MomentsSlice(part, adamw))
            if self._on_host is not None:  # before the next slice's moments need the device
                moments = self.slices[-1].moments()
                self._on_host |= host_like(moments)
                self._to_host(moments, self._on_host)
        ranks.synchronize()

    def step(self) -> StepResult:
        """Clip the gradients, step, and clear them. The step is skipped if their norm (the same on all ranks)
        is not finite: weights, moments and counters do not change."""
        gradients = [_local(p.grad) for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        # with one rank keep the plain norm: squaring would change its last bit
        if self._ranks.world_size > 1:
            norm = self._ranks.sum_shards(norm.square()).sqrt()
        result = StepResult(norm.item(), learning_rate(self._section, self.steps_made, self._total_steps))
        if result.is_skipped:
            for part in self.slices:
                part.adamw.zero_grad(set_to_none=True)
            self.skipped_in_a_row += 1
            return result
        torch._foreach_mul_(gradients, (self._section.grad_clip / (norm + CLIP_EPSILON)).clamp(max=1.0))
        del gradients  # or no slice's gradients would be freed before the last one's step
        # Copies and steps are queued in order on the device's stream: the host need not wait between them.
        for part in self.slices:
            part.adamw.param_groups[0]["lr"] = result.learning_rate
            on_host = self._on_host or {}
            moments = part.moments() if on_host else {}
            for key, local in moments.items():
                local.untyped_storage().resize_(on_host[key].nbytes)
                local.copy_(on_host[key], non_blocking=True)
            part.adamw.step()
            part.adamw.zero_grad(set_to_none=True)
            self._to_host(moments, on_host)
        if self._on_host is not None:
            self._ranks.synchronize()  # the host's copies are complete
            self._ranks.release_cache()
        self.steps_made += 1
        self.skipped_in_a_row = 0
        return result

    def moments(self) -> dict[str, torch.Tensor]:
        """This rank's shards of both moments, by `<moment>/<parameter>`: the host copies if they are
        offloaded."""
        if self._on_host is not None:
            return self._on_host
        return {key: local for part in self.slices for key, local in part.moments().items()}

    @staticmethod
    def _to_host(moments: dict[str, torch.Tensor], on_host: dict[str, torch.Tensor]) -> None:
        for key, local in moments.items():
            on_host[key].copy_(local, non_blocking=True)
            local.untyped_storage().resize_(0)

    def restore_steps(self, steps_made: int) -> None:
        """Set the counters; the moments are written in place through `moments`."""
        self.steps_made = steps_made
        for part in self.slices:
            for state in part.adamw.state.values():
                state["step"].fill_(float(steps_made))


def are_offloaded(section: TrainerSection, ranks: Ranks) -> bool:
    """Whether moments wait on the host between optimizer steps. On a CPU they are there anyway."""
    return section.offload_optimizer and ranks.device.type != "cpu"


def host_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Memory of the host for these tensors, pinned for those of a GPU."""
    return {k: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for k, t in tensors.items()}


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


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    return cast(DTensor, tensor).to_local()


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
    falling_steps = max(total_optimizer_steps - trainer.warmup_steps, 1)
    progress = min((optimizer_steps - trainer.warmup_steps) / falling_steps, 1.0)
    if trainer.lr_schedule == "linear":
        return trainer.lr * (1.0 - progress)
    return trainer.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


def aggregated(
    loss_N: torch.Tensor, microbatch: Microbatch, plan: OptimizerStepPlan, profile: Profile
) -> torch.Tensor:
    """The microbatch's part of the optimizer step's loss, aggregated by `algorithm.loss_agg_mode`: a mean
    over the sampled tokens, or the trajectories, of all ranks."""
    match profile.algorithm.loss_agg_mode:
        case "token-mean":
            return loss_N.sum() / max(plan.num_loss_tokens, 1)
        case "seq-mean-token-mean":
            total = (loss_N / microbatch.trajectory_tokens_N).sum()
        case "seq-mean-token-sum":
            total = loss_N.sum()
        case "seq-mean-token-sum-norm":
            total = loss_N.sum() / profile.rollout.max_response_tokens
    return total / max(plan.num_trajectories, 1)


def reduced(ranks: Ranks, seen: Sequence[Mapping[str, Metric]]) -> dict[str, Value]:
    """A train step's metrics over all ranks, from those of each microbatch. A collective: all ranks must have
    the same names."""
    if not seen:
        return {}
    kinds = {name: metric.kind for name, metric in sorted(seen[0].items())}
    amounts = {name: torch.stack([metrics[name].amount.double() for metrics in seen]) for name in kinds}
    maxima, sums = ([name for name in kinds if (kinds[name] == "max") is is_max] for is_max in (True, False))
    weights = amounts[sums[0]].new_tensor([sum(metrics[name].weight for metrics in seen) for name in sums])
    totals = ranks.sum(torch.stack([*(amounts[name].sum() for name in sums), *weights])).view(2, -1).tolist()
    values: dict[str, Value] = {}
    for name, amount, weight in zip(sums, *totals, strict=True):
        values[name] = Ratio(amount, weight) if kinds[name] == "mean" else Sum(amount)
    if maxima:
        largest = ranks.max(torch.stack([amounts[name].max() for name in maxima])).tolist()
        values |= {name: Max(amount) for name, amount in zip(maxima, largest, strict=True)}
    return values


def step_metrics(
    prefix: str, ranks: Ranks, seen: Sequence[Mapping[str, Metric]], results: Sequence[StepResult]
) -> dict[str, Value]:
    """`reduced`, and what all optimizer steps report. `seen` has the sums `<prefix>/loss`. A collective."""
    metrics = reduced(ranks, seen)
    norms = [result.gradient_norm for result in results if not result.is_skipped]
    metrics[f"{prefix}/grad_norm"] = Ratio(sum(norms), len(norms))
    metrics[f"{prefix}/loss"] = Ratio(take_sum(metrics, f"{prefix}/loss"), len(results))
    metrics[f"{prefix}/lr"] = Last(results[-1].learning_rate)
    metrics[f"{prefix}/skipped_steps"] = Sum(float(len(results) - len(norms)))
    return metrics


def take_sum(metrics: dict[str, Value], name: str) -> float:
    """Remove a sum that is only a part of another metric."""
    value = metrics.pop(name).value
    assert isinstance(value, float)
    return value


def finite(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """The metrics with finite values. (A skipped step makes others infinite or NaN.)"""
    return {
        name: metric
        for name, metric in metrics.items()
        if isinstance(metric.value, float | int) and math.isfinite(metric.value)
    }
