"""What a search may change of a profile: the split of the GPUs, K and require_batches, eta and its bound, the slots.

A `Space` holds the values of each axis; a `Setting` is one choice of them, and knows the `--set`s that make it. Windows: all
pairs (K, require_batches) with the workload's own window W, and shorter windows with the workload's R. (Figures are per W
groups of the workload's own window throughout, so that shorter windows compare.) Slots never exceed the workload's, which
its KV cache was measured with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TypeVar

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.profile.arithmetic import staleness_bound
from asyncrl_cli.profile.schema import Profile

T = TypeVar("T")

NODE_GPUS = 8
FEWEST_GPUS_IN_NODES = 2 * NODE_GPUS
"""From two nodes on, a side gets whole nodes; beside the best of these splits, half a node is tried, too."""
ETAS = (Decimal(0), Decimal("0.25"), Decimal("0.5"), Decimal(1))
SLOT_SHARES = (0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of the search. `gpus` is 0 on CPUs, where a rank and a worker are processes."""

    trainer_workers: int
    rollout_workers: int
    gpus_per_rollout_worker: int
    gpus: int
    window_steps: int
    require_batches: int
    eta: Decimal
    max_staleness: int
    slots: int
    partial_rollout: bool

    @property
    def split(self) -> str:
        """trainer:rollout, in GPUs or in processes."""
        return f"{self.trainer_workers}:{self.rollout_devices}"

    @property
    def rollout_devices(self) -> int:
        """GPUs, or processes."""
        return self.rollout_workers * max(self.gpus_per_rollout_worker, 1)

    @property
    def window_batches(self) -> int:
        """W in mini-batches."""
        return self.window_steps * self.require_batches

    def sets(self) -> list[str]:
        """Keys and values for `--set`, whatever the profile says of them."""
        gpus = {"placement.gpus": self.gpus} if self.gpus else {}
        values = {
            **gpus,
            "placement.trainer_workers": self.trainer_workers,
            "rollout.workers": self.rollout_workers,
            "async_training.trigger_parameter_sync_step": self.window_steps,
            "async_training.require_batches": self.require_batches,
            "async_training.staleness_threshold": self.eta,
            "async_training.max_staleness": self.max_staleness,
            "async_training.partial_rollout": str(self.partial_rollout).lower(),
            "rollout.slots": self.slots,
        }
        return [f"{key}={value}" for key, value in values.items()]

    @classmethod
    def of(cls, profile: Profile, plan: JobPlan) -> Setting:
        training = profile.async_training
        return cls(
            trainer_workers=plan.counts.trainer_workers,
            rollout_workers=plan.counts.rollout_workers,
            gpus_per_rollout_worker=plan.counts.gpus_per_rollout_worker,
            gpus=plan.gpus,
            window_steps=training.trigger_parameter_sync_step,
            require_batches=training.require_batches,
            eta=training.staleness_threshold,
            max_staleness=staleness_bound(profile),
            slots=profile.rollout.slots,
            partial_rollout=training.partial_rollout,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Values of every axis, ascending. `current` is the setting one starts from, `bound` is S."""

    current: Setting
    bound: int
    splits: tuple[tuple[int, int], ...]
    fine_splits: tuple[tuple[int, int], ...]
    """By half nodes."""
    windows: tuple[tuple[int, int], ...]
    etas: tuple[Decimal, ...]
    slots: tuple[int, ...]
    partial_rollout: bool
    """Whether rollouts are partial where eta > 0."""

    def allows(self, setting: Setting) -> bool:
        return setting.max_staleness <= self.bound

    def with_eta(self, setting: Setting, eta: Decimal) -> Setting:
        """With the least bound that eta needs: at eta = 0 nothing is stale, and nothing runs that could be frozen."""
        return replace(setting, eta=eta, max_staleness=math.ceil(eta), partial_rollout=self.partial_rollout and eta > 0)

    def probes(self) -> list[Setting]:
        """The current split: as it is, at the largest eta with all windows beside its own, and at the least eta."""
        ahead = self.with_eta(self.current, self.etas[-1])
        settings = (self.current, ahead, self.with_eta(self.current, self.etas[0]), *self._other_windows(ahead))
        return [setting for setting in dict.fromkeys(settings) if self.allows(setting)]

    def screen(self, setting: Setting, balanced: float, at_most: int) -> list[Setting]:
        """The splits next to `balanced` (the trainer's share of all devices) and two far ones, all else as in `setting`."""
        total = setting.trainer_workers + setting.rollout_devices
        nearest = sorted(self.splits, key=lambda split: (abs(split[0] / total - balanced), split))
        near = nearest[: max(at_most - 2, 1)]
        # A share is estimated from one split: should it mislead, there is something on either side of it.
        below, above = [s for s in self.splits if s < min(near)], [s for s in self.splits if s > max(near)]
        splits = (*near, *spread(below, 1), *spread(above, 1))
        return [self._with_split(setting, split) for split in splits]

    def neighbours(self, setting: Setting, *, wants_ranks: bool) -> Iterator[Setting]:
        """One step along one axis, the most promising first: `wants_ranks` says which side of the split is the slower one."""
        split = (setting.trainer_workers, setting.rollout_workers)
        splits = sorted(beside(self.splits, split), reverse=wants_ranks)
        yield from (self._with_split(setting, other) for other in splits[:1])
        yield from (self.with_eta(setting, eta) for eta in reversed(beside(self.etas, setting.eta)))
        yield from self._other_windows(setting)
        yield from (replace(setting, slots=slots) for slots in beside(self.slots, setting.slots))
        if setting.eta > 0:
            yield from (replace(setting, max_staleness=bound) for bound in (math.ceil(setting.eta), self.bound))
        yield from (self._with_split(setting, other) for other in splits[1:])

    def finer(self, setting: Setting) -> list[Setting]:
        """Half a node more on either side: the other half of that node is the other side's."""
        split = (setting.trainer_workers, setting.rollout_workers)
        return [self._with_split(setting, other) for other in beside(self.fine_splits, split)]

    def _with_split(self, setting: Setting, split: tuple[int, int]) -> Setting:
        return replace(setting, trainer_workers=split[0], rollout_workers=split[1])

    def _other_windows(self, setting: Setting) -> Iterator[Setting]:
        """More or fewer train steps of the same window, then a longer or shorter window of the same train steps."""
        own = (setting.window_steps, setting.require_batches)
        same_window = [pair for pair in self.windows if pair[0] * pair[1] == setting.window_batches]
        same_step = [pair for pair in self.windows if pair[1] == setting.require_batches]
        for steps, batches in dict.fromkeys((*beside(same_window, own), *beside(same_step, own))):
            yield replace(setting, window_steps=steps, require_batches=batches)


def on_split_of(current: Setting, setting: Setting) -> Setting:
    return replace(setting, trainer_workers=current.trainer_workers, rollout_workers=current.rollout_workers)


def space_of(profile: Profile, plan: JobPlan, *, bound: int) -> Space:
    """Around a profile as it is compiled; all settings use the same GPUs (or, on CPUs, processes) in total.

    Raises ConfigError where the bound allows nothing that the profile would.
    """
    current = Setting.of(profile, plan)
    etas = etas_up_to(bound, current.eta)
    if profile.rollout.interrupt is not None:
        etas = tuple(eta for eta in etas if eta > 0)
    if not etas:
        raise ConfigError(
            f'rollout.interrupt = "{profile.rollout.interrupt}" with at most {bound} versions of staleness: '
            "nothing is generated ahead, so no rollout can be interrupted",
            hint="--max-staleness 1, or a profile without rollout.interrupt",
        )
    return Space(
        current=current,
        bound=bound,
        splits=splits_of(current),
        fine_splits=splits_of(current, node=NODE_GPUS // 2),
        windows=windows_of(current.window_steps, current.require_batches),
        etas=etas,
        slots=slots_up_to(current.slots, profile.rollout.n),
        partial_rollout=current.partial_rollout or current.eta == 0,
    )


def splits_of(current: Setting, node: int = NODE_GPUS) -> tuple[tuple[int, int], ...]:
    """(ranks, workers) by ranks: whole nodes on each side where there are several, the current split in any case."""
    each = max(current.gpus_per_rollout_worker, 1)
    total = current.trainer_workers + current.rollout_workers * each
    unit = 1
    if total >= FEWEST_GPUS_IN_NODES:
        unit = next(gpus for gpus in (node, 4, 2, 1) if total % gpus == 0)
    splits = {(ranks, (total - ranks) // each) for ranks in range(unit, total, unit) if (total - ranks) % each == 0}
    return tuple(sorted(splits | {(current.trainer_workers, current.rollout_workers)}))


def windows_of(window_steps: int, require_batches: int) -> tuple[tuple[int, int], ...]:
    """(K, require_batches), by K: all pairs with the same product, and fewer steps of the same require_batches."""
    batches = window_steps * require_batches
    same = {(steps, batches // steps) for steps in range(1, batches + 1) if batches % steps == 0}
    shorter = {(steps, require_batches) for steps in range(1, window_steps) if window_steps % steps == 0}
    return tuple(sorted(same | shorter))


def etas_up_to(bound: int, current: Decimal) -> tuple[Decimal, ...]:
    """0 to S: quarters of the first window, then doubling; the current one if it keeps the bound."""
    doubled = [Decimal(2**power) for power in range(1, 7)]
    return tuple(sorted({eta for eta in (*ETAS, *doubled, Decimal(bound), current) if eta <= bound}))


def slots_up_to(ceiling: int, n: int) -> tuple[int, ...]:
    return tuple(sorted({max(n, round(share * ceiling)) for share in SLOT_SHARES}))


def beside(values: Sequence[T], value: T) -> list[T]:
    """The neighbours of a value on its axis."""
    if value not in values:
        return []
    place = values.index(value)
    return [values[other] for other in (place - 1, place + 1) if 0 <= other < len(values)]


def spread(values: Sequence[T], count: int) -> list[T]:
    """At most `count` values, evenly spread and away from the ends."""
    if count >= len(values):
        return list(values)
    return [values[int((index + 0.5) * len(values) / count)] for index in range(count)]
