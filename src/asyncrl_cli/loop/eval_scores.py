"""What an eval's trajectories come to: mean@n and best@N of one set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import comb
from statistics import fmean, median

from asyncrl_cli.loop.attempts import TrajectoryMeta
from asyncrl_cli.loop.ports import EvalOutcome, EvalTry
from asyncrl_cli.loop.watching import EvalSummary


def summary_of(ended: Sequence[tuple[EvalTry, EvalOutcome]], *, version: int, eval_s: float) -> EvalSummary | None:
    """The summary of one set's trajectories; None if none of them has a score."""
    scored = [(entry, outcome) for entry, outcome in ended if isinstance(outcome, TrajectoryMeta)]
    if not scored:
        return None
    rewards: dict[str, list[float]] = defaultdict(list)
    for entry, meta in scored:
        rewards[entry.item["uid"]].append(meta.reward)
    samples = 1 + max(entry.sample for entry, _ in ended)
    return EvalSummary(
        version=version,
        reward_mean=fmean(map(fmean, rewards.values())),
        num_prompts=len(rewards),
        response_tokens_median=median(meta.response_tokens for _, meta in scored),
        eval_s=eval_s,
        num_failed=len(ended) - len(scored),
        eval_set=ended[0][0].eval_set,
        samples_per_prompt=samples,
        truncated_ratio=fmean(meta.finish_reason != "stop" for _, meta in scored),
        best=tuple(_best(list(rewards.values()), samples)),
    )


def _best(rewards: Sequence[Sequence[float]], samples: int) -> Iterator[tuple[int, float]]:
    """(N, best@N) for N = 2, 4, ... below `samples`, and for `samples` itself. A prompt counts where it has N scored samples."""
    sizes = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    for size in [*sizes, samples] if samples > 1 else ():
        if enough := [best_of(own, size) for own in rewards if len(own) >= size]:
            yield size, fmean(enough)


def best_of(rewards: Sequence[float], size: int) -> float:
    """The expected best of `size` samples of a prompt, estimated without bias from at least as many.

    It is the mean of the best over all choices of `size` different samples, exactly; for rewards of 0 and 1 the estimator of
    pass@k (Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1). verl draws 1,000 times with replacement
    instead, so that one sample may count twice: its best@N is lower on average.
    """
    ways = comb(len(rewards), size)
    return sum(reward * (comb(rank, size - 1) / ways) for rank, reward in enumerate(sorted(rewards)))
