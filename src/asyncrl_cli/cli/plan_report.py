"""The output of `asyncrl plan`: schedule, placement, an estimate of what each process holds, and whether its
devices, its node and its object store have room for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

from rich.table import Column
from rich.text import Text

from asyncrl_cli.base.errors import AsyncrlError, PreflightError
from asyncrl_cli.base.paths import expand
from asyncrl_cli.cli.console import print_json, print_prose, print_table, print_text, warn
from asyncrl_cli.engines.port import kind_of
from asyncrl_cli.job.ray.session import check_shared_memory
from asyncrl_cli.models.model_directory import model_here, tokenizer_here
from asyncrl_cli.models.shape import parameters_of
from asyncrl_cli.plan import cluster, memory_fit
from asyncrl_cli.plan.cluster import Unplaced, assigned, fitting_hint
from asyncrl_cli.plan.compiler import compile_job, device_of
from asyncrl_cli.plan.job_plan import COLOCATED, TRAINER, JobPlan, for_device, for_job
from asyncrl_cli.plan.machine import SHARED_MEMORY, engine_refusal, free_shared_memory
from asyncrl_cli.plan.memory import MemoryEstimate
from asyncrl_cli.plan.remedies import with_hint
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.keys import values_of, with_values
from asyncrl_cli.profile.loaded import DEFAULT, Loaded, is_default
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import shortened, toml_value
from asyncrl_cli.sandbox.rehearsal import Rehearsal, rehearse
from asyncrl_cli.tasks.code_choice import check_fields
from asyncrl_cli.tasks.files import KINDS
from asyncrl_cli.tasks.task import load_task
from asyncrl_cli.train.losses import check_loss
from asyncrl_cli.weights.directory import check_url

MIB, GIB = 2**20, 2**30
NOT_COUNTED = (
    "not counted: a GPU's context (about 1 GiB per process), driver and Ray (about 1 GiB), and fragmentation"
)
NEED = ("device", "roles", "num_bytes", "available_bytes", "fits")
"""What JSON says of a `DeviceNeed`."""


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
    printing the plan; also if `weights.url` cannot be written. Raises ConfigError for an unknown loss, and
    for fields and scorers that cannot be used.
    A plan for this machine ends with the error of model, servers or task that `train` would be refused with;
    what only the machine lacks is a warning.
    """
    check_loss(loaded.profile.algorithm.loss_mode)
    check_fields(loaded.profile)
    is_here = gpus is None and address is None
    if is_here:
        check_url(loaded.profile.weights)
    if address is not None:
        there = _Cluster.at(address)
    else:
        there = _Cluster.planned(loaded.profile, gpus, nodes, node_memory_gib)
    loaded = for_device(loaded, device_of(loaded.profile, there.all), is_here=address is None)
    profile = loaded.profile
    schedule, job = Schedule.of(profile), compile_job(profile, there.all)
    shows_nodes = address is not None or nodes > 1
    warnings = [*job.warnings]
    if profile.weights.url is not None and not is_here:
        warnings.append(f"weights.url = {profile.weights.url} was not tried: the job runs elsewhere")
    if (missing := engine_refusal(profile, job.device, is_here=is_here)) is not None:
        warnings.append(_refused_here(missing))
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
        teachers = parameters_of(profile.teacher.paths.values(), memory.shape)
        loaded = for_job(loaded, job, memory.shape, teachers=teachers)
        needs = [*memory_fit.device_needs(memory), *memory_fit.node_needs(memory, there.all)]
        refusal = memory_fit.refusal_of(memory, there.all)
        if refusal is None:
            warnings += [*memory_fit.cache_warnings(memory), *memory_fit.transfer_warnings(memory)]
            try:
                if is_here:
                    check_shared_memory(memory.profile, memory.store_bytes)
            except PreflightError as small:
                warnings.append(_refused_here(small))
    verdict: AsyncrlError | None = None
    model_dir: Path | None = None
    try:
        if is_here:
            model_dir = model_here(profile)
    except AsyncrlError as error:
        if not expand(profile.model.path).is_dir():
            verdict = error
        elif refusal is None:  # a directory with nothing but config.json is enough for a plan
            warnings.append(_refused_here(error))
    try:
        if is_here:
            from asyncrl_cli.job.driver_prompt_checks import check_further_here

            check_further_here(profile)
            kind_of(profile).check_servers(profile, model_dir)
    except AsyncrlError as error:
        verdict = verdict or error
    rehearsal = _rehearsed(profile, model_dir)
    if isinstance(rehearsal, AsyncrlError):
        verdict = verdict or (rehearsal if is_here else None)
        # said once: the error comes last
        why = rehearsal.message if as_json or verdict is not rehearsal else "the error below says why"
        rehearsal = Rehearsal(name=f'"{profile.task.reward}"', reason=why)
    warn(*loaded.warnings, *warnings, *rehearsal.warnings())
    # the defaults that follow from device and model, with their origins
    origins, values = loaded.origins.items(), values_of(loaded.profile)
    derived = {key: (values[key], why) for key, why in origins if why != DEFAULT and is_default(why)}
    usual = values_of(Profile())
    changed = {
        key: (value, loaded.origins[key])
        for key, value in values.items()
        if value != usual[key] and not is_default(loaded.origins.get(key, DEFAULT))
    }
    if as_json:
        names = ("device", "engine", "servers", "colocate", "gpus", "cpus")
        placement = {name: getattr(job, name) for name in names}
        document = {
            "profile": profile.name,
            "schedule": asdict(schedule) | {"target_kl": profile.async_training.target_kl},
            "placement": {**placement, "roles": plan_rows(job)},
            "memory": _memory_document(memory, needs),
            "defaults": derived,
            "changed": changed,
            "rehearsal": rehearsal.document(),
        }
        print_json(document | ({"cluster": there.rows(job)} if shows_nodes else {}))
    else:
        _print_schedule_and_placement(profile, schedule, job)
        if shows_nodes:
            there.print(job)
        _print_memory(memory, job, needs, is_here=is_here)
        for by in dict.fromkeys(origin for _, origin in changed.values()):
            pairs = [f"{key} = {toml_value(value)}" for key, (value, why) in changed.items() if why == by]
            # a file by its own name: profiles of users are often called "profile"
            name = by.rpartition("/")[2].rstrip(")") if "/" in by else by
            print_prose(f"by {name}: {', '.join(map(shortened, pairs))}")
        for key, (value, why) in derived.items():
            print_prose(f"{key} = {f'{value:,.0f} s' if key.endswith('_s') else value} ({why})")
        print_text("\n" + "\n".join(rehearsal.lines()))
    if refusal is not None and isinstance(memory, MemoryEstimate):
        raise with_hint(refusal, memory, there.all)
    if verdict is not None:
        raise verdict
    rehearsal.check()


def _refused_here(error: AsyncrlError) -> str:
    hint = f" ({error.hint})" if error.hint else ""
    return f"a run on this machine would be refused: {error.message}{hint}"


def _rehearsed(profile: Profile, model_dir: Path | None) -> Rehearsal | AsyncrlError:
    """The rehearsal of the reward on training items; or why the task cannot be loaded here, or not for the
    model, whose directory is known if it is here.

    A file is read as a run reads it, unless nothing is rehearsed: its eval prompts are held out, the same
    items are rehearsed, and the lengths of all prompts are checked. Of a source that generates its prompts, a
    few are made, unless a curriculum counts them."""
    import asyncio

    from asyncrl_cli.job.driver_preparation import check_prompts

    is_file = profile.task.source.partition(":")[0] in KINDS
    is_whole = (is_file and profile.task.rehearsal_items) or profile.task.curriculum is not None
    few = profile
    if not is_whole:
        # without a rehearsal one tells whether the task can be loaded
        items = max(1, profile.task.rehearsal_items)
        few = with_values(profile, {"task.train_prompts": min(items, profile.task.train_prompts or items)})
    try:
        task = load_task(few)
        if few.task.overlong_prompts == "error":  # a few may all be too long to be trained
            check_prompts(few, task, model_dir)
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
    strict = "strict: no trained token is older"
    if profile.async_training.on_stale == "accept":
        strict = 'not strict: on_stale = "accept"'
    last = schedule.last_window_groups
    shorter = "" if last == schedule.window_groups else f" (the last has {last} groups)"
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
    if (target := profile.async_training.target_kl) is not None:
        meaning = "nats per token: a governor steers how far generation runs ahead to it, up to eta"
        meanings.append(("KL target", f"{target:g}", meaning))
    print_table(["", Column("value", justify="right"), "meaning"], meanings, f"{profile.name}: schedule")
    rows = plan_rows(job)
    headers = [header.replace("_", " ") for header in rows[0]]
    print_table(headers, (map(str, row.values()) for row in rows), f"\nplacement: {job}")
    for index, url in enumerate(job.servers):
        print_prose(f"rollout-{index} generates at {url}")


def _memory_document(
    memory: MemoryEstimate | str, needs: Sequence[memory_fit.DeviceNeed]
) -> dict[str, object]:
    if isinstance(memory, str):
        return {"unknown": memory}
    return {
        "estimate": True,
        "parameters": memory.shape.parameters,
        "kv_values_per_token": memory.shape.kv_values_per_token,
        "items": [
            {"place" if name == "kind" else name: value for name, value in asdict(item).items()}
            for item in memory.items
        ],
        "devices": [{name: getattr(need, name) for name in NEED} for need in needs],
        "object_store_bytes": memory.store_bytes,
        "remarks": [*memory.shape.remarks, NOT_COUNTED],
    }


def _print_memory(
    memory: MemoryEstimate | str, plan: JobPlan, needs: Sequence[memory_fit.DeviceNeed], *, is_here: bool
) -> None:
    """A table of what each process holds and when; then what its device, its node and its store have."""
    if isinstance(memory, str):
        print_prose(f"\nmemory: no estimate: {memory}")
        return
    is_apart = plan.device != "cpu"  # the GPU's memory is not the host's
    model = f"{memory.shape.model_type}, {memory.shape.parameters:,} parameters"
    title = f"\nmemory per {'GPU and process' if is_apart else 'process'}, an estimate ({model})"
    rows: list[list[str | Text]] = []
    for role, grouped in groupby(memory.items, key=lambda item: item.role):
        items = list(grouped)
        rows.append([Text(f"{role} x {max(item.processes for item in items)}", "bold")])
        for item in items:
            where = ["GPU" if item.kind == "device" else "host"] if is_apart else []
            rows.append([item.what, item.phase, size(item.num_bytes), *where, item.how])
    sizes, places = Column("size", justify="right", no_wrap=True), ["where"] if is_apart else []
    print_table(["what", "when", sizes, *places, "meaning"], rows, title)
    for need in needs:
        one = "one node's host" if need.device == memory_fit.NODE else f"one {need.device}"
        line = f"{' and '.join(need.roles)} on {one}: about {size(need.num_bytes)} at the peak"
        if need.available_bytes is None:
            flag = "--node-memory" if need.device == memory_fit.NODE else "--gpu-memory"
            print_prose(f"{line} (the memory of a {need.device} is not known here: {flag} GIB)")
        else:
            fits = "fits" if need.fits else "does not fit"
            print_prose(f"{line} of {size(need.available_bytes)}: {fits}, by this estimate")
    needed, free = memory.store_bytes, free_shared_memory()
    room = f" ({SHARED_MEMORY})"
    if is_here and free is not None:
        enough = "enough" if needed <= free else "not enough"
        room = f", {SHARED_MEMORY} has {size(free)} free: {enough}"
    print_prose(f"object store of a local session: {size(needed)} of shared memory{room}")
    for line in (*memory.shape.remarks, NOT_COUNTED):
        print_prose(line)


def size(num_bytes: int) -> str:
    """The size in MiB below one GiB, otherwise in GiB."""
    mib = num_bytes / MIB
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
