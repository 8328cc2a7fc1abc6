"""Settings of the policy trainer: what a rank needs of the profile, as one picklable value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from asyncrl_cli.profile.schema import Profile

BYTES_PER_MB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """See the profile's fields of the same names. `window_steps` is K; `total_optimizer_steps` ends the schedule."""

    model_dir: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False
    temperature: float = 1.0
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    max_importance_weight: float | None = None
    window_steps: int = 1
    max_tokens_per_microbatch: int = 8192
    lr: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_steps: int = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_optimizer_steps: int = 1
    gather_bucket_size_bytes: int = 2048 * BYTES_PER_MB
    overlap: bool = True
    probe_sequences: int = 4
    seed: int = 0
    threads: int = 1
    collective_timeout_s: float = 600.0

    @classmethod
    def from_profile(cls, profile: Profile, model_dir: Path | str, total_optimizer_steps: int) -> TrainerSettings:
        trainer, algorithm = profile.trainer, profile.algorithm
        return cls(
            model_dir=str(model_dir),
            dtype=profile.model.dtype,
            trust_remote_code=profile.model.trust_remote_code,
            temperature=profile.rollout.temperature,
            clip_ratio_low=algorithm.clip_ratio_low,
            clip_ratio_high=algorithm.clip_ratio_high,
            old_logprobs=algorithm.old_logprobs,
            max_importance_weight=algorithm.max_importance_weight,
            window_steps=profile.async_training.trigger_parameter_sync_step,
            max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
            lr=trainer.lr,
            betas=trainer.betas,
            weight_decay=trainer.weight_decay,
            grad_clip=trainer.grad_clip,
            warmup_steps=trainer.warmup_steps,
            lr_schedule=trainer.lr_schedule,
            total_optimizer_steps=total_optimizer_steps,
            gather_bucket_size_bytes=profile.weights.gather_bucket_size_mb * BYTES_PER_MB,
            overlap=profile.weights.overlap,
            probe_sequences=profile.weights.probe_sequences,
            seed=profile.run.seed,
            threads=profile.placement.cpus_per_worker,
            collective_timeout_s=profile.rollout.call_timeout_s,
        )

    def learning_rate(self, optimizer_steps: int) -> float:
        """Rate of the next optimizer step after `optimizer_steps` made: linear warm-up, then the schedule.

        linear and cosine fall from `lr` at the first step after the warm-up to zero at the run's end (the last step
        itself still learns a little: zero would be reached one step later).
        """
        if optimizer_steps < self.warmup_steps:
            return self.lr * (optimizer_steps + 1) / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.lr
        decay_steps = max(self.total_optimizer_steps - self.warmup_steps, 1)
        progress = min((optimizer_steps - self.warmup_steps) / decay_steps, 1.0)
        if self.lr_schedule == "linear":
            return self.lr * (1.0 - progress)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
