"""A job's plan: its roles, their workers and devices, the bundles that they reserve, and the defaults that
follow from them. compiler.py makes it from a profile.

    placement group            bundles                              what runs in a bundle
    trainer                    one per rank: 1 device, c CPUs       that rank
    ref, teacher, prox, ...    one per process, likewise            that process, if the scorer has its own
    rollout                    one per worker: g GPUs, c CPUs       that worker
    colocated                  one per pair, instead of both        a rank and a worker, in turns
    trainer, with lending      one per rank                         a rank and a worker, in turns
    any of them with `nnodes`  one per node                         all that the node has of the role

c is `placement.cpus_per_worker`, g is `placement.gpus_per_rollout_worker`. In a colocated bundle the rank and
the worker share a GPU (RANK_SHARE), and each computes with all of the bundle's cores while the other one is
paused.

Some defaults follow from the model and from where the job runs. They are filled in once that is known, and
before anything reads them. The origin of such a value says what it follows from:
`model.dtype = "bfloat16"  # default for cuda`.

    model.dtype                 the device's, and bfloat16 for a pretrained model on CPUs with matrix units
    SMALL_SIZES                 batches and evals of a pretrained model on this machine's CPUs
    trainer.lr                  a pretrained model's, by its number of parameters
    placement.start_timeout_s   600 s, and the time to read the model's files from a slow disk
    trainer.step_timeout_s      600 s, and the arithmetic of full-length responses on slow processors
    checkpoint.timeout_s        300 s, and the time to write weights and moments to a slow disk

The limits are there to end a hang, not to judge speed: a process that dies is noticed at once in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl_cli.base.errors import counted
from asyncrl_cli.plan.processor import has_bfloat16_matrix_units
from asyncrl_cli.profile.arithmetic import Schedule, max_context_tokens
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.keys import values_of, with_values
from asyncrl_cli.profile.loaded import DEFAULT, Loaded, is_default
from asyncrl_cli.profile.schema import ProcessPlace, Profile

if TYPE_CHECKING:
    from asyncrl_cli.models.shape import ModelShape

TRAINER, ROLLOUT, LENT, COLOCATED = "trainer", "rollout", "lent", "colocated"
"""`LENT`: rollout workers on the trainer's devices (`placement.lend`), one per rank."""

RANK_SHARE = 0.6
"""What a colocated rank reserves of its GPU; the worker reserves the rest. Ray fills GPUs best-fit: with more
than half of one each, no two ranks of a bundle share a GPU, and workers that come after all ranks find one
rest on each."""

DTYPE = "model.dtype"
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""On GPUs, float32 would mean no flash attention, no padding-free batches and twice the memory. Most CPUs
emulate bfloat16."""
LR_KEY = "trainer.lr"
LR_TIMES_PARAMETERS, LEAST_LR, MOST_LR = 2.7e3, 1e-6, 5e-4
"""Learning rate times parameters: 2e-5 for 135 M, which benchmarks/pretrained.py has tried, and from 2.7 B on
the 1e-6 that is usual for larger models."""
LORA_LR_RATIO = 10
"""Adapters learn best at about ten times the rate of all weights (Schulman and Thinking Machines Lab, LoRA
Without Regret, 2025)."""
RUINOUS_LR_RATIO = 10
"""A warning if the given rate is more than this many times the default for the model."""
SMALL_SIZES = {
    "trainer.ppo_mini_batch_size": 4,
    "trainer.max_tokens_per_microbatch": 2048,
    "eval.prompts": 64,
}
START_KEY, STEP_KEY = "placement.start_timeout_s", "trainer.step_timeout_s"
CHECKPOINT_KEY = "checkpoint.timeout_s"
GB = 10**9
SLOW_DISK_BYTES_PER_S = 100 * 10**6
"""A basic network disk, or a hard disk: all nodes together write a checkpoint at this rate, and each reads
the model once."""
SLOW_FLOPS = {
    ("cuda", "bfloat16"): 40e12,
    ("cuda", "float32"): 8e12,
    ("cpu", "float32"): 10e9,
    ("cpu", "bfloat16"): 2e9,
}
"""Floating-point operations per second of a GPU or of a CPU's thread, by `model.dtype`: an eighth of an
A100's peak (two fifths is usual), a CPU core without wide vectors, and one that emulates bfloat16."""
FLOPS_PER_VALUE, FORWARD_FLOPS_PER_VALUE = 12, 2
"""For a token and a parameter: forward and backward 6, activations computed again 2, the logprobs of the
window's first weights and of the reference 2 each. A teacher's size is its own."""
FILE_BYTES, STATE_BYTES = 4, 12
"""Per parameter: of the model's files, which may be float32; of a checkpoint's weights and two moments."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Bundle:
    """What one bundle of a placement group reserves on one node."""

    gpus: int = 0
    cpus: int

    def times(self, number: int) -> Bundle:
        return Bundle(gpus=number * self.gpus, cpus=number * self.cpus)

    def __str__(self) -> str:
        return f"{counted(self.gpus, 'GPU')} and {counted(self.cpus, 'CPU')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Which nodes a role may use: by their labels, and by a strategy. `nodes`: the role has one bundle on
    each of that many nodes, shared by its processes there; 0: a bundle for each process."""

    strategy: str = "pack"
    labels: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 0


ANYWHERE = Spot()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """One role's workers; `JobPlan.bundle_of` says where in the placement group. `threads` are per worker."""

    role: str
    workers: int
    device: str
    gpus_per_worker: float
    cpus_per_worker: int
    threads: int
    placement_group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Everything that placement needs. Without GPUs, real or logical, `gpus_per_rollout_worker` is 0.
    `engine`: the rollout engine's name. `servers`: those of others at which rollout workers generate, each of
    which then needs only a CPU. `scorers`: the number of processes of each task that has its own.
    `warnings`: one line each, for people."""

    device: str
    trainer_workers: int
    rollout_workers: int
    gpus_per_rollout_worker: int
    cpus_per_worker: int
    colocate: bool
    lend: bool = False
    engine: str = "transformers"
    servers: tuple[str, ...] = ()
    scorers: Mapping[str, int] = field(default_factory=dict)
    trainer_spot: Spot = ANYWHERE
    rollout_spot: Spot = ANYWHERE
    disjoint_nodes: bool = False
    autoscaler: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return sum(bundle.gpus for bundle in self.bundles)

    @property
    def shares_gpus(self) -> bool:
        """Whether a rank and a rollout worker take turns on each GPU of the trainer."""
        return (self.colocate or self.lend) and self.gpus > 0

    @property
    def cpus(self) -> int:
        return sum(bundle.cpus for bundle in self.bundles)

    @property
    def bundles(self) -> list[Bundle]:
        return [bundle for group in self.groups.values() for bundle in group]

    @property
    def groups(self) -> dict[str, list[Bundle]]:
        """Bundles by placement group: one for each process or, with `Spot.nodes`, one for all processes on a
        node."""
        found = {}
        for group in [COLOCATED] if self.colocate else self._processes:
            if group == LENT:  # with the ranks
                continue
            processes = self._processes[TRAINER if group == COLOCATED else group]
            num_bundles = self.spot(group).nodes or processes
            found[group] = [self._each(group).times(processes // num_bundles)] * num_bundles
        return found

    @property
    def _processes(self) -> dict[str, int]:
        lent = {LENT: self.trainer_workers} if self.lend else {}
        return {TRAINER: self.trainer_workers, **lent, **self.scorers, ROLLOUT: self.rollout_workers}

    def _each(self, group: str) -> Bundle:
        """What one process reserves. A colocated rank and worker share it: the GPU, or without GPUs the
        cores."""
        gpus = self.gpus_per_rollout_worker
        if group == ROLLOUT and self.servers:
            return Bundle(cpus=1)
        if group == COLOCATED or (group == TRAINER and self.lend):
            return Bundle(gpus=min(gpus, 1), cpus=self.cpus_per_worker * (2 if gpus else 1))
        return Bundle(gpus=gpus if group == ROLLOUT else min(gpus, 1), cpus=self.cpus_per_worker)

    def spot(self, group: str) -> Spot:
        """Colocated processes are on the trainer's nodes. So are scorers, but each of their processes has a
        bundle of its own."""
        if group == ROLLOUT:
            return self.rollout_spot
        if group in self.scorers:
            return replace(self.trainer_spot, nodes=0, strategy="pack")
        return self.trainer_spot

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        return tuple(map(self.role, self._processes))

    def role(self, name: str) -> RolePlan:
        group = COLOCATED if self.colocate else TRAINER if name == LENT else name
        bundle, is_guest = self._each(group), name == LENT or (self.colocate and name == ROLLOUT)
        # Where both share cores, the rank reserves them for both.
        shares_cores = is_guest and not self.gpus
        is_host = name == TRAINER and (self.colocate or self.lend)
        share = 1 - RANK_SHARE if is_guest else RANK_SHARE if is_host else 1
        return RolePlan(
            role=name,
            workers=self._processes[name],
            device="remote" if name == ROLLOUT and self.servers else self.device,
            gpus_per_worker=bundle.gpus * share,
            cpus_per_worker=0 if shares_cores else min(bundle.cpus, self.cpus_per_worker),
            threads=bundle.cpus,
            placement_group=group,
        )

    def bundle_of(self, role: RolePlan, index: int) -> int:
        return index * len(self.groups[role.placement_group]) // role.workers

    def __str__(self) -> str:
        scorers = "".join(f"{processes} {task} + " for task, processes in self.scorers.items())
        sides = f"{self.trainer_workers} {TRAINER} + {scorers}{self.rollout_workers} {ROLLOUT}"
        where = "colocated" if self.colocate else "apart"
        where += f", {self.trainer_workers} more on the trainer's devices" if self.lend else ""
        return f"{sides} with {self.engine} ({where}): {self.gpus} GPUs and {self.cpus} CPUs"


def place_of(plan: JobPlan, name: str, model_dir: Path, version: int = 0) -> ProcessPlace:
    """What a role's workers need to know about their place. `version`: of the weights in `model_dir`."""
    role, path = plan.role(name), str(model_dir.absolute())
    return ProcessPlace(
        model_dir=path,
        device=plan.device,
        threads=role.threads,
        workers=role.workers,
        is_lent=name == LENT,
        version=version,
    )


def for_device(loaded: Loaded, device: str, *, is_here: bool = True) -> Loaded:
    """With the defaults for the job's device: `model.dtype` and, if `is_here` (not on a cluster, whose nodes
    are not known before the task is loaded), the sizes of a pretrained model on CPUs. Raises ConfigError if
    other keys exclude the dtype."""
    defaults: dict[str, tuple[str | float, str]] = {DTYPE: (DTYPES[device], device)}
    if not loaded.profile.model.path.startswith("builtin:"):
        least = LEAST_LR * (LORA_LR_RATIO if loaded.profile.lora.rank else 1)
        defaults[LR_KEY] = least, "a pretrained model of unknown size"  # `for_job` may know it
        if is_here and device == "cpu":
            defaults |= {key: (size, "a pretrained model on CPUs") for key, size in SMALL_SIZES.items()}
            if has_bfloat16_matrix_units():
                defaults[DTYPE] = "bfloat16", "a pretrained model on CPUs with matrix units"
    open_keys = {key: value for key, value in defaults.items() if loaded.origins.get(key) == DEFAULT}
    if not open_keys:
        return loaded
    derived = _with_defaults(loaded, open_keys)
    check(derived.profile)
    return derived


def usual_lr(profile: Profile, parameters: int) -> float:
    """The learning rate for a pretrained model of this size, with one significant digit."""
    rate = max(LR_TIMES_PARAMETERS / parameters, LEAST_LR) * (LORA_LR_RATIO if profile.lora.rank else 1)
    return float(f"{min(rate, MOST_LR):.0e}")


def for_job(
    loaded: Loaded,
    plan: JobPlan,
    shape: ModelShape,
    *,
    teachers: Sequence[int] = (),
    is_resumed: bool = False,
) -> Loaded:
    """With default time limits for this model and this number of ranks, also if an earlier attempt of the run
    had others, and with the default learning rate for the model, unless the run is resumed. `teachers`: the
    numbers of their parameters. Warns of a given
    learning rate that may ruin the model."""
    profile, least = loaded.profile, values_of(Profile())
    num_models = 1 + profile.algorithm.has_critic  # a critic's size is about the policy's
    files, state = (each * shape.parameters * num_models for each in (FILE_BYTES, STATE_BYTES))
    context_tokens = max_context_tokens(profile)
    tokens = Schedule.of(profile).step_groups * profile.rollout.n * context_tokens
    # Attention is causal: half of all pairs.
    attention = shape.num_layers * shape.num_heads * shape.head_dim * context_tokens
    epochs = profile.trainer.ppo_epochs
    operations = FLOPS_PER_VALUE * num_models * epochs * tokens * (shape.parameters + attention)
    files += FILE_BYTES * sum(teachers)
    operations += FORWARD_FLOPS_PER_VALUE * tokens * max(teachers, default=0)  # each prompt has one
    threads = profile.placement.cpus_per_worker if plan.device == "cpu" else 1
    rate = SLOW_FLOPS[plan.device, profile.model.dtype] * threads
    slowly = f"at {SLOW_DISK_BYTES_PER_S / 10**6:.0f} MB/s"
    on = f"on {plan.trainer_workers} x {rate / 1e12:g} TFLOP/s"
    work = {
        START_KEY: (files / SLOW_DISK_BYTES_PER_S, f"{files / GB:,.1f} GB of weights {slowly}"),
        STEP_KEY: (operations / plan.trainer_workers / rate, f"at most {tokens:,} tokens per step {on}"),
        CHECKPOINT_KEY: (
            state / SLOW_DISK_BYTES_PER_S,
            f"{state / GB:,.1f} GB of weights and moments {slowly}",
        ),
    }
    limits = dict[str, tuple[str | float, str]]()
    for key, (work_s, why) in work.items():
        if is_default(loaded.origins.get(key, "")):
            limits[key] = float(10 * round((least[key] + work_s) / 10)), why  # in tens of seconds
    warnings, size = [*loaded.warnings], f"{shape.parameters:,} parameters"
    if not profile.model.path.startswith("builtin:"):
        lr, given = usual_lr(profile, shape.parameters), profile.trainer.lr
        if is_default(loaded.origins.get(LR_KEY, "")):
            if not is_resumed:  # which may have begun with the default of an earlier release
                limits[LR_KEY] = lr, f"{size}, {'with' if profile.lora.rank else 'without'} LoRA"
        elif given > RUINOUS_LR_RATIO * lr:
            ruin = f"can ruin a pretrained model of {size} within a few steps"
            warnings.append(f"{LR_KEY} = {given:g} {ruin}: without the key it would be {lr:g}")
    return replace(_with_defaults(loaded, limits), warnings=tuple(warnings))


def _with_defaults(loaded: Loaded, defaults: Mapping[str, tuple[str | float, str]]) -> Loaded:
    """With values, and what they follow from, by dotted key."""
    profile = with_values(loaded.profile, {key: value for key, (value, _) in defaults.items()})
    origins = {key: f"{DEFAULT} for {why}" for key, (_, why) in defaults.items()}
    return replace(loaded, profile=profile, origins={**loaded.origins, **origins})
