"""What a search may change of a profile: the split of the GPUs, K and require_batches, eta and its bound, the slots.

A `Setting` is one choice of them and knows the `--set`s that make it; a `Space` holds the values of each axis. Windows are all
pairs (K, require_batches) with the workload's own window W, and shorter ones with the workload's own step. Slots never exceed
the workload's, which its KV cache was measured with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.profile.arithmetic import staleness_bound
from asyncrl_cli.profile.schema import Profile

NODE_GPUS = 8
HALF_NODE_GPUS = NODE_GPUS // 2
MOST_SPLITS = 16
ETAS = tuple(map(Decimal, ("0", "0.25", "0.5", *(str(2**power) for power in range(7)))))
SLOT_SHARES = (0.5, 0.75, 1.0)
KEYS = {
    "trainer_workers": "placement.trainer_workers",
    "rollout_workers": "rollout.workers",
    "window_steps": "async_training.trigger_parameter_sync_step",
    "require_batches": "async_training.require_batches",
    "eta": "async_training.staleness_threshold",
    "max_staleness": "async_training.max_staleness",
    "partial_rollout": "async_training.partial_rollout",
    "slots": "rollout.slots",
}
"""Of a profile, by a setting's own names."""


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
        gpus = [f"placement.gpus={self.gpus}"] if self.gpus else []
        return gpus + [f"{key}={str(getattr(self, name)).lower()}" for name, key in KEYS.items()]

    def to_json(self) -> dict[str, Any]:
        """By the profile's names, but that `workers` are of two kinds."""
        values = {name if "workers" in name else key.rpartition(".")[2]: getattr(self, name) for name, key in KEYS.items()}
        return {"split": self.split, **values, "staleness_threshold": float(self.eta), "sets": self.sets()}

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
    """The values of each axis, ascending, around the `current` setting. `bound` is S; rollouts are partial where eta > 0, if
    `partial_rollout`."""

    current: Setting
    bound: int
    windows: tuple[tuple[int, int], ...]
    etas: tuple[Decimal, ...]
    slots: tuple[int, ...]
    partial_rollout: bool

    @property
    def start(self) -> Setting:
        """The current setting with enough eta for the two sides to overlap: with less, the best split would be another one."""
        return self._with_eta(self.current, max((eta for eta in self.etas if eta <= 1), default=self.etas[0]))

    def allows(self, setting: Setting) -> bool:
        return setting.max_staleness <= self.bound

    def along_splits(self, setting: Setting) -> Iterator[Setting]:
        """All splits, by nodes where there are two or more: at most `MOST_SPLITS`, evenly spread."""
        return (self._with_rollout(setting, devices) for devices in range(self._unit, self._devices, self._unit))

    def beside_split(self, setting: Setting) -> Iterator[Setting]:
        """The splits next to a setting's: a step of `along_splits` away, half of it, and so on down to half a node."""
        step = self._unit
        while step >= min(self._unit, math.lcm(HALF_NODE_GPUS, self._each)):
            for devices in (setting.rollout_devices + step, setting.rollout_devices - step):
                if 0 < devices < self._devices:
                    yield self._with_rollout(setting, devices)
            step //= 2

    def along_windows(self, setting: Setting) -> Iterator[Setting]:
        return (replace(setting, window_steps=steps, require_batches=batches) for steps, batches in self.windows)

    def along_etas(self, setting: Setting) -> Iterator[Setting]:
        """Each with the least bound that it needs and, where anything is stale, with the largest that is allowed."""
        for eta in self.etas:
            yield self._with_eta(setting, eta)
            if eta > 0:
                yield replace(self._with_eta(setting, eta), max_staleness=self.bound)

    def along_slots(self, setting: Setting) -> Iterator[Setting]:
        return (replace(setting, slots=slots) for slots in self.slots)

    def on_current_split(self, setting: Setting) -> Setting:
        return self._with_rollout(setting, self.current.rollout_devices)

    @property
    def _each(self) -> int:
        return max(self.current.gpus_per_rollout_worker, 1)

    @property
    def _devices(self) -> int:
        return self.current.trainer_workers + self.current.rollout_devices

    @property
    def _unit(self) -> int:
        """GPUs, or processes, by which the splits differ; rollout workers stay whole."""
        unit = 1
        if self._devices >= 2 * NODE_GPUS:
            unit = next(gpus for gpus in (NODE_GPUS, HALF_NODE_GPUS, 2, 1) if self._devices % gpus == 0)
        while self._devices > unit * MOST_SPLITS:
            unit *= 2
        return math.lcm(unit, self._each)

    def _with_rollout(self, setting: Setting, devices: int) -> Setting:
        return replace(setting, trainer_workers=self._devices - devices, rollout_workers=devices // self._each)

    def _with_eta(self, setting: Setting, eta: Decimal) -> Setting:
        """With the least bound that eta needs: at eta = 0 nothing is stale, and nothing runs that could be frozen."""
        return replace(setting, eta=eta, max_staleness=math.ceil(eta), partial_rollout=self.partial_rollout and eta > 0)


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
        windows=windows_of(current.window_steps, current.require_batches),
        etas=etas,
        slots=slots_up_to(current.slots, profile.rollout.n),
        partial_rollout=current.partial_rollout or current.eta == 0,
    )


def windows_of(window_steps: int, require_batches: int) -> tuple[tuple[int, int], ...]:
    """(K, require_batches), by K: all pairs with the same product, and fewer steps of the same require_batches."""
    batches = window_steps * require_batches
    same = {(steps, batches // steps) for steps in range(1, batches + 1) if batches % steps == 0}
    shorter = {(steps, require_batches) for steps in range(1, window_steps) if window_steps % steps == 0}
    return tuple(sorted(same | shorter))


def etas_up_to(bound: int, current: Decimal) -> tuple[Decimal, ...]:
    """0 to S, the current one among them if it keeps the bound."""
    return tuple(sorted({eta for eta in (*ETAS, Decimal(bound), current) if eta <= bound}))


def slots_up_to(ceiling: int, n: int) -> tuple[int, ...]:
    return tuple(sorted({max(n, round(share * ceiling)) for share in SLOT_SHARES}))
