"""How long responses are: drawn per group, so that a prompt's answers may resemble each other.

    log x = log(median) + sigma * (sqrt(r) * z_prompt + sqrt(1 - r) * z_trajectory),   x then rounded into 1 ... max_tokens

r is `prompt_variance_ratio`. A list is drawn from by the same normal variates, through its quantiles (a Gaussian copula).
The generator is seeded by the group's own seed and nothing else is drawn from it before: the same group has the same
lengths whichever profile runs, on whichever worker, after whatever happened.
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean

from asyncrl_cli.simulate.workload import Lengths

STANDARD = NormalDist()


class ResponseLengths:
    """Call it with a group's generator and n: the n response lengths, in tokens."""

    def __init__(self, lengths: Lengths, max_response_tokens: int) -> None:
        self.max_response_tokens = max_response_tokens
        self._between = math.sqrt(lengths.prompt_variance_ratio)
        self._within = math.sqrt(1 - lengths.prompt_variance_ratio)
        self._sorted = tuple(sorted(min(tokens, max_response_tokens) for tokens in lengths.response_tokens))
        self._from = self._from_list
        if lengths.distribution == "lognormal":
            assert lengths.median_tokens is not None
            assert lengths.sigma is not None
            self._log_median, self._sigma = math.log(lengths.median_tokens), lengths.sigma
            self._from = self._from_lognormal

    def __call__(self, rng: random.Random, n: int) -> list[int]:
        common = self._between * rng.gauss(0.0, 1.0)
        return [self._from(common + self._within * rng.gauss(0.0, 1.0)) for _ in range(n)]

    def _from_lognormal(self, normal: float) -> int:
        tokens = math.exp(min(self._log_median + self._sigma * normal, 40.0))
        return max(1, min(round(tokens), self.max_response_tokens))

    def _from_list(self, normal: float) -> int:
        return self._sorted[min(int(STANDARD.cdf(normal) * len(self._sorted)), len(self._sorted) - 1)]


def mean_tokens(lengths: Lengths, max_response_tokens: int) -> float:
    """The expected length, in closed form (lognormal: its limited expected value)."""
    if lengths.distribution == "list":
        return fmean(min(tokens, max_response_tokens) for tokens in lengths.response_tokens)
    assert lengths.median_tokens is not None
    assert lengths.sigma is not None
    mu, sigma, cap = math.log(lengths.median_tokens), lengths.sigma, float(max_response_tokens)
    if sigma == 0:
        return min(lengths.median_tokens, cap)
    z = (math.log(cap) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * STANDARD.cdf(z - sigma) + cap * (1 - STANDARD.cdf(z))
