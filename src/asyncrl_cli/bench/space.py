"""What a search may change in a profile: the split of the GPUs, the shares of scorers, K and require_batches, eta and the staleness
bound, where responses are placed, the slots.

A `Setting` is one choice of all these; its fields are the table of the keys that it sets. `Space.axes` lists what to try beside a
setting. A further axis is a field of `Setting` and a line of `Space.axes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
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


def _key(name: str, heading: str = "") -> dict[str, str]:
    """Of a field that sets the profile's key `name`. `heading`: of its column in the table of results, if it has one."""
    return {"key": name, "heading": heading}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of the search. On CPUs ranks and workers are processes, and `gpus_per_rollout_worker` is 0. `scorers`: devices of
    each task that the profile has apart; with 0 of them the trainer does it."""

    gpus_per_rollout_worker: int
    trainer_workers: int = field(metadata=_key("placement.trainer_workers"))
    rollout_workers: int = field(metadata=_key("rollout.workers"))
    window_steps: int = field(metadata=_key("async_training.trigger_parameter_sync_step", "K"))
    require_batches: int = field(metadata=_key("async_training.require_batches", "batches"))
    eta: Decimal = field(metadata=_key("async_training.staleness_threshold", "eta"))
    slots: int = field(metadata=_key("rollout.slots", "slots"))
    max_staleness: int = field(metadata=_key("async_training.max_staleness", "bound"))
    partial_rollout: bool = field(metadata=_key("async_training.partial_rollout"))
    placement: str = field(metadata=_key("rollout.placement", "placement"))
    on_stale: str = field(metadata=_key("async_training.on_stale"))
    scorers: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, profile: Profile, plan: JobPlan) -> Setting:
        values = {name: attrgetter(key)(profile) for name, key in KEYS.items()} | {"max_staleness": staleness_bound(profile)}
        of_plan = ("gpus_per_rollout_worker", "trainer_workers", "rollout_workers")
        return cls(**values | {name: getattr(plan, name) for name in of_plan}, scorers=tuple(plan.scorers.items()))

    @property
    def rollout_devices(self) -> int:
        """GPUs of all rollout workers; on CPUs their processes."""
        return self.rollout_workers * max(self.gpus_per_rollout_worker, 1)

    @property
    def devices(self) -> int:
        return sum(self._parts.values())

    @property
    def split(self) -> str:
        """In GPUs or in processes, as `split_names` says."""
        return ":".join(map(str, self._parts.values()))

    @property
    def split_names(self) -> str:
        """trainer:rollout, with scorers between them."""
        return ":".join(self._parts)

    @property
    def _parts(self) -> dict[str, int]:
        return {TRAINER: self.trainer_workers, **dict(self.scorers), ROLLOUT: self.rollout_devices}

    @property
    def _sharing(self) -> list[str]:
        """The keys that give scorers their share."""
        if not self.scorers:
            return []
        apart = {task: devices for task, devices in self.scorers if devices}
        tasks = [[TRAIN, *(task for task, _ in self.scorers if task not in apart)], *([task] for task in apart), [ROLLOUT]]
        ratios = [self.trainer_workers, *apart.values(), self.rollout_devices]
        return [f"placement.tasks={toml_value(tasks)}", f"placement.ratios={toml_value(ratios)}"]

    @property
    def sets(self) -> list[str]:
        """The `--set`s that make this setting, whatever the profile says."""
        gpus = [f"placement.gpus={self.devices}"] if self.gpus_per_rollout_worker else []
        return gpus + self._sharing + [f"{key}={str(getattr(self, name)).lower()}" for name, key in KEYS.items()]

    def to_json(self) -> dict[str, Any]:
        """Under the profile's key names without their sections; the two kinds of `workers` keep the setting's names."""
        values = {name if "workers" in name else key.rpartition(".")[2]: getattr(self, name) for name, key in KEYS.items()}
        shares = {"scorers": dict(self.scorers)} if self.scorers else {}
        return {"split": self.split, **shares, **values, "staleness_threshold": float(self.eta), "sets": self.sets}


KEYS: dict[str, str] = {one.name: one.metadata["key"] for one in fields(Setting) if one.metadata}
"""The profile's keys by the names of a setting's fields."""
HEADINGS: dict[str, str] = {"split": "split"} | {
    heading: one.name for one in fields(Setting) if (heading := one.metadata.get("heading"))
}
"""What a table shows of a setting: names of its attributes by the headings of their columns."""
SPLIT_KEYS = KEYS["trainer_workers"], KEYS["rollout_workers"]
Axis = Callable[[Setting], list[Setting]]
"""Settings that differ from the given one in the axis's own keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Settings with as many GPUs (or processes) in total as `current`. `bound` is S, the largest max_staleness allowed; `n` is the
    size of a group; `etas` ascend. Rollouts are partial where eta > 0, if `partial_rollout`. Trainer ranks come in multiples of
    `sequence_size`, which divide sequences between them."""

    current: Setting
    bound: int
    n: int
    etas: tuple[Decimal, ...]
    partial_rollout: bool
    sequence_size: int

    @classmethod
    def around(cls, profile: Profile, plan: JobPlan, *, bound: int) -> Space:
        """Raises ConfigError if `profile` names a way to interrupt rollouts and the bound allows none that could be interrupted."""
        current, interrupt = Setting.of(profile, plan), profile.rollout.interrupt
        some = {*ETAS, Decimal(bound), current.eta}
        shortest_window = current.require_batches * profile.trainer.ppo_mini_batch_size
        whole = (eta for eta in some if eta <= bound and (eta == 0 or eta * shortest_window >= 1))
        etas = tuple(sorted(eta for eta in whole if eta > 0 or interrupt is None))
        if not etas:
            raise ConfigError(
                f'rollout.interrupt = "{interrupt}" with at most {bound} versions of staleness: '
                "nothing is generated ahead, so no rollout can be interrupted",
                hint="--max-staleness 1, or a profile without rollout.interrupt",
            )
        partial_rollout = current.partial_rollout or current.eta == 0
        return cls(
            current=current,
            bound=bound,
            n=profile.rollout.n,
            etas=etas,
            partial_rollout=partial_rollout,
            sequence_size=profile.trainer.sequence_parallel_size,
        )

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
        return self._split(setting, range(self._unit, self.current.devices, self._unit))

    def shares(self, setting: Setting) -> list[Setting]:
        """More and fewer devices for each scorer, down to none (the reward model needs one), in exchange with either side."""
        found, each = [setting], self._each
        for task, now in setting.scorers:
            least = 1 if task == REWARD else 0
            for devices in {least, now // 2, now - self._unit, now + self._unit, 2 * now} - {now}:
                scorers = dict(setting.scorers) | {task: devices}
                rest = setting.devices - sum(scorers.values())
                for rollout in {setting.rollout_devices, setting.rollout_devices + now - devices}:
                    if devices >= least and 0 < rollout < rest and not (rollout % each or (rest - rollout) % self.sequence_size):
                        sides = {"trainer_workers": rest - rollout, "rollout_workers": rollout // each}
                        found.append(replace(setting, scorers=tuple(scorers.items()), **sides))
        return sorted(dict.fromkeys(found), key=lambda one: (one.scorers, one.trainer_workers))

    def near_splits(self, setting: Setting) -> list[Setting]:
        """Splits next to a setting's: a step of `splits` away, half of it, and so on down to half a node."""
        step, near = self._unit, list[int]()
        while step >= min(self._unit, math.lcm(HALF_NODE_GPUS, self._each)):
            near += [setting.rollout_devices + step, setting.rollout_devices - step]
            step //= 2
        return self._split(setting, near)

    def on_current_split(self, setting: Setting) -> Setting:
        current = self.current
        sides = {"trainer_workers": current.trainer_workers, "rollout_workers": current.rollout_workers}
        return replace(setting, scorers=current.scorers, **sides)

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
        counts = {max(self.n, round(share * self.current.slots)) for share in SLOT_SHARES}
        return [replace(setting, slots=count) for count in sorted(counts)]

    @property
    def _each(self) -> int:
        return max(self.current.gpus_per_rollout_worker, 1)

    @property
    def _unit(self) -> int:
        """The step between splits, in GPUs or processes: a multiple of a rollout worker's GPUs."""
        unit = 1
        if self.current.devices >= 2 * NODE_GPUS:
            unit = next(gpus for gpus in (NODE_GPUS, HALF_NODE_GPUS, 2, 1) if self.current.devices % gpus == 0)
        while self.current.devices > unit * MOST_SPLITS:
            unit *= 2
        return math.lcm(unit, self._each)

    def _split(self, setting: Setting, rollout_devices: Iterable[int]) -> list[Setting]:
        """The setting with each of these numbers of devices for the rollout, as far as both sides get some."""
        total, each = setting.trainer_workers + setting.rollout_devices, self._each
        some = (devices for devices in rollout_devices if 0 < devices < total and (total - devices) % self.sequence_size == 0)
        return [replace(setting, trainer_workers=total - devices, rollout_workers=devices // each) for devices in some]

    def _with_eta(self, setting: Setting, eta: Decimal) -> Setting:
        """With the smallest bound that eta needs. At eta = 0 nothing runs during a sync, so no rollout can be partial."""
        return replace(setting, eta=eta, max_staleness=math.ceil(eta), partial_rollout=self.partial_rollout and eta > 0)
