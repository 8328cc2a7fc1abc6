"""The least time that some work can take: what each side does alone, at full batch efficiency, with nothing in its way.

    apart       ideal = max(generation work / rollout capacity, train work / trainer capacity)
    colocated   ideal = generation work / rollout capacity + train work / trainer capacity

A colocated job's capacities are those of all its resources, in either phase. Weight syncs, the long tail of a batch, rewards
and waits are no part of the ideal: they are what a schedule can lose. bound_ratio = ideal / measured, over the same windows.

Where both sides share a machine (CPU cores, their caches and memory), the ideal is out of reach: at once, each side is slower than
alone. `at_once_s` is the same maximum with what each side does while the other works, too: what is lost beyond that is the job's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Sampled tokens per second that each phase alone generates and trains, with all that the profile gives it.

    Prompts cost time and count no tokens, as in `tokens_trained`. Training includes the old-logprob pass where the profile has one.
    """

    rollout_tokens_per_s: float
    trainer_tokens_per_s: float
    colocated: bool
    rollout_beside_tokens_per_s: float | None = None
    trainer_beside_tokens_per_s: float | None = None
    """While the other side works, too. None where that is the same, or is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Sampled tokens of the groups that were trained: as the workers made them (in that time, not ahead of it), as the trainer
    counts them."""

    sampled_tokens: float
    trained_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`limited_by` is the phase that takes longer: generation or training."""

    generation_s: float
    training_s: float
    colocated: bool
    at_once_s: float | None = None

    @property
    def ideal_s(self) -> float:
        return self.generation_s + self.training_s if self.colocated else max(self.generation_s, self.training_s)

    @property
    def limited_by(self) -> str:
        return "generation" if self.generation_s >= self.training_s else "training"


def bound_of(work: Work, capacities: Capacities) -> Bound:
    rollout, trainer = capacities.rollout_beside_tokens_per_s, capacities.trainer_beside_tokens_per_s
    return Bound(
        generation_s=work.sampled_tokens / capacities.rollout_tokens_per_s,
        training_s=work.trained_tokens / capacities.trainer_tokens_per_s,
        colocated=capacities.colocated,
        at_once_s=max(work.sampled_tokens / rollout, work.trained_tokens / trainer) if rollout and trainer else None,
    )
