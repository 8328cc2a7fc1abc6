"""Advantages from rewards: `algorithm.adv_estimator`. Pure Python, deterministic; one function per estimator.

Each takes the rewards of an optimizer step, one list per group, and returns one advantage per trajectory in
the same shape. With r a reward, m and s the mean and standard deviation (n - 1 in its denominator) of its
group of n:

    grpo                            (r - m) / (s + 1e-6); r - m without `normalize_advantages`
    rloo                            r - mean of the others of the group = (r - m) * n / (n - 1)
    reinforce_plus_plus             (r - M) / (S + 1e-6), with M and S over all trajectories of the optimizer step
    reinforce_plus_plus_baseline    the same, applied to r - m

`gae`, and any of these with a KL penalty in the reward, need values per token, so the ranks compute them
(credit.py).

If all rewards of a group are equal, `grpo`, `rloo` and the `_baseline` give it advantages of 0: nothing is
learned from it.

Sources: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), section 4.1, and Liu et al. 2025
(arXiv:2503.20783), section 3.2, for grpo with and without s; Ahmadian et al. 2024 (arXiv:2402.14740) for
rloo; Hu 2025, REINFORCE++ (arXiv:2501.03262). Overlong shaping: Yu et al. 2025, DAPO (arXiv:2503.14476),
equation 13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from asyncrl_cli.contracts.prompt_group import TrajectoryMeta
from asyncrl_cli.profile.algorithm_section import AlgorithmSection

STD_EPSILON = 1e-6
Rewards = Sequence[Sequence[float]]


def needs_columns(algorithm: AlgorithmSection) -> bool:
    """Whether advantages also depend on the reference or the critic (credit.py)."""
    return algorithm.has_critic or algorithm.use_kl_in_reward


def advantages_of(rewards: Rewards, algorithm: AlgorithmSection) -> list[list[float]]:
    """Advantages of an optimizer step's trajectories, group by group."""
    if algorithm.adv_estimator == "grpo":
        return grpo(rewards, algorithm.normalize_advantages)
    return ESTIMATORS[algorithm.adv_estimator](rewards)


def shaped_reward(meta: TrajectoryMeta, algorithm: AlgorithmSection, max_tokens: int) -> float:
    """The reward minus DAPO's overlong penalty, which applies to the last `overlong_buffer_tokens` before the
    limit `max_tokens` (rollout.max_response_tokens)."""
    if algorithm.overlong_buffer_tokens is None:
        return meta.reward
    buffer = algorithm.overlong_buffer_tokens
    beyond = min(max(0, meta.response_tokens - (max_tokens - buffer)), buffer)
    return meta.reward - algorithm.overlong_penalty_factor * beyond / buffer


def grpo(groups: Rewards, normalize: bool) -> list[list[float]]:
    return [_normalized(_centred(rewards)) if normalize else _centred(rewards) for rewards in groups]


def rloo(groups: Rewards) -> list[list[float]]:
    return [[c * len(rewards) / max(len(rewards) - 1, 1) for c in _centred(rewards)] for rewards in groups]


def reinforce_plus_plus(groups: Rewards) -> list[list[float]]:
    advantages = iter(_normalized(_centred([reward for rewards in groups for reward in rewards])))
    return [[next(advantages) for _ in rewards] for rewards in groups]


def reinforce_plus_plus_baseline(groups: Rewards) -> list[list[float]]:
    return reinforce_plus_plus([_centred(rewards) for rewards in groups])


ESTIMATORS: dict[str, Callable[[Rewards], list[list[float]]]] = {
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}


def _centred(rewards: Sequence[float]) -> list[float]:
    """Differences from the mean; exactly 0 where all rewards are equal."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _normalized(centred: Sequence[float]) -> list[float]:
    if not any(centred):
        return list(centred)
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(centred) - 1))
    return [c / (std + STD_EPSILON) for c in centred]
