"""What one change to a setting would do, and which resource limits it: simulated with the change and without,
for several draws of what the workload does not know. In a draw, both have the same unknowns and the same
lengths.

    change     keys of the profile, or a resource that is twice as fast or as large
    limit      the resource of which twice as much saves the largest share of the time

Everything is simulated in miniature where a window is large (`workload_files.miniature`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from functools import partial

from asyncrl_cli.base.errors import AsyncrlError, ConfigError
from asyncrl_cli.bench.effects import Change, Effect, Interval, Scaling, limit
from asyncrl_cli.bench.recommendation import DEFAULT_PROFILE, TuneRequest, scaled_sets, workload_of
from asyncrl_cli.bench.search import SHORT_WINDOWS
from asyncrl_cli.bench.simulated_runs import inner_figures, simulators
from asyncrl_cli.bench.space import Setting
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER
from asyncrl_cli.profile.arithmetic import sends_deltas, staleness_bound, window_groups_of
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.simulate.responses import ResponseLengths
from asyncrl_cli.simulate.workload import Links, Workload
from asyncrl_cli.simulate.workload_files import miniature, profile_for
from asyncrl_cli.simulate.world import virtual_cluster

DRAWS = 4
TAIL = 0.03
ADDED_GPUS = 8
OUTLOOK = (1, 2, 4)
"""How many times the GPUs of a comparison its scaling has."""
HOST = "trainer: moves from and to the host"
WEIGHTS_READ = "rollouts: weights read per decode step"
BATCH = "rollouts: contexts and arithmetic of the batch"
RESOURCES = {
    "trainer: arithmetic": (
        *("training.s_per_token", "training.step_s", "training.old_logprob_s_per_token"),
        *("training.ref_s_per_token", "training.teacher_s_per_token", "training.critic_s_per_token"),
    ),
    "trainer: fixed costs of a step": (
        *("training.fixed_step_s", "training.old_logprob_fixed_step_s", "training.step_overhead_s"),
    ),
    HOST: ("training.colocated_s",),
    WEIGHTS_READ: ("decoding.step_s", "decoding.experts_s"),
    BATCH: (
        *("decoding.step_s_per_sequence", "decoding.step_s_per_context_token"),
        "decoding.prefill_s_per_token",
    ),
    "rollouts: KV memory": ("memory.gpu_memory_gib",),
    "sync: rank 0": ("syncing.gather_bytes_per_s", "syncing.colocated_s"),
    "sync: sends and loads": (
        *("syncing.send_bytes_per_s", "syncing.load_bytes_per_s", "syncing.pause_s"),
        *(f"links.{name}" for name in Links.model_fields if name.endswith("_bytes_per_s")),
    ),
    "rewards": ("rewarding.latency_s",),
}
"""Figures of a workload by the resource that they stand for: twice as much of it doubles rates and sizes, and
halves times."""
RATES_AND_SIZES = ("_bytes_per_s", "_gib")
Figures = dict[str, float]
"""`groups_per_s`, `staleness` and `cost_s`, as in an `Effect`."""


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
    tried = [Change(label="as it is"), *changes]
    pairs = [(change, draw) for change in tried for draw in range(draws)]
    outcomes, runs = pool.map(partial(_simulated, workload, reference, sets), *zip(*pairs, strict=True)), []
    progress(0, len(pairs))
    for outcome in outcomes:
        runs.append(outcome)
        progress(len(runs), len(pairs))
    found = [runs[begin : begin + draws] for begin in range(0, len(pairs), draws)]
    base = [run for run in found[0] if not isinstance(run, str)]
    if len(base) < draws:
        why = next(run for run in found[0] if isinstance(run, str))
        what = f"the setting as it is cannot be simulated: {why}"
        raise AsyncrlError(what, hint="another --profile, or --set, changes it")
    return [_effect(one, outcomes, base) for one, outcomes in zip(tried, found, strict=True)]


def _effect(change: Change, outcomes: Sequence[Figures | str], base: Sequence[Figures]) -> Effect:
    made = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    if len(made) < len(outcomes):
        return Effect(change=change, error=next(one for one in outcomes if isinstance(one, str)))
    pairs = zip(made, base, strict=True)
    return Effect(
        change=change,
        groups_per_s=Interval.of([one["groups_per_s"] for one in made]),
        ratio=Interval.of([one["groups_per_s"] / unchanged["groups_per_s"] for one, unchanged in pairs]),
        staleness=Interval.of([one["staleness"] for one in made]),
        cost_s=Interval.of([one["cost_s"] for one in made]),
    )


def _simulated(
    workload: Workload, reference: str, sets: Sequence[str], change: Change, draw: int
) -> Figures | str:
    """The figures of a short run, or why it failed."""
    try:
        whole = profile_for(workload, reference, (*sets, *change.sets)).profile
        profile, scale = miniature(workload, whole)
        plan, window_groups = compile_job(profile, virtual_cluster(profile)), window_groups_of(profile)
        figures = inner_figures(
            profile,
            workload.drawn(draw),
            SHORT_WINDOWS,
            window_groups,
            seed=draw,
            factors=change.factors,
            scale=scale,
        )
    except AsyncrlError as error:
        return error.message
    rate, devices = figures["groups_per_s"] * scale, (plan.gpus or plan.cpus) * scale
    staleness = figures.get("staleness_mean", 0.0)
    return {"groups_per_s": rate, "staleness": staleness, "cost_s": devices / rate}


def resources(workload: Workload, profile: Profile) -> list[Change]:
    """Twice as much of each resource that the workload knows, and a tail cut off."""
    given, tables, found = workload.on(profile.placement), {**RESOURCES}, list[Change]()
    if not profile.placement.colocate:
        del tables[HOST]
    if not given.decoding.tells_batch:
        tables["rollouts: decode steps"] = tables.pop(WEIGHTS_READ) + tables.pop(BATCH)
    for label, keys in tables.items():
        factors = {key: 2.0 if key.endswith(RATES_AND_SIZES) else 0.5 for key in keys if _figure(given, key)}
        if factors:
            found.append(Change(label=label, factors=factors, is_resource=True))
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
    for slots in (max(1, rollout.slots // 2), rollout.slots * 2):
        yield Change(label=f"slots = {slots}", sets=(f"rollout.slots={slots}",))
    dispatch = "group" if rollout.placement == "response" else "response"
    yield Change(label=f"dispatch by {dispatch}", sets=(f"rollout.placement={dispatch}",))
    buffer = not profile.weights.dual_buffer
    name = "with a second buffer" if buffer else "no second buffer"
    yield Change(label=f"sync {name}", sets=(f"weights.dual_buffer={str(buffer).lower()}",))
    if workload.links is not None and not profile.placement.colocate:  # else none has an effect on a sync
        if profile.weights.transport in DIRECT_TRANSPORTS:
            yield Change(label="transport object-store", sets=("weights.transport=object-store",))
        else:
            encoding = "full" if sends_deltas(profile) else "delta"
            yield Change(label=f"encoding {encoding}", sets=(f"weights.encoding={encoding}",))
            yield Change(label="transport nccl", sets=("weights.transport=nccl", "placement.device=cuda"))
    if profile.placement.gpus:
        with suppress(ConfigError):  # as many cannot be divided
            more_gpus = scaled_sets(workload.name, profile, (), profile.placement.gpus + ADDED_GPUS)
            yield Change(label=f"+{ADDED_GPUS} GPUs, divided as before", sets=more_gpus)
    if workload.lengths.prompt_tokens and not profile.trainer.shared_prefixes:
        yield Change(label="shared prefixes", sets=("trainer.shared_prefixes=true",))
    longest = max(1, rollout.max_response_tokens // 2)
    yield Change(label=f"longest response {longest}", sets=(f"rollout.max_response_tokens={longest}",))


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


def what_if(asked: TuneRequest, progress: Callable[..., None]) -> WhatIf:
    """Simulates every change to the setting asked for. Raises ConfigError if profile and workload do not fit
    together, AsyncrlError if the setting itself cannot be simulated."""
    workload, run_profile = workload_of(asked, progress)
    reference = asked.profile or run_profile or DEFAULT_PROFILE
    sets, profile = asked.sets, profile_for(workload, reference, asked.sets).profile
    if asked.gpus is not None:
        sets = scaled_sets(workload.name, profile, sets, asked.gpus)
        profile = profile_for(workload, reference, sets).profile
    tried = [*resources(workload, profile), *changes(workload, profile)]
    stage = f"SIMULATED: {DRAWS} draws of {len(tried)} changes"
    with simulators() as pool:
        found = effects(pool, workload, reference, sets, tried, progress=partial(progress, stage))
    setting = Setting.of(profile, compile_job(profile, virtual_cluster(profile)))
    return WhatIf(workload=workload, profile=reference, setting=setting, effects=found)


def scalings(
    asked: TuneRequest, profiles: Sequence[str], gpus: Sequence[int], progress: Callable[..., None]
) -> list[Scaling]:
    """How the groups per second of each profile grow with the GPUs."""
    workload, _ = workload_of(asked, progress)
    with simulators() as pool:
        return [_scaling(pool, workload, one, asked.sets, gpus, progress=progress) for one in profiles]


def _scaling(
    pool: Executor,
    workload: Workload,
    reference: str,
    sets: Sequence[str],
    gpus: Sequence[int],
    draws: int = DRAWS,
    progress: Callable[..., object] = lambda *stage: None,
) -> Scaling:
    profile = profile_for(workload, reference, sets).profile
    first, *others = [scaled_sets(workload.name, profile, sets, count) for count in gpus]
    tried = [Change(label=f"{count} GPUs", sets=one) for count, one in zip(gpus[1:], others, strict=True)]
    stage = f"SIMULATED: {profile.name} on {gpus[0]} to {gpus[-1]} GPUs"
    found = effects(pool, workload, reference, first, tried, draws, partial(progress, stage))
    return Scaling(profile=profile.name, gpus=gpus, effects=found)


def outlook(
    pool: Executor, workload: Workload, reference: str, sets: Sequence[str], profile: Profile
) -> tuple[str, Scaling | None]:
    """Which resource limits a profile of a comparison, and its scaling to more GPUs (None on CPUs), each from
    one draw."""
    limited_by = limit(effects(pool, workload, reference, sets, resources(workload, profile), draws=1))
    if (fewest := profile.placement.gpus) is None:
        return limited_by, None
    gpus = [fewest * factor for factor in OUTLOOK]
    return limited_by, _scaling(pool, workload, reference, sets, gpus, draws=1)
