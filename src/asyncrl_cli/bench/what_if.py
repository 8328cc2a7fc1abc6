"""What one change to a setting would do, and which resource limits it: simulated with the change and without,
for several draws of what the workload does not know.

    change     keys of the profile, or a resource that is twice as fast or as large
    effect     exp(mean +- 1.645 standard deviations) of the ratio to the unchanged setting, over the draws;
               in a draw, both have the same unknowns and the same lengths
    limit      the resource of which twice as much saves the largest share of the time

Everything is simulated in miniature where a window is large (`workload_files.miniature`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Any

from asyncrl_cli.base.errors import AsyncrlError, ConfigError
from asyncrl_cli.bench.figures import Edges, figures_of, stretch_of
from asyncrl_cli.bench.recommendation import TuneRequest, scaled_sets, workload_of
from asyncrl_cli.bench.search import SHORT_WINDOWS
from asyncrl_cli.bench.simulated_runs import simulators
from asyncrl_cli.bench.space import Setting
from asyncrl_cli.plan.cluster import usable_cores
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER
from asyncrl_cli.profile.arithmetic import staleness_bound, window_groups_of
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.responses import ResponseLengths
from asyncrl_cli.simulate.workload import Links, Workload
from asyncrl_cli.simulate.workload_files import miniature, profile_for
from asyncrl_cli.simulate.world import simulate, virtual_cluster

DRAWS = 4
NINETY = 1.645
"""Standard deviations of a normal variate that 90% lie within."""
TAIL = 0.03
LEAST_SAVING = 0.02
"""Of the time: what saves less limits nothing."""
ADDED_GPUS = 8
UNCHANGED = "as it is"
OUTLOOK = (1, 2, 4)
"""How many times the GPUs of a comparison its scaling has."""
PAYS = 1.25
"""Twice the GPUs pay if they make at least this many times as many groups per second. Chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`sets` override keys of the profile, `factors` multiply figures of the workload."""

    label: str
    sets: tuple[str, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)
    is_resource: bool = False


WEIGHTS_READ = "rollouts: weights read per decode step"
BATCH = "rollouts: contexts and arithmetic of the batch"
RESOURCES = {
    "trainer: arithmetic": {
        f"training.{name}": 0.5
        for name in (
            "s_per_token",
            "step_s",
            "old_logprob_s_per_token",
            "ref_s_per_token",
            "critic_s_per_token",
        )
    },
    "trainer: fixed costs of a step": {
        f"training.{name}": 0.5 for name in ("fixed_step_s", "old_logprob_fixed_step_s", "step_overhead_s")
    },
    WEIGHTS_READ: {"decoding.step_s": 0.5, "decoding.experts_s": 0.5},
    BATCH: {
        f"decoding.{name}": 0.5
        for name in ("step_s_per_sequence", "step_s_per_context_token", "prefill_s_per_token")
    },
    "rollouts: KV memory": {"memory.gpu_memory_gib": 2.0},
    "sync: rank 0": {"syncing.gather_bytes_per_s": 2.0, "syncing.colocated_s": 0.5},
    "sync: sends and loads": {
        "syncing.send_bytes_per_s": 2.0,
        "syncing.load_bytes_per_s": 2.0,
        "syncing.pause_s": 0.5,
        **{f"links.{name}": 2.0 for name in Links.model_fields if name.endswith("_bytes_per_s")},
    },
    "rewards": {"rewarding.latency_s": 0.5},
}
"""Which figures of a workload stand for twice as much of a resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure and the 90% interval around it."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of positive values, as if their logarithms were normal; 0 if all are 0."""
        if not any(values):
            return cls(value=0.0, low=0.0, high=0.0)
        logs = [math.log(max(value, 1e-9)) for value in values]
        middle, reach = statistics.fmean(logs), NINETY * statistics.stdev(logs) if len(logs) > 1 else 0.0
        return cls(value=math.exp(middle), low=math.exp(middle - reach), high=math.exp(middle + reach))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A change's figures: groups per second and their ratio to the unchanged setting's, mean staleness in
    versions, device seconds per group. `error`: why it could not be simulated."""

    change: Change
    groups_per_s: Interval | None = None
    ratio: Interval | None = None
    staleness: Interval | None = None
    cost_s: Interval | None = None
    error: str = ""

    @property
    def saving(self) -> float:
        """Share of the time that the change saves."""
        return 1 - 1 / self.ratio.value if self.ratio else 0.0


INTERVALS = ("groups_per_s", "ratio", "staleness", "cost_s")
"""The figures of an effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One simulated run of a change."""

    workload: Workload
    reference: str
    sets: tuple[str, ...]
    factors: Mapping[str, float]
    draw: int


Figures = tuple[float, float, int]
"""Groups per second, mean staleness, devices."""


def effects(
    pool: Executor,
    workload: Workload,
    reference: str,
    sets: Sequence[str],
    changes: Sequence[Change],
    draws: int = DRAWS,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Effect]:
    """What each change does; first, the setting as it is. `progress(runs simulated, all runs)`. Raises
    AsyncrlError if the setting itself cannot be simulated."""
    tried = [Change(label=UNCHANGED), *changes]
    jobs = [
        Job(workload=workload, reference=reference, sets=(*sets, *one.sets), factors=one.factors, draw=draw)
        for one in tried
        for draw in range(draws)
    ]
    found = []
    progress(0, len(jobs))
    for outcome in pool.map(simulated, jobs):
        found.append(outcome)
        progress(len(found), len(jobs))
    runs = [found[index * draws : (index + 1) * draws] for index in range(len(tried))]
    base = [run for run in runs[0] if not isinstance(run, str)]
    if len(base) < draws:
        raise AsyncrlError(next(run for run in runs[0] if isinstance(run, str)))
    return [_effect(one, outcomes, base) for one, outcomes in zip(tried, runs, strict=True)]


def _effect(change: Change, outcomes: Sequence[Figures | str], base: Sequence[Figures]) -> Effect:
    if failed := [outcome for outcome in outcomes if isinstance(outcome, str)]:
        return Effect(change=change, error=failed[0])
    made = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    return Effect(
        change=change,
        groups_per_s=Interval.of([rate for rate, _, _ in made]),
        ratio=Interval.of([rate / before for (rate, _, _), (before, _, _) in zip(made, base, strict=True)]),
        staleness=Interval.of([stale for _, stale, _ in made]),
        cost_s=Interval.of([devices / rate for rate, _, devices in made]),
    )


def simulated(job: Job) -> Figures | str:
    """The figures of a short run, or why it failed."""
    try:
        whole = profile_for(job.workload, job.reference, job.sets, groups=1).profile
        smaller, scale = miniature(job.workload, job.reference, job.sets)
        sets = [*job.sets, *smaller]
        one = profile_for(job.workload, job.reference, sets, groups=1).profile
        plan = compile_job(one, virtual_cluster(one))
        workload = job.workload.drawn(job.draw)
        window_groups = window_groups_of(one)
        groups = SHORT_WINDOWS * window_groups
        profile = profile_for(workload, job.reference, sets, groups=groups).profile
        run = simulate(profile, workload, seed=job.draw, factors=job.factors, scale=scale)
    except ConfigError as error:
        return error.message
    if run.error is not None:
        return run.error.message
    edges = Edges(window_groups, int(run.lines[-1]["groups_trained"]) - window_groups)
    figures = figures_of(stretch_of(run.lines, edges), window_groups)
    factor = window_groups_of(whole) / window_groups
    devices = (plan.gpus or plan.cpus) * factor
    return figures["groups_per_s"] * factor, figures.get("staleness_mean", 0.0), round(devices)


def resources(workload: Workload, profile: Profile) -> list[Change]:
    """Twice as much of each resource that the workload knows, and a tail cut off."""
    given, tables, found = workload.on(profile.placement), {**RESOURCES}, list[Change]()
    if not given.decoding.tells_batch:
        tables["rollouts: decode steps"] = tables.pop(WEIGHTS_READ) | tables.pop(BATCH)
    for label, factors in tables.items():
        known = {key: factor for key, factor in factors.items() if _figure(given, key)}
        if known:
            found.append(Change(label=label, factors=known, is_resource=True))
    twice_slots = f"rollout.slots={2 * profile.rollout.slots}"
    found.append(Change(label="rollouts: slots", sets=(twice_slots,), is_resource=True))
    cut = ResponseLengths(workload.lengths, profile.rollout.max_response_tokens).quantile(1 - TAIL)
    if cut < profile.rollout.max_response_tokens:
        sets = (f"rollout.max_response_tokens={cut}",)
        found.append(Change(label=f"tail: {TAIL:.0%} of responses", sets=sets, is_resource=True))
    return found


def _figure(workload: Workload, key: str) -> float:
    section, name = key.split(".")
    return getattr(getattr(workload, section), name, None) or 0.0


def changes(workload: Workload, profile: Profile) -> Iterator[Change]:
    """One change of each kind that the setting allows."""
    asynchronous, rollout = profile.async_training, profile.rollout
    steps, eta = asynchronous.trigger_parameter_sync_step, asynchronous.staleness_threshold
    if not profile.placement.colocate:
        for more in (2 * steps, *([steps // 2] if steps % 2 == 0 else [])):
            yield Change(label=f"K = {more}", sets=(f"async_training.trigger_parameter_sync_step={more}",))
        for other in (eta + Decimal("0.5"), *([eta / 2] if eta else [])):
            bound = max(staleness_bound(profile), math.ceil(other))
            keys = (f"async_training.staleness_threshold={other}", f"async_training.max_staleness={bound}")
            yield Change(label=f"eta = {other.normalize():f}", sets=keys)
        setting = Setting.of(profile, compile_job(profile, virtual_cluster(profile)))
        least = math.lcm(max(setting.gpus_per_rollout_worker, 1), profile.trainer.sequence_parallel_size)
        unit = max(least, sum(setting.devices.values()) // 8 // least * least)
        for giver, taker in ((ROLLOUT, TRAINER), (TRAINER, ROLLOUT)):
            if setting.devices[giver] > unit:
                moved = {giver: setting.devices[giver] - unit, taker: setting.devices[taker] + unit}
                split = replace(setting, devices={**setting.devices, **moved})
                yield Change(label=f"split {split.split} ({split.split_names})", sets=tuple(split.sets))
    yield Change(label=f"slots = {rollout.slots // 2}", sets=(f"rollout.slots={rollout.slots // 2}",))
    yield Change(label=f"slots = {rollout.slots * 2}", sets=(f"rollout.slots={rollout.slots * 2}",))
    dispatch = "group" if rollout.placement == "response" else "response"
    yield Change(label=f"dispatch by {dispatch}", sets=(f"rollout.placement={dispatch}",))
    buffer = not profile.weights.dual_buffer
    name = "with a second buffer" if buffer else "no second buffer"
    yield Change(label=f"sync {name}", sets=(f"weights.dual_buffer={str(buffer).lower()}",))
    if profile.placement.gpus:
        with suppress(ConfigError):  # as many cannot be divided
            more_gpus = resized(workload, profile, (), profile.placement.gpus + ADDED_GPUS)
            yield Change(label=f"+{ADDED_GPUS} GPUs, divided as before", sets=more_gpus)
    if workload.lengths.prompt_tokens and not profile.trainer.shared_prefixes:
        yield Change(label="shared prefixes", sets=("trainer.shared_prefixes=true",))
    longest = rollout.max_response_tokens // 2
    yield Change(label=f"longest response {longest}", sets=(f"rollout.max_response_tokens={longest}",))


def limit(found: Sequence[Effect]) -> str:
    """Which resource limits, in words."""
    tried = [effect for effect in found if effect.change.is_resource and effect.ratio is not None]
    most = max(tried, key=lambda effect: effect.saving, default=None)
    if most is None or most.saving < LEAST_SAVING:
        return "no single resource"
    what = "without it" if most.change.label.startswith("tail") else "with twice as much"
    return f"{most.change.label} ({most.saving:.0%} less time {what})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The effects of changes to the setting of a profile: first itself, then resources, then changes of
    keys."""

    workload: Workload
    profile: str
    setting: Setting
    effects: Sequence[Effect]

    @property
    def limit(self) -> str:
        return limit(self.effects)

    def to_json(self) -> dict[str, object]:
        return {
            "simulated": True,
            "workload": self.workload.name,
            "profile": self.profile,
            "setting": self.setting.to_json(),
            "draws": DRAWS,
            "limited_by": self.limit,
            "effects": [asdict(effect) for effect in self.effects],
            "notes": self.workload.notes,
        }


def what_if(asked: TuneRequest, progress: Callable[..., None], default_profile: str) -> WhatIf:
    """Simulates every change to the setting asked for. Raises ConfigError if profile and workload do not fit
    together, AsyncrlError if the setting itself cannot be simulated."""
    workload, run_profile = workload_of(asked, progress)
    reference = asked.profile or run_profile or default_profile
    sets, profile = asked.sets, profile_for(workload, reference, asked.sets, groups=1).profile
    if asked.gpus is not None:
        sets = resized(workload, profile, sets, asked.gpus)
        profile = profile_for(workload, reference, sets, groups=1).profile
    tried = [*resources(workload, profile), *changes(workload, profile)]
    stage = f"SIMULATED: {DRAWS} draws of {len(tried)} changes"
    with simulators(usable_cores()) as pool:
        found = effects(pool, workload, reference, sets, tried, progress=partial(progress, stage))
    setting = Setting.of(profile, compile_job(profile, virtual_cluster(profile)))
    return WhatIf(workload=workload, profile=reference, setting=setting, effects=found)


def resized(workload: Workload, profile: Profile, sets: Sequence[str], gpus: int) -> tuple[str, ...]:
    """The `--set`s for so many GPUs, divided in the profile's proportion."""
    if profile.placement.colocate:
        return (*sets, f"placement.gpus={gpus}")
    return scaled_sets(workload.name, profile, sets, gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A profile's effects on ascending numbers of GPUs, relative to the first number. The batch is the same
    for all."""

    profile: str
    gpus: Sequence[int]
    effects: Sequence[Effect]

    def to_json(self) -> dict[str, object]:
        effects = [asdict(effect) for effect in self.effects]
        others = {"linearity": self.linearity, "enough_gpus": self.enough_gpus}
        return {"profile": self.profile, "gpus": list(self.gpus), "effects": effects, **others}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Scaling:
        """The inverse of `to_json`, without what the changes were."""
        effects = [
            Effect(
                change=Change(label=effect["change"]["label"]),
                error=effect["error"],
                **{name: effect[name] and Interval(**effect[name]) for name in INTERVALS},
            )
            for effect in found["effects"]
        ]
        return cls(profile=found["profile"], gpus=found["gpus"], effects=effects)

    def __str__(self) -> str:
        more = "more still pay" if self.enough_gpus == self.gpus[-1] else "more no longer pay"
        return f"at {self.enough_gpus} GPUs {more}"

    @property
    def linearity(self) -> list[float | None]:
        """Groups per second, over those of the fewest GPUs and as many times more."""
        return [
            None if effect.ratio is None else effect.ratio.value * self.gpus[0] / gpus
            for gpus, effect in zip(self.gpus, self.effects, strict=True)
        ]

    @property
    def enough_gpus(self) -> int:
        """The number from which the next one no longer pays."""
        steps = list(zip(self.gpus, self.effects, strict=True))
        for (fewer, before), (more, after) in pairwise(steps):
            if before.ratio is None or after.ratio is None:
                return fewer
            doublings = math.log2(more / fewer)
            if after.ratio.value / before.ratio.value < PAYS**doublings:
                return fewer
        return self.gpus[-1]


def scalings(
    asked: TuneRequest, profiles: Sequence[str], gpus: Sequence[int], progress: Callable[..., None]
) -> list[Scaling]:
    """How the groups per second of each profile grow with the GPUs."""
    workload, _ = workload_of(asked, progress)
    found = []
    with simulators(usable_cores()) as pool:
        for reference in profiles:
            profile = profile_for(workload, reference, asked.sets, groups=1).profile
            if not profile.placement.gpus:
                what = f"{workload.name} runs on CPUs: it cannot be scaled to other numbers of GPUs"
                raise ConfigError(what, hint="--what-if shows what other numbers of processes do")
            stage = f"SIMULATED: {profile.name} on {gpus[0]} to {gpus[-1]} GPUs"
            given = pool, workload, reference, asked.sets, profile, gpus
            found.append(_scaling(*given, progress=partial(progress, stage)))
    return found


def _scaling(
    pool: Executor,
    workload: Workload,
    reference: str,
    sets: Sequence[str],
    profile: Profile,
    gpus: Sequence[int],
    draws: int = DRAWS,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Scaling:
    first, *others = [resized(workload, profile, sets, count) for count in gpus]
    tried = [Change(label=f"{count} GPUs", sets=one) for count, one in zip(gpus[1:], others, strict=True)]
    found = effects(pool, workload, reference, first, tried, draws, progress)
    return Scaling(profile=profile.name, gpus=gpus, effects=found)


def outlook(
    pool: Executor, workload: Workload, reference: str, sets: Sequence[str], profile: Profile
) -> tuple[str, Scaling | None]:
    """Which resource limits a profile of a comparison, and its scaling to more GPUs (None on CPUs), each from
    one draw."""
    found = effects(pool, workload, reference, sets, resources(workload, profile), draws=1)
    if (fewest := profile.placement.gpus) is None:
        return limit(found), None
    gpus = [fewest * factor for factor in OUTLOOK]
    return limit(found), _scaling(pool, workload, reference, sets, profile, gpus, draws=1)
