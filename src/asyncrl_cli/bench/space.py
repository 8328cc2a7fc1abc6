"""What a search may change in a profile: the split of the GPUs, the shares of scorers, K and require_batches, eta and the staleness
bound, where responses are placed, the slots.

A `Setting` is one choice of all these; its fields are the table of the keys that it sets. `Space.axes` lists what to try beside a
setting. A further axis is a field of `Setting` and a line of `Space.axes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from itertools import product
from operator import attrgetter
from typing import Any

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.plan.job_plan import TRAINER, JobPlan
from asyncrl_cli.profile.arithmetic import staleness_bound
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.sharing import REWARD, ROLLOUT, TRAIN
from asyncrl_cli.profile.toml_files import toml_value

DEFAULT_PROFILE = "partial-rollout"
NODE_GPUS = 8
HALF_NODE_GPUS = NODE_GPUS // 2
MOST_SPLITS = 16
ETAS = tuple(map(Decimal, ("0", "0.25", "0.5", *(str(2**power) for power in range(7)))))
SLOT_SHARES = (0.5, 0.75, 1.0)
PLACEMENTS = ("response", "group")
RANKS_KEY, WORKERS_KEY = "placement.trainer_workers", "rollout.workers"


def split_sets(devices: Mapping[str, int], gpus_per_rollout_worker: int) -> list[str]:
    """The `--set`s that divide the devices so; fields of `Setting` say what the two mean."""
    _, *scorers, _ = devices
    apart = [task for task in scorers if devices[task]]
    tasks = [[TRAIN, *(task for task in scorers if task not in apart)], *([task] for task in apart), [ROLLOUT]]
    ratios = [count for count in devices.values() if count]
    sets = [f"placement.gpus={sum(ratios)}"] if gpus_per_rollout_worker else []
    if scorers:
        sets += [f"placement.tasks={toml_value(tasks)}", f"placement.ratios={toml_value(ratios)}"]
    workers = devices[ROLLOUT] // max(gpus_per_rollout_worker, 1)
    return [*sets, f"{RANKS_KEY}={devices[TRAINER]}", f"{WORKERS_KEY}={workers}"]


def _key(name: str, heading: str = "") -> dict[str, str]:
    """Of a field that sets the profile's key `name`. `heading`: of its column in the table of results, if it has one."""
    return {"key": name, "heading": heading}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of the search. `devices`: GPUs of the trainer, of each scorer that the profile has apart, and of all rollout
    workers; the trainer does what a scorer with none would. On CPUs they are processes, and `gpus_per_rollout_worker` is 0."""

    gpus_per_rollout_worker: int
    devices: tuple[tuple[str, int], ...]
    window_steps: int = field(metadata=_key("async_training.trigger_parameter_sync_step", "K"))
    require_batches: int = field(metadata=_key("async_training.require_batches", "batches"))
    eta: Decimal = field(metadata=_key("async_training.staleness_threshold", "eta"))
    slots: int = field(metadata=_key("rollout.slots", "slots"))
    max_staleness: int = field(metadata=_key("async_training.max_staleness", "bound"))
    partial_rollout: bool = field(metadata=_key("async_training.partial_rollout"))
    placement: str = field(metadata=_key("rollout.placement", "placement"))
    on_stale: str = field(metadata=_key("async_training.on_stale"))

    @classmethod
    def of(cls, profile: Profile, plan: JobPlan) -> Setting:
        values = {name: attrgetter(key)(profile) for name, key in KEYS.items()} | {"max_staleness": staleness_bound(profile)}
        gpus = plan.gpus_per_rollout_worker
        devices = {TRAINER: plan.trainer_workers, **plan.scorers, ROLLOUT: plan.rollout_workers * max(gpus, 1)}
        return cls(gpus_per_rollout_worker=gpus, devices=tuple(devices.items()), **values)

    @property
    def num_devices(self) -> int:
        return sum(count for _, count in self.devices)

    @property
    def trainer_workers(self) -> int:
        return dict(self.devices)[TRAINER]

    @property
    def rollout_workers(self) -> int:
        return dict(self.devices)[ROLLOUT] // max(self.gpus_per_rollout_worker, 1)

    @property
    def scorers(self) -> dict[str, int]:
        """Devices of each task that the profile has apart."""
        return dict(self.devices[1:-1])

    @property
    def split(self) -> str:
        """In GPUs or in processes, as `split_names` says."""
        return ":".join(str(count) for _, count in self.devices)

    @property
    def split_names(self) -> str:
        """trainer:rollout, with scorers between them."""
        return ":".join(role for role, _ in self.devices)

    @property
    def sets(self) -> list[str]:
        """The `--set`s that make this setting, whatever the profile says."""
        others = [f"{key}={str(getattr(self, name)).lower()}" for name, key in KEYS.items()]
        return split_sets(dict(self.devices), self.gpus_per_rollout_worker) + others

    def to_json(self) -> dict[str, Any]:
        """Under the profile's key names without their sections, but for the split."""
        return {
            "split": self.split,
            **({"scorers": self.scorers} if self.scorers else {}),
            "trainer_workers": self.trainer_workers,
            "rollout_workers": self.rollout_workers,
            **{key.rpartition(".")[2]: getattr(self, name) for name, key in KEYS.items()},
            "staleness_threshold": float(self.eta),
            "sets": self.sets,
        }


KEYS: dict[str, str] = {one.name: one.metadata["key"] for one in fields(Setting) if one.metadata}
"""The profile's keys by the names of a setting's fields."""
HEADINGS: dict[str, str] = {"split": "split"} | {
    heading: one.name for one in fields(Setting) if (heading := one.metadata.get("heading"))
}
"""What a table shows of a setting: names of its attributes by the headings of their columns."""
Axis = Callable[[Setting], list[Setting]]
"""Settings that differ from the given one in the axis's own keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Settings of `profile` with as many GPUs (or processes) in total as `current`, its own. `bound` is S, the largest
    max_staleness allowed; `etas` ascend."""

    profile: Profile
    current: Setting
    bound: int
    etas: tuple[Decimal, ...]

    @classmethod
    def around(cls, profile: Profile, plan: JobPlan, *, bound: int) -> Space:
        """Raises ConfigError if `profile` names a way to interrupt rollouts and the bound allows none that could be interrupted."""
        current, interrupt = Setting.of(profile, plan), profile.rollout.interrupt
        shortest_window = current.require_batches * profile.trainer.ppo_mini_batch_size
        some = sorted(eta for eta in {*ETAS, Decimal(bound), current.eta} if eta <= bound)
        etas = tuple(eta for eta in some if eta * shortest_window >= 1 or (eta == 0 and interrupt is None))
        if not etas:
            raise ConfigError(
                f'rollout.interrupt = "{interrupt}" with at most {bound} versions of staleness: '
                "nothing is generated ahead, so no rollout can be interrupted",
                hint="--max-staleness 1, or a profile without rollout.interrupt",
            )
        return cls(profile=profile, current=current, bound=bound, etas=etas)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """In the order in which they are searched."""
        shares = (self.shares,) if self.current.scorers else ()
        return (self.splits, *shares, self.windows, self.bounded_etas, self.placements, self.slots, *shares, self.near_splits)

    @property
    def start(self) -> Setting:
        """The current setting with an eta that lets the two sides overlap: without overlap another split would be the best."""
        return self._with_eta(self.current, max((eta for eta in self.etas if eta <= 1), default=self.etas[0]))

    def allows(self, setting: Setting) -> bool:
        return setting.max_staleness <= self.bound and setting.on_stale == "wait"

    def splits(self, setting: Setting) -> list[Setting]:
        """At most `MOST_SPLITS` splits, evenly spaced; from two nodes on, by whole nodes where that divides the GPUs."""
        return self._split(setting, range(self._unit, self.current.num_devices, self._unit))

    def near_splits(self, setting: Setting) -> list[Setting]:
        """Splits next to a setting's: a step of `splits` away, half of it, and so on down to half a node."""
        step, now, near = self._unit, dict(setting.devices)[ROLLOUT], list[int]()
        while step >= min(self._unit, math.lcm(HALF_NODE_GPUS, self._worker_size)):
            near += [now + step, now - step]
            step //= 2
        return self._split(setting, near)

    def shares(self, setting: Setting) -> list[Setting]:
        """More and fewer devices for each scorer, down to none (the reward model needs one), in exchange with either side."""
        divisions = [now := dict(setting.devices)]
        for task, count in setting.scorers.items():
            least = 1 if task == REWARD else 0
            wanted = {least, count // 2, count - self._unit, count + self._unit, 2 * count}
            for other, side in product(sorted(wanted), (TRAINER, ROLLOUT)):
                if other >= least:
                    divisions.append(now | {task: other, side: now[side] + count - other})
        return self._divided(setting, divisions)

    def on_current_split(self, setting: Setting) -> Setting:
        return replace(setting, devices=self.current.devices)

    def windows(self, setting: Setting) -> list[Setting]:
        """All pairs (K, require_batches) with the current W, and shorter windows of train steps of the current size."""
        steps, batches = self.current.window_steps, self.current.require_batches
        same = {(part, steps * batches // part) for part in range(1, steps * batches + 1) if steps * batches % part == 0}
        shorter = {(part, batches) for part in range(1, steps) if steps % part == 0}
        return [replace(setting, window_steps=part, require_batches=of) for part, of in sorted(same | shorter)]

    def bounded_etas(self, setting: Setting) -> list[Setting]:
        """Each eta with the smallest bound that it needs and, if eta > 0, also with one version more and the largest allowed."""
        least = [self._with_eta(setting, eta) for eta in self.etas]
        more = [replace(one, max_staleness=slack) for one in least if one.eta > 0 for slack in (one.max_staleness + 1, self.bound)]
        return [*least, *filter(self.allows, dict.fromkeys(more))]

    def placements(self, setting: Setting) -> list[Setting]:
        return [replace(setting, placement=placement) for placement in PLACEMENTS]

    def without_bound(self, setting: Setting) -> Setting:
        """The same without a strict bound: groups are trained however stale they have become."""
        return replace(setting, on_stale="accept")

    def slots(self, setting: Setting) -> list[Setting]:
        """Never more slots than now: whether the KV cache would hold more is not known."""
        counts = {max(self.profile.rollout.n, round(share * self.current.slots)) for share in SLOT_SHARES}
        return [replace(setting, slots=count) for count in sorted(counts)]

    @property
    def _worker_size(self) -> int:
        """Devices of a rollout worker."""
        return max(self.current.gpus_per_rollout_worker, 1)

    @property
    def _unit(self) -> int:
        """The step between splits, in GPUs or processes: a multiple of a rollout worker's GPUs."""
        total = self.current.num_devices
        unit = math.gcd(total, NODE_GPUS) if total >= 2 * NODE_GPUS else 1
        while total > unit * MOST_SPLITS:
            unit *= 2
        return math.lcm(unit, self._worker_size)

    def _split(self, setting: Setting, rollout_devices: Iterable[int]) -> list[Setting]:
        """The setting with each of these numbers of devices for the rollout, and all others of the two sides for the trainer."""
        now = dict(setting.devices)
        sides = now[TRAINER] + now[ROLLOUT]
        return self._divided(setting, (now | {TRAINER: sides - count, ROLLOUT: count} for count in rollout_devices))

    def _divided(self, setting: Setting, divisions: Iterable[Mapping[str, int]]) -> list[Setting]:
        """The setting with its devices divided in each of these ways, as far as whole groups of ranks and whole workers fill both
        sides."""
        sizes = {TRAINER: self.profile.trainer.sequence_parallel_size, ROLLOUT: self._worker_size}
        possible = (each for each in divisions if all(each[side] > 0 and each[side] % sizes[side] == 0 for side in sizes))
        return [replace(setting, devices=tuple(each.items())) for each in possible]

    def _with_eta(self, setting: Setting, eta: Decimal) -> Setting:
        """With the smallest bound that eta needs. At eta = 0 nothing runs during a sync, so no rollout can be partial."""
        partial = self.current.partial_rollout or self.current.eta == 0
        return replace(setting, eta=eta, max_staleness=math.ceil(eta), partial_rollout=partial and eta > 0)
