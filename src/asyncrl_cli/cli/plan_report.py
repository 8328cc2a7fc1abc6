"""The output of `asyncrl plan`: schedule, placement, an estimate of each process's memory, and whether it
fits the devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Column

from asyncrl_cli.base.errors import AsyncrlError, PreflightError
from asyncrl_cli.cli.console import print_json, print_prose, print_table, print_text, warn
from asyncrl_cli.cli.plan_memory import memory_document, print_memory
from asyncrl_cli.job.ray.session import check_shared_memory
from asyncrl_cli.models.model_directory import tokenizer_here
from asyncrl_cli.plan import cluster, memory_fit
from asyncrl_cli.plan.compiler import compile_job, device_of
from asyncrl_cli.plan.defaults import for_device, for_job
from asyncrl_cli.plan.job_plan import COLOCATED, TRAINER, JobPlan
from asyncrl_cli.plan.machine import engine_refusal
from asyncrl_cli.plan.memory import MemoryEstimate
from asyncrl_cli.plan.node_fit import Unplaced, assigned, fitting_hint
from asyncrl_cli.plan.remedies import with_hint
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.keys import values_of
from asyncrl_cli.profile.loaded import DEFAULT, Loaded, is_default
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.sandbox.rehearsal import Rehearsal, rehearse
from asyncrl_cli.tasks.splits import KINDS
from asyncrl_cli.tasks.task import load_task
from asyncrl_cli.train.losses import check_loss

GIB = 2**30


def print_plan(
    loaded: Loaded,
    *,
    gpus: int | None,
    as_json: bool,
    nodes: int = 1,
    gpu_memory_gib: float | None = None,
    node_memory_gib: float | None = None,
    address: str | None = None,
) -> None:
    """Print the plan on stdout: for this machine, for `nodes` nodes with `gpus` GPUs of `gpu_memory_gib` each
    and `node_memory_gib` of host memory, or for a cluster.

    Raises PreflightError if the job cannot run there: before printing if no plan can be made, otherwise after
    printing the plan. Raises ConfigError for an unknown loss.
    """
    check_loss(loaded.profile.algorithm.loss_mode)
    is_here = gpus is None and address is None
    there = (
        _Cluster.at(address)
        if address is not None
        else _Cluster.planned(loaded.profile, gpus, nodes, node_memory_gib)
    )
    loaded = for_device(loaded, device_of(loaded.profile, there.all))
    profile = loaded.profile
    schedule, job = Schedule.of(profile), compile_job(profile, there.all)
    shows_nodes = address is not None or nodes > 1
    warnings = [*loaded.warnings, *job.warnings]
    if (missing := engine_refusal(profile, job.device)) is not None and is_here:
        warnings.append(f"a run on this machine would be refused: {missing.message} ({missing.hint})")
    if job.device == "cpu":
        given = {"--gpus": None if job.gpus else gpus or None, "--gpu-memory": gpu_memory_gib}
        unused = [f"{flag} {value:g}" for flag, value in given.items() if value is not None]
        warnings += [f"{one} is not used: the job runs on CPUs" for one in unused]
    if (directory := tokenizer_here(profile)) is not None:
        # imported late: most plans have no model on this machine
        from asyncrl_cli.job.driver_preparation import check_chat

        check_chat(profile, directory)
    memory_bytes = memory_fit.known_memory_bytes(job.device)
    if job.device == "cuda" and not (is_here and gpu_memory_gib is None):
        # that of GPUs elsewhere is unknown unless it is given
        memory_bytes = None if gpu_memory_gib is None else int(gpu_memory_gib * GIB)
    memory = memory_fit.estimate_or_reason(profile, job, memory_bytes)
    refusal, needs = None, list[memory_fit.DeviceNeed]()
    if isinstance(memory, MemoryEstimate):
        loaded = for_job(loaded, job, memory.shape)
        needs = [*memory_fit.device_needs(memory), *memory_fit.node_needs(memory, there.all)]
        refusal = memory_fit.cannot_fit(memory) or memory_fit.shortage(needs)
        if refusal is None:
            warnings += memory_fit.cache_warnings(memory)
            try:
                if is_here:
                    check_shared_memory(memory.profile, memory.store_bytes)
            except PreflightError as small:
                warnings.append(f"a run on this machine would be refused: {small.message} ({small.hint})")
    rehearsal = _rehearsed(profile)
    if isinstance(rehearsal, AsyncrlError):
        hint = f" ({rehearsal.hint})" if rehearsal.hint else ""
        warnings += [f"a run on this machine would be refused: {rehearsal.message}{hint}"] if is_here else []
        rehearsal = Rehearsal(name=f'"{profile.task.reward}"', reason=rehearsal.message)
    warn(*warnings, *rehearsal.warnings())
    if as_json:
        document = _document(profile, schedule, job, memory_document(memory, needs))
        document |= {"defaults": _derived(loaded), "rehearsal": rehearsal.document()}
        print_json(document | ({"cluster": there.rows(job)} if shows_nodes else {}))
    else:
        _print_schedule_and_placement(profile, schedule, job)
        if shows_nodes:
            there.print(job)
        print_memory(memory, job, needs, is_here=is_here)
        for key, (value, why) in _derived(loaded).items():
            print_prose(f"{key} = {f'{value:,.0f} s' if isinstance(value, float) else value} ({why})")
        print_text("\n" + "\n".join(rehearsal.lines()))
    if refusal is not None and isinstance(memory, MemoryEstimate):
        raise with_hint(refusal, memory, there.all)
    rehearsal.check()


def _rehearsed(profile: Profile) -> Rehearsal | AsyncrlError:
    """The rehearsal of the reward on the first training items; or why the task cannot be loaded here, or not
    for the built-in model.

    A file's eval prompts are held out as in a run, so a file that is too small for them is found here,
    too."""
    import asyncio

    from asyncrl_cli.job.driver_preparation import check_prompts

    # without a rehearsal one item tells whether the task can be loaded
    items = max(1, profile.task.rehearsal_items)
    train_prompts = min(items, profile.task.train_prompts or items)
    update: dict[str, Any] = {"task": profile.task.model_copy(update={"train_prompts": train_prompts})}
    if profile.task.source.partition(":")[0] not in KINDS:  # eval prompts that are generated take time
        update["eval"] = profile.eval.model_copy(update={"prompts": 0, "sets": {}})
    few = profile.model_copy(update=update)
    try:
        task = load_task(few)
        check_prompts(few, task, None)
        return asyncio.run(rehearse(few, task))
    except AsyncrlError as error:
        return error


@dataclass(frozen=True, slots=True)
class _Cluster:
    """A cluster's nodes, with all their resources and with those that are free now. For planned nodes the two
    are the same."""

    all: cluster.ClusterResources
    free: cluster.ClusterResources

    @classmethod
    def at(cls, address: str) -> _Cluster:
        from asyncrl_cli.job.ray.session import connected

        with connected(address) as found:
            from asyncrl_cli.job.ray.placement import ray_cluster

            return cls(found, ray_cluster(free=True))

    @classmethod
    def planned(cls, profile: Profile, gpus: int | None, nodes: int, memory_gib: float | None) -> _Cluster:
        """This machine, or `nodes` with `gpus` GPUs each and enough CPUs; with 0 GPUs, as many CPUs as this
        machine."""
        here = cluster.local_cluster()
        if gpus is not None:
            memory_bytes = None if memory_gib is None else int(memory_gib * GIB)
            least = 0 if gpus else here.cpus
            planned = tuple(
                cluster.planned_nodes(profile, nodes, gpus, least_cpus=least, memory_bytes=memory_bytes)
            )
            here = replace(here, nodes=planned, elastic_cpus=nodes == 1)
        return cls(here, here)

    def rows(self, job: JobPlan) -> list[dict[str, str]]:
        """One row per node: its resources, and how many processes of each role would run there."""
        placed, free = assigned(job, self.free), {node.key: node for node in self.free.nodes}
        there = {} if isinstance(placed, Unplaced) else {name: Counter(on) for name, on in placed.items()}
        rows = []
        for node in self.all.nodes:
            row = {"node": node.name}
            if self.free is self.all:
                row["GPUs"] = str(node.gpus)
            else:
                labels = [
                    (key, value) for key, value in node.labels.items() if not key.startswith("ray.io/node")
                ]
                row["free GPUs"] = f"{free[node.key].gpus} of {node.gpus}"
                row["free CPUs"] = f"{free[node.key].cpus} of {node.cpus}"
                row["labels"] = " ".join(f"{key}={value}" for key, value in labels)
            roles = []
            for name, nodes in there.items():
                each = job.role(TRAINER if name == COLOCATED else name).workers // len(job.groups[name])
                if nodes[node.key]:
                    roles.append(f"{nodes[node.key] * each} {name}")
            rows.append(row | {"would be there": " ".join(roles)})
        return rows

    def print(self, job: JobPlan) -> None:
        rows = self.rows(job)
        print_table(list(rows[0]), (row.values() for row in rows), "\nnodes")
        if isinstance(missing := assigned(job, self.free), Unplaced):
            whom = "an autoscaler or for other jobs to end" if job.autoscaler else "other jobs to end"
            fitting = fitting_hint(job, self.free)
            waits = f"there is no room now, {missing}: a run would wait for {whom}"
            print_prose(f"{waits}; this would fit at once: {fitting}")


def _derived(loaded: Loaded) -> dict[str, tuple[Any, str]]:
    """The defaults that follow from device and model, with their origins, by key."""
    values = values_of(loaded.profile)
    derived = {key: why for key, why in loaded.origins.items() if why != DEFAULT and is_default(why)}
    return {key: (values[key], why) for key, why in derived.items()}


def _document(profile: Profile, schedule: Schedule, job: JobPlan, memory: dict[str, Any]) -> dict[str, Any]:
    placement = {name: getattr(job, name) for name in ("device", "engine", "colocate", "gpus", "cpus")}
    return {
        "profile": profile.name,
        "schedule": asdict(schedule),
        "placement": {**placement, "roles": plan_rows(job)},
        "memory": memory,
    }


def plan_rows(plan: JobPlan) -> list[dict[str, str | int | float]]:
    """One row per role, for `asyncrl plan`: plain values, ready for a table or for JSON. Numbers of bundles
    are ascending, with ranges of consecutive ones: `0-3 8`."""
    rows: list[dict[str, str | int | float]] = []
    for role in plan.roles:
        ranges = list[list[int]]()
        for bundle in sorted({plan.bundle_of(role, index) for index in range(role.workers)}):
            if ranges and bundle == ranges[-1][-1] + 1:
                ranges[-1] = [ranges[-1][0], bundle]
            else:
                ranges.append([bundle])
        rows.append(asdict(role) | {"bundles": " ".join("-".join(map(str, one)) for one in ranges)})
    return rows


def _print_schedule_and_placement(profile: Profile, schedule: Schedule, job: JobPlan) -> None:
    """Two tables, the first with the terms of the documentation."""
    on_stale = profile.async_training.on_stale
    strict = f'not strict: on_stale = "{on_stale}"'
    if on_stale == "wait":
        strict = "strict: no trained token is older"
    last = schedule.last_window_groups
    shorter = "" if last == schedule.window_groups else f", the last window has {last} groups"
    meanings = [
        ("mode", schedule.mode, "follows from colocate, K, eta and partial_rollout"),
        ("B", str(schedule.mini_batch_groups), "groups per optimizer step"),
        ("R", str(schedule.step_groups), "groups per train step"),
        ("K", str(schedule.window_steps), "train steps per weight sync"),
        ("W", str(schedule.window_groups), "groups per window (between two weight syncs)"),
        ("eta", str(schedule.eta), "share of a window admitted ahead"),
        ("budget", str(schedule.budget_groups), "groups admitted per window: floor((1 + eta) * W)"),
        ("staleness bound", str(schedule.max_staleness), f"versions; {strict}"),
        ("train steps", str(schedule.train_steps), f"{schedule.optimizer_steps} optimizer steps"),
        ("groups", str(schedule.groups), "trained by the whole run"),
        ("syncs", str(schedule.syncs), f"weight syncs, one at the end of each window{shorter}"),
    ]
    print_table(["", Column("value", justify="right"), "meaning"], meanings, f"{profile.name}: schedule")
    rows = plan_rows(job)
    headers = [header.replace("_", " ") for header in rows[0]]
    print_table(headers, (map(str, row.values()) for row in rows), f"\nplacement: {job}")
