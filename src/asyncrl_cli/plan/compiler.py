"""Compiles a profile into a `JobPlan`: counts its processes, places them, and warns of what is probably a
mistake. Pure: it reads nothing and starts nothing.

Explicit counts win over a ratio of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from asyncrl_cli.base.errors import ConfigError, PreflightError, counted
from asyncrl_cli.plan.cluster import ClusterResources, check_fit
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan, Spot
from asyncrl_cli.profile.arithmetic import (
    TRAIN,
    asked_ranks,
    asked_workers,
    gpus_per_worker,
    groups_ahead,
    node_shape_of,
    share_of,
    tasks_apart,
    tensor_parallel_size,
    window_groups_of,
)
from asyncrl_cli.profile.rollout_sections import RolloutSection
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile

Counts = tuple[int, int]
"""Trainer ranks and rollout workers."""
MOST_ROUNDS = 4
"""A warning if a mini batch has more than this many times the groups that are generated at once."""


def compile_job(profile: Profile, cluster: ClusterResources) -> JobPlan:
    """The plan of a profile's job. Raises ConfigError if its numbers contradict each other, PreflightError if
    the cluster is too small."""
    device, placement = device_of(profile, cluster), profile.placement
    tensor_parallel_size(profile, device)
    if placement.gpu_bundles and cluster.elastic_cpus and len(cluster.nodes) == 1:
        (here,) = cluster.nodes  # this machine, whose GPUs are logical
        cluster = replace(cluster, nodes=(replace(here, gpus=max(here.gpus, asked_gpus(profile))),))
    on_gpus = placement.gpu_bundles or device == "cuda"
    ranks, workers = cuda_counts(profile, cluster) if on_gpus else cpu_counts(profile)
    if ranks % (sharing := profile.trainer.sequence_parallel_size):
        key, present = "trainer.sequence_parallel_size", counted(ranks, "trainer rank")
        why = f"{key} = {sharing} does not divide {present}"
        raise ConfigError(why, hint=f"--set {key}={gcd(ranks, sharing)}")
    spots = {}
    for role, labels in ((TRAINER, placement.trainer_labels), (ROLLOUT, placement.rollout_labels)):
        shape = node_shape_of(getattr(profile, role)) if on_gpus else None
        strategy = "strict_spread" if shape else getattr(placement, f"{role}_strategy")
        spots[role] = Spot(strategy=strategy, labels=labels, nodes=shape.nodes if shape else 0)
    plan = JobPlan(
        device=device,
        trainer_workers=ranks,
        rollout_workers=workers,
        gpus_per_rollout_worker=placement.gpus_per_rollout_worker if on_gpus else 0,
        cpus_per_worker=placement.cpus_per_worker,
        colocate=placement.colocate,
        lend=placement.lend,
        engine=profile.rollout.engine,
        servers=profile.rollout.urls or (),
        scorers=_scorer_processes(profile, cluster, on_gpus=on_gpus),
        trainer_spot=spots[TRAINER],
        rollout_spot=spots[ROLLOUT],
        disjoint_nodes=placement.disjoint_nodes,
        autoscaler=placement.autoscaler,
    )
    check_fit(plan, cluster)
    return replace(plan, warnings=tuple(_warnings(profile, plan, cluster)))


def device_of(profile: Profile, cluster: ClusterResources) -> str:
    """`cpu` or `cuda`, for all roles."""
    if profile.placement.device != "auto":
        return profile.placement.device
    return "cuda" if cluster.gpus or profile.placement.gpus is not None else "cpu"


def asked_gpus(profile: Profile) -> int:
    """How many GPUs a profile's placement asks for; 0 if it names no number."""
    placement = profile.placement
    if total := placement.gpus or sum(placement.ratios or ()):
        return total
    ranks, workers = asked_ranks(profile) or 0, asked_workers(profile) or 0
    return max(ranks, workers) if placement.colocate else ranks + workers * gpus_per_worker(profile)


def cpu_counts(profile: Profile) -> Counts:
    """One worker per role unless the profile says more; `placement.gpus` is ignored (the plan warns about
    it).

    Colocated, a rank and a worker share `cpus_per_worker` cores, and there are as many such pairs as there
    would be ranks and workers apart: both placements use the same cores. (One rank and one worker with more
    threads would be slower: small matrices do not gain from threads.)
    """
    ranks = profile.placement.trainer_workers or share_of(profile, TRAIN) or 1
    workers = len(profile.rollout.urls or ()) or profile.rollout.workers or share_of(profile, ROLLOUT) or 1
    return (ranks + workers, ranks + workers) if profile.placement.colocate else (ranks, workers)


def cuda_counts(profile: Profile, cluster: ClusterResources) -> Counts:
    """Explicit counts win; the rest comes from `placement.gpus` (or all of the cluster's) and
    `placement.ratio`. The GPUs of scorers are taken off first."""
    if profile.placement.colocate:
        return _colocated_counts(profile, cluster)
    scorers = sum(_scorer_processes(profile, cluster, on_gpus=True).values())
    per_worker, gpus = gpus_per_worker(profile), profile.placement.gpus
    ranks, workers = asked_ranks(profile), asked_workers(profile)
    if ranks is None and workers is None:
        ranks, workers = _counts_by_ratio(profile, cluster, _total(profile, cluster) - scorers)
    elif workers is not None and ranks is None:
        ranks = _counts_of_rest(profile, cluster, scorers, ROLLOUT, workers * per_worker)
    elif ranks is not None and workers is None:
        workers = _counts_of_rest(profile, cluster, scorers, TRAINER, ranks)
    assert ranks is not None
    assert workers is not None
    needed = ranks + workers * per_worker + scorers
    # Where the cluster lacks them, too, a later error says what fits it.
    if gpus is not None and gpus < needed <= _there(cluster, needed):
        beside = f" beside {scorers} for scorers" if scorers else ""
        roles = f"{ranks} trainer ranks and {workers} rollout workers of {per_worker}{beside}"
        why = f"placement.gpus = {gpus}, but {roles} need {needed}"
        raise ConfigError(why, hint=f"--set placement.gpus={needed}")
    return ranks, workers


def _scorer_processes(profile: Profile, cluster: ClusterResources, *, on_gpus: bool) -> dict[str, int]:
    """The number of processes of each task with resources of its own: on GPUs, its share by
    `placement.ratios`."""
    tasks, ratios, processes = profile.placement.tasks, profile.placement.ratios, {}
    for task in tasks_apart(profile):
        share = share_of(profile, task)
        if not on_gpus:
            processes[task] = share or 1
            continue
        if share is None or ratios is None:
            is_named = tasks is not None and (task,) in tasks
            without, no = "placement.tasks without placement.ratios", f"no placement.tasks with {task}"
            name = f'--set placement.tasks=[["train"],["{task}"],["rollout"]] ' if tasks is None else ""
            hint = f"{name}--set placement.ratios=[{','.join('1' * len(tasks or (1, 1, 1)))}]"
            why = f"{without if is_named else no}: nothing says how many GPUs {task} gets"
            raise ConfigError(why, hint=hint)
        total, parts = _total(profile, cluster), sum(ratios)
        processes[task], remainder = divmod(total * share, parts)
        if remainder:
            there = _there(cluster, total)
            why = f"GPUs not divisible: placement.ratios = {list(ratios)} of {counted(total, 'GPU')}"
            raise ConfigError(why, hint=f"--set placement.gpus={there - there % parts or parts}")
    return processes


def _colocated_counts(profile: Profile, cluster: ClusterResources) -> Counts:
    placement = profile.placement
    if placement.gpus_per_rollout_worker > 1:
        key, each = "placement.gpus_per_rollout_worker", placement.gpus_per_rollout_worker
        why = "placement.colocate shares each GPU between one rank and one rollout worker"
        raise ConfigError(f"{why}, but {key} = {each}", hint=f"--set {key}=1")
    asked = {
        "placement.trainer_workers": asked_ranks(profile),
        "rollout.workers": profile.rollout.workers,
        "placement.gpus": placement.gpus,
    }
    given = {key: value for key, value in asked.items() if value is not None}
    if len(set(given.values())) > 1:
        numbers = ", ".join(f"{key} = {value}" for key, value in given.items())
        why = f"placement.colocate needs one rank and one rollout worker per GPU, but {numbers}"
        raise ConfigError(why, hint=" ".join(f"--set {key}={min(given.values())}" for key in given))
    gpus = next(iter(given.values())) if given else _total(profile, cluster)
    if profile.weights.transport == "ipc" and gpus > 1:
        one = " ".join(f"--set {key}=1" for key in given or ("placement.gpus",))
        raise ConfigError(
            f'weights.transport = "ipc" with {gpus} GPUs: weights pass through the memory of rank 0\'s GPU, '
            "which the rollout workers of the others cannot map",
            hint=f"{one}, or --set weights.transport=object-store",
        )
    return gpus, gpus


def _total(profile: Profile, cluster: ClusterResources) -> int:
    if total := profile.placement.gpus or cluster.gpus:
        return total
    if profile.placement.gpu_bundles:
        why = "placement.gpu_bundles: nothing says how many logical GPUs the job has"
        raise PreflightError(why, hint="--set placement.gpus=8")
    is_direct = profile.weights.transport in DIRECT_TRANSPORTS
    without = "--set placement.device=cpu" + (" --set weights.transport=object-store" if is_direct else "")
    raise PreflightError(
        f'placement.device = "cuda", but the cluster has no GPU: {cluster}',
        hint=f"{without}, or `asyncrl plan --gpus N` to plan for a machine that has some",
    )


def _there(cluster: ClusterResources, gpus: int) -> int:
    """The number of GPUs for a hint: `gpus`, or what the cluster has if that is less. A cluster without GPUs
    does not lower it."""
    return min(gpus, cluster.gpus or gpus)


def _counts_by_ratio(profile: Profile, cluster: ClusterResources, total: int) -> Counts:
    """Divide GPUs between trainer and rollout by `placement.ratio`, or by their entries in
    `placement.ratios`, into whole GPUs and whole rollout workers."""
    per_worker = profile.placement.gpus_per_rollout_worker
    left, right = map(int, profile.placement.ratio.split(":"))
    left, right = share_of(profile, TRAIN) or left, share_of(profile, ROLLOUT) or right

    def divides(gpus: int) -> bool:
        ranks, remainder = divmod(gpus * left, left + right)
        return not remainder and (gpus - ranks) % per_worker == 0

    if not divides(total):
        fitting = next((gpus for gpus in range(_there(cluster, total), 0, -1) if divides(gpus)), None)
        hint = "--set placement.trainer_workers=N --set rollout.workers=M"
        if total == 1:
            hint = "--set placement.colocate=true (one GPU in turns), or --set placement.device=cpu"
        elif fitting is not None:
            hint = f"--set placement.gpus={fitting}"
        of = f"{counted(total, 'GPU')} with {per_worker} per rollout worker"
        raise ConfigError(f'GPUs not divisible: placement.ratio = "{left}:{right}" of {of}', hint=hint)
    ranks = total * left // (left + right)
    return ranks, (total - ranks) // per_worker


def _counts_of_rest(profile: Profile, cluster: ClusterResources, scorers: int, role: str, taken: int) -> int:
    """How many processes of the other role fit into the GPUs that are left when `role` takes `taken`."""
    per_worker, shape = profile.placement.gpus_per_rollout_worker, node_shape_of(getattr(profile, role))
    all_gpus = _total(profile, cluster)
    total, each = all_gpus - scorers, 1 if role == ROLLOUT else per_worker
    rest = total - taken
    if rest >= each and rest % each == 0:
        return rest // each
    # The key that sets the role's number of processes, and the GPUs that one more of it takes.
    key, step = ("rollout.workers", per_worker) if role == ROLLOUT else ("placement.trainer_workers", 1)
    if shape is not None:
        key, step = f"{role}.n_gpus_per_node", shape.nodes
    if rest >= each:
        why = f"{key} leaves {rest} of {total} GPUs for rollout workers of {each} each"
        hint = f"--set placement.gpus={taken + rest // each * each}"
        raise ConfigError(f"GPUs not divisible: {why}", hint=hint)
    # As many GPUs as the role can take if the other side needs `each`.
    there, num_nodes = _there(cluster, all_gpus), min(step, len(cluster.nodes))
    fitting = (there - scorers - each) // (num_nodes if shape else step)
    sets = [f"--set {role}.nnodes={num_nodes}"] if shape and num_nodes != step else []
    sets += [f"--set {key}={fitting}", *([f"--set placement.gpus={there}"] if there < all_gpus else [])]
    why = f"which leaves {max(rest, 0)} for the other side; it needs {each}"
    hint = " ".join(sets) if fitting >= 1 else "--set placement.device=cpu"
    raise PreflightError(f"{key} takes {taken} of {total} GPUs, {why}", hint=hint)


def _warnings(profile: Profile, plan: JobPlan, cluster: ClusterResources) -> Iterator[str]:
    placement, on_cpus, rollout = profile.placement, plan.device == "cpu", plan.role(ROLLOUT)
    # SkyRL asks for at least as many groups at once as a mini batch has, and for no more than its capacity
    # admits. Fewer are fine here, because responses of the next groups fill the slots; very few are not.
    slots, n, mini_batch = profile.rollout.slots, profile.rollout.n, profile.trainer.ppo_mini_batch_size
    workers, most = rollout.workers, window_groups_of(profile) + groups_ahead(profile)
    at_once = max(1, workers * slots // n)
    there_are = f"rollout.slots = {slots} on {counted(workers, 'worker')}"
    if at_once * MOST_ROUNDS < mini_batch:
        yield (
            f"{there_are}: {counted(at_once, 'group')} of rollout.n = {n} at a time, but a mini batch has "
            f"trainer.ppo_mini_batch_size = {mini_batch}: the trainer waits for about "
            f"{-(-mini_batch // at_once)} groups one after the other, each as long as its longest response "
            f"(--set rollout.slots={-(-mini_batch * n // workers)} has room for all)"
        )
    # The default is not compared with small runs.
    if at_once > most and slots > RolloutSection.model_fields["slots"].default:
        yield (
            f"{there_are}: at most {counted(most, 'group')} of rollout.n = {n}, {most * n} responses, are "
            f"ever under way ((1 + eta) * W), so {workers * slots - most * n} slots only take memory, except "
            f"in evals (--set rollout.slots={-(-most * n // workers)})"
        )
    if not plan.gpus and placement.gpus is not None:
        yield f"placement.gpus = {placement.gpus} is not used: the job runs on CPUs"
    counts = {
        "placement.colocate": placement.colocate,
        "placement.trainer_workers": placement.trainer_workers,
        "rollout.workers": profile.rollout.workers,
        "trainer.n_gpus_per_node": profile.trainer.n_gpus_per_node,
        "rollout.n_gpus_per_node": profile.rollout.n_gpus_per_node,
    }
    decides = next((key for key, count in counts.items() if count), None)
    if plan.gpus and placement.ratio != "1:1" and decides:
        yield f'placement.ratio = "{placement.ratio}" is not used: {decides} decides instead'
    if on_cpus and profile.model.dtype == "bfloat16" and cluster.cpu_bfloat16 is False:
        yield (
            "model.dtype = bfloat16: this CPU has no instructions for it and emulates every matrix product, "
            "several times slower than in float32 (--set model.dtype=float32)"
        )
    if on_cpus and profile.trainer.offload_optimizer:
        yield (
            "trainer.offload_optimizer changes nothing on CPUs: the optimizer's moments are in the host's "
            "memory already"
        )
    # On CPUs each of the processes that share a model computes with all of its worker's threads.
    others = tensor_parallel_size(profile, plan.device) - 1 if on_cpus else 0
    threads = plan.cpus - len(plan.servers) + rollout.workers * rollout.threads * others
    if cluster.elastic_cpus and max(threads, plan.cpus) > cluster.cpus:
        cores = counted(cluster.cpus, "core")
        asks = f"the job asks for {counted(plan.cpus, 'CPU')} on {cores} and starts all the same"
        slow = f"{threads} threads on {cores} slow each other down: ask for fewer workers"
        slow += " or a lower rollout.tensor_parallel_size" if others else ""
        light = f"{asks}, because workers whose servers generate hardly compute"
        slow = f"{asks}; {slow}" if plan.cpus > cluster.cpus else slow
        yield slow if threads > cluster.cpus else light
