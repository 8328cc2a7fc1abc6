"""What a search may change in a profile, and the grids that it tries.

A `Setting` is one choice of everything that may change: the split of the devices and some keys of the
profile. `Space.stages` lists the grids. A further key is a field of `Setting` and a grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from itertools import permutations, product
from operator import attrgetter

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan
from asyncrl_cli.profile.arithmetic import REWARD, TRAIN, staleness_bound
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import toml_value

NODE_GPUS = 8
MOST_ETA = 100
"""The largest that a profile may have."""
ETAS = tuple(map(Decimal, ("0", "0.25", "0.5", *(str(2**power) for power in range(7)))))
SLOT_SHARES = (0.5, 0.75, 1.0)
PLACEMENTS = ("response", "group")
RANKS_KEY, WORKERS_KEY = "placement.trainer_workers", "rollout.workers"
Stage = Callable[["Setting"], Iterator["Setting"]]
"""A grid around a setting."""


def split_sets(devices: Mapping[str, int], gpus_per_rollout_worker: int) -> list[str]:
    """The `--set`s that divide the devices so; `Setting` says what the two mean."""
    _, *scorers, _ = devices
    apart = [task for task in scorers if devices[task]]
    shared = [task for task in scorers if task not in apart]
    tasks = [[TRAIN, *shared], *([task] for task in apart), [ROLLOUT]]
    ratios = [count for count in devices.values() if count]
    sets = [f"placement.gpus={sum(ratios)}"] if gpus_per_rollout_worker else []
    if scorers:
        sets += [f"placement.tasks={toml_value(tasks)}", f"placement.ratios={toml_value(ratios)}"]
    workers = devices[ROLLOUT] // max(gpus_per_rollout_worker, 1)
    return [*sets, f"{RANKS_KEY}={devices[TRAINER]}", f"{WORKERS_KEY}={workers}"]


def _key(key: str, heading: str = "") -> dict[str, str]:
    """The metadata of a field that sets the profile's `key`. `heading`: that of its column in the table of
    results, if it has one."""
    return {"key": key, "heading": heading}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of the search. `devices`: GPUs of the trainer, of each scorer that the profile has apart, and
    of all rollout workers; the trainer does what a scorer with none would. On CPUs they are processes, and
    `gpus_per_rollout_worker` is 0."""

    gpus_per_rollout_worker: int
    devices: Mapping[str, int] = field(hash=False)
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
        values = {name: attrgetter(key)(profile) for name, key in KEYS.items()}
        values["max_staleness"] = staleness_bound(profile)
        gpus = plan.gpus_per_rollout_worker
        rollout_devices = plan.rollout_workers * max(gpus, 1)
        devices = {TRAINER: plan.trainer_workers, **plan.scorers, ROLLOUT: rollout_devices}
        return cls(gpus_per_rollout_worker=gpus, devices=devices, **values)

    @property
    def split(self) -> str:
        """In GPUs or in processes, as `split_names` says."""
        return ":".join(map(str, self.devices.values()))

    @property
    def split_names(self) -> str:
        """trainer:rollout, with scorers between them."""
        return ":".join(self.devices)

    @property
    def sets(self) -> list[str]:
        """The `--set`s that make this setting, whatever the profile says."""
        others = [f"{key}={str(getattr(self, name)).lower()}" for name, key in KEYS.items()]
        return split_sets(self.devices, self.gpus_per_rollout_worker) + others

    def to_json(self) -> dict[str, object]:
        """Under the profile's key names without their sections, but for the split."""
        scorers = {task: count for task, count in self.devices.items() if task not in (TRAINER, ROLLOUT)}
        return {
            "split": self.split,
            **({"scorers": scorers} if scorers else {}),
            "trainer_workers": self.devices[TRAINER],
            "rollout_workers": self.devices[ROLLOUT] // max(self.gpus_per_rollout_worker, 1),
            **{key.rpartition(".")[2]: getattr(self, name) for name, key in KEYS.items()},
            "staleness_threshold": float(self.eta),
            "sets": self.sets,
        }


KEYS: dict[str, str] = {one.name: one.metadata["key"] for one in fields(Setting) if one.metadata}
"""The profile's keys by the names of a setting's fields."""
HEADINGS = {"split": "split"} | {
    heading: one.name for one in fields(Setting) if (heading := one.metadata.get("heading"))
}
"""What a table shows of a setting: names of its attributes by the headings of their columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Settings of `profile` with as many GPUs (or processes) in total as `current`, its own. `bound` is S,
    the largest max_staleness allowed; `etas` ascend."""

    profile: Profile
    current: Setting
    bound: int
    etas: tuple[Decimal, ...]

    @classmethod
    def around(cls, profile: Profile, plan: JobPlan, *, bound: int) -> Space:
        """Raises ConfigError if `profile` names a way to interrupt rollouts and the bound allows none that
        could be interrupted."""
        current, interrupt = Setting.of(profile, plan), profile.rollout.interrupt
        shortest_window = current.require_batches * profile.trainer.ppo_mini_batch_size
        some = sorted(eta for eta in {*ETAS, Decimal(min(bound, MOST_ETA)), current.eta} if eta <= bound)
        etas = tuple(eta for eta in some if eta * shortest_window >= 1 or (eta == 0 and interrupt is None))
        if not etas:
            what = f'rollout.interrupt = "{interrupt}" with at most {bound} versions of staleness'
            why = "nothing is generated ahead, so no rollout can be interrupted"
            hint = "--max-staleness 1, or a profile without rollout.interrupt"
            raise ConfigError(f"{what}: {why}", hint=hint)
        return cls(profile=profile, current=current, bound=bound, etas=etas)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The grids in the order in which they are tried, each around the best setting so far."""
        first, last = (self.first_splits, self.splits), (self.slots_and_placements, self.splits)
        return *first, self.windows, self.bounded_etas, *last

    @property
    def starts(self) -> tuple[Setting, ...]:
        """The current setting with etas that let the two sides overlap, up to 1 and the largest: which split
        is the best depends on how much they do."""
        up_to_1 = max((eta for eta in self.etas if eta <= 1), default=self.etas[0])
        return tuple(self._with_eta(self.current, eta) for eta in (up_to_1, self.etas[-1]))

    def allows(self, setting: Setting) -> bool:
        return setting.max_staleness <= self.bound and setting.on_stale == "wait"

    def splits(self, setting: Setting) -> Iterator[Setting]:
        """Devices moved from any role to any other: the fewest possible, twice as many, and so on. Both sides
        and the reward model keep some; the other scorers need none. From two nodes on, the two sides exchange
        half nodes where these divide the GPUs.

        Because the numbers double, a few such grids in succession come to any split, or next to it.
        """
        now, total = setting.devices, sum(setting.devices.values())
        sizes = {
            TRAINER: self.profile.trainer.sequence_parallel_size,
            ROLLOUT: max(setting.gpus_per_rollout_worker, 1),
        }
        half_node = math.gcd(total, NODE_GPUS // 2) if total >= 2 * NODE_GPUS else 1
        for giver, taker in permutations(now, 2):
            is_of_sides = giver in sizes and taker in sizes
            moved = math.lcm(sizes.get(giver, 1), sizes.get(taker, 1), half_node if is_of_sides else 1)
            while moved <= now[giver] - (giver in (*sizes, REWARD)):
                yield replace(setting, devices={**now, giver: now[giver] - moved, taker: now[taker] + moved})
                moved *= 2

    def first_splits(self, setting: Setting) -> Iterator[Setting]:
        """Those around each start, and not, as in other stages, around `setting`, the fastest so far."""
        return (split for start in self.starts for split in self.splits(start))

    def windows(self, setting: Setting) -> Iterator[Setting]:
        """All pairs (K, require_batches) with the current W, and shorter windows of train steps of the
        current size."""
        steps, batches = self.current.window_steps, self.current.require_batches
        total = steps * batches
        pairs = {(part, total // part) for part in range(1, total + 1) if total % part == 0}
        pairs |= {(part, batches) for part in range(1, steps) if steps % part == 0}
        return (replace(setting, window_steps=k, require_batches=n) for k, n in sorted(pairs))

    def bounded_etas(self, setting: Setting) -> Iterator[Setting]:
        """Each eta with the smallest bound that it needs and, if eta > 0, also with one version more and the
        largest allowed."""
        for least in (self._with_eta(setting, eta) for eta in self.etas):
            slack = sorted({least.max_staleness + 1, self.bound}) if least.eta > 0 else ()
            yield from filter(self.allows, (least, *(replace(least, max_staleness=bound) for bound in slack)))

    def slots_and_placements(self, setting: Setting) -> Iterator[Setting]:
        """Never more slots than now: whether the KV cache would hold more is not known."""
        counts = {max(self.profile.rollout.n, round(share * self.current.slots)) for share in SLOT_SHARES}
        for slots, placement in product(sorted(counts), PLACEMENTS):
            yield replace(setting, slots=slots, placement=placement)

    def _with_eta(self, setting: Setting, eta: Decimal) -> Setting:
        """With the smallest bound that eta needs. At eta = 0 nothing runs during a sync, so no rollout can be
        partial."""
        partial = self.current.partial_rollout or self.current.eta == 0
        return replace(setting, eta=eta, max_staleness=math.ceil(eta), partial_rollout=partial and eta > 0)
