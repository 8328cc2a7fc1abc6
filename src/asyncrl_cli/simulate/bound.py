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


def ideal_times(sampled_tokens: float, trained_tokens: float, capacities: Capacities) -> dict[str, float]:
    """Seconds of each phase alone, of both (`ideal_s`), and `at_once_s` where it is known what they do beside each other.

    Of the groups that were trained: tokens as the workers made them (in that time, not ahead of it), as the trainer counts them.
    """
    generation_s = sampled_tokens / capacities.rollout_tokens_per_s
    training_s = trained_tokens / capacities.trainer_tokens_per_s
    ideal_s = generation_s + training_s if capacities.colocated else max(generation_s, training_s)
    times = {"generation_s": generation_s, "training_s": training_s, "ideal_s": ideal_s}
    rollout, trainer = capacities.rollout_beside_tokens_per_s, capacities.trainer_beside_tokens_per_s
    if rollout and trainer:
        times["at_once_s"] = max(sampled_tokens / rollout, trained_tokens / trainer)
    return times
