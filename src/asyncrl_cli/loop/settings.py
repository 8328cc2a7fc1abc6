"""What the loop takes from a profile: the profile itself, its schedule, and the limits that follow from several keys."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Interrupt, Profile

STALL_MARGIN_S = 60.0
MAX_LOGPROB_DIFF = {"float32": 1e-3, "bfloat16": 0.1}
"""Bfloat16 rounds logits between 8 and 16 to sixteenths, on both sides, and every layer before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """`load_timeout_s`: how long a worker may take to receive and load a version, beside draining."""

    profile: Profile
    schedule: Schedule
    load_timeout_s: float

    @classmethod
    def of(cls, profile: Profile, load_timeout_s: float | None = None) -> LoopSettings:
        """`load_timeout_s` is `weights.timeout_s`, unless the transport makes loads wait for each other."""
        limit_s = profile.weights.timeout_s if load_timeout_s is None else load_timeout_s
        return cls(profile=profile, schedule=Schedule.of(profile), load_timeout_s=limit_s)

    @property
    def interrupt(self) -> Interrupt:
        """What a load does to a worker's running rollouts: without partial rollouts they finish first."""
        return (self.profile.rollout.interrupt or "keep-kv") if self.profile.async_training.partial_rollout else "drain"

    @property
    def sync_timeout_s(self) -> float:
        """How long nothing may move while the trainer waits for loads."""
        return self.load_timeout_s + (self.profile.rollout.call_timeout_s if self.interrupt == "drain" else 0.0)

    @property
    def stall_timeout_s(self) -> float:
        """The watchdog's limit. It is longer than that of any single call or load, whose own error says more."""
        profile = self.profile
        if profile.run.stall_timeout_s is not None:
            return profile.run.stall_timeout_s
        return max(profile.rollout.call_timeout_s, profile.eval.timeout_s, self.sync_timeout_s) + STALL_MARGIN_S

    @property
    def max_logprob_diff(self) -> float:
        return self.profile.weights.max_logprob_diff or MAX_LOGPROB_DIFF[self.profile.model.dtype]

    def ends_window(self, step: int) -> bool:
        """Whether the window ends with train step `step` (counted from 1); the run's last step ends one too."""
        return step % self.schedule.window_steps == 0 or step == self.schedule.train_steps

    def window_after(self, step: int) -> tuple[int, int]:
        """The version after train step `step`, and how many groups its window has taken by then."""
        windows, steps_in_window = divmod(step, self.schedule.window_steps)
        if steps_in_window and self.ends_window(step):
            return windows + 1, 0
        return windows, steps_in_window * self.schedule.step_groups
