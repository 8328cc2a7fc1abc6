"""The numbers that the loop needs of a profile, and nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from asyncrl_cli.loop.ports import Interrupt

OnStale = Literal["wait", "accept", "drop", "requeue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Derived from a validated profile. Groups and steps as in docs/admission.md: R, K, W = K * R."""

    seed: int
    step_groups: int
    window_steps: int
    train_steps: int
    eta: Fraction
    max_staleness: int
    n: int
    colocate: bool = False
    interrupt: Interrupt = "drain"
    on_stale: OnStale = "wait"
    max_requeues: int = 2
    on_exhausted: Literal["fail", "drop"] = "drop"
    prefetch_groups: int = 0
    max_restarts: int = 0
    call_timeout_s: float = 600.0
    max_failed_ratio: float = 0.1
    max_skipped_steps: int = 3
    max_logprob_diff: float = 1e-3
    checkpoint_every_steps: int = 0
    eval_every_versions: int = 0
    eval_timeout_s: float = 300.0
    sync_timeout_s: float = 300.0
    weights_mode: Literal["async", "sync"] = "async"
    stop_grace_s: float = 60.0
    stall_timeout_s: float = 300.0

    @property
    def window_groups(self) -> int:
        return self.window_steps * self.step_groups

    @property
    def total_groups(self) -> int:
        return self.train_steps * self.step_groups

    def ends_window(self, step: int) -> bool:
        """Whether the window ends with train step `step` (counted from 1); the run's last step ends one too."""
        return step % self.window_steps == 0 or step == self.train_steps
