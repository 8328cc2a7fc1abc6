"""How fast each phase is alone, and the ideal time that follows: a lower bound on the time for some work.

With each side running alone, at full batch efficiency, without any waits:

    apart       ideal = max(generation work / rollout capacity, train work / trainer capacity)
    colocated   ideal = generation work / rollout capacity + train work / trainer capacity

A colocated job's capacities are those of all its resources, in either phase. The ideal leaves out weight
syncs, the long tail of a batch, rewards and waits, because a schedule can reduce these. bound_ratio = ideal /
measured, over the same windows.

If both sides share a machine (CPU cores, caches, memory), no schedule can reach the ideal, because each side
is slower while the other works. `at_once_s` is the same maximum with these slower rates; only time beyond it
is lost by the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Sampled tokens per second that each phase generates or trains alone, with all the devices that the
    profile gives it.

    Prompts take time but their tokens are not counted, as in `tokens_trained`. Training includes the
    old-logprob pass, if any.
    """

    rollout_tokens_per_s: float
    trainer_tokens_per_s: float
    colocated: bool
    rollout_beside_tokens_per_s: float | None = None
    trainer_beside_tokens_per_s: float | None = None
    """Both `*_beside_*`: the same while the other side also works. None if that makes no difference or was
    not measured."""


def ideal_times(sampled_tokens: float, trained_tokens: float, capacities: Capacities) -> dict[str, float]:
    """Seconds of each phase alone, of both (`ideal_s`), and `at_once_s` if the `*_beside_*` capacities are
    known.

    `sampled_tokens`: tokens that the workers sampled within the measured time (not ahead of it);
    `trained_tokens`: tokens that the trainer counted.
    """
    generation_s = sampled_tokens / capacities.rollout_tokens_per_s
    training_s = trained_tokens / capacities.trainer_tokens_per_s
    ideal_s = generation_s + training_s if capacities.colocated else max(generation_s, training_s)
    times = {"generation_s": generation_s, "training_s": training_s, "ideal_s": ideal_s}
    rollout, trainer = capacities.rollout_beside_tokens_per_s, capacities.trainer_beside_tokens_per_s
    if rollout and trainer:
        times["at_once_s"] = max(sampled_tokens / rollout, trained_tokens / trainer)
    return times
