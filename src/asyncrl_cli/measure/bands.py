"""Training metrics that should stay within a band, and advice for when one leaves it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from statistics import fmean

from asyncrl_cli.measure.values import Scalar
from asyncrl_cli.profile.algorithm_section import AlgorithmSection

SIGNALS = (
    (
        "correction/effective_ratio",
        "warn_effective_ratio",
        "below",
        "few tokens carry most of the gradient; lower async_training.staleness_threshold or trainer.lr, or "
        "cut the weights with algorithm.rollout_is_threshold = 2.0",
    ),
    (
        "correction/kl",
        "warn_kl",
        "above",
        "the policy is far from the one that sampled its data; lower async_training.staleness_threshold or "
        "trainer.lr, and see algorithm.rollout_is and rollout_rs",
    ),
    (
        "ref/kl",
        "warn_ref_kl",
        "above",
        "the policy is far from its reference; raise algorithm.kl_loss_coef or kl_coef, or lower trainer.lr",
    ),
)
"""(metric, key of its limit in [algorithm], the side of the limit that causes a warning, advice)."""
MEAN_STEPS = 5
"""A signal is the mean over this many train steps that measured it: a single step may leave its band by
chance."""
FLAT_STEPS = 5
"""Train steps in a row with one and the same reward everywhere. With few and small groups, fewer steps may be
chance."""


class Bands:
    """Warns of each signal once, until it is back within its band."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm
        self._outside: set[str] = set()
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MEAN_STEPS))
        self._num_flat = 0

    def flat(self, rewards: Collection[float]) -> Iterator[str]:
        """A warning when all trajectories of `FLAT_STEPS` train steps in a row have the same reward, if
        rewards train the policy."""
        self._num_flat = self._num_flat + 1 if len(set(rewards)) == 1 else 0
        if self._algorithm.adv_estimator == "none":
            return
        if self._num_flat == FLAT_STEPS:
            yield (
                f"all trajectories of the last {FLAT_STEPS} train steps have the reward "
                f"{next(iter(rewards)):g}, which teaches nothing; `asyncrl samples RUN` shows the responses"
            )

    def left(self, figures: Mapping[str, Scalar]) -> Iterator[str]:
        """A warning for each signal that leaves its band with this step's figures. Signals that were not
        measured do not change."""
        for name, key, side, advice in SIGNALS:
            if not isinstance(figure := figures.get(name), (int, float)):
                continue
            recent, limit = self._recent[name], getattr(self._algorithm, key)
            recent.append(figure)
            if len(recent) < MEAN_STEPS:
                continue
            mean = fmean(recent)
            is_outside = mean < limit if side == "below" else mean > limit
            if is_outside and name not in self._outside:
                yield (
                    f"{name} = {mean:.3g}, the mean of {MEAN_STEPS} steps, is {side} algorithm.{key} = "
                    f"{limit:g}: {advice}"
                )
            (self._outside.add if is_outside else self._outside.discard)(name)
