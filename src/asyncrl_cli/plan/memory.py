"""How much memory a job's processes need: an estimate from the profile and the model's config.json, before
anything starts.

With P parameters and e bytes per value of `model.dtype`, a trained model takes 12P bytes, shared by its
ranks: float32 weights and AdamW's two moments. In a step come gradients 4P, what FSDP2 gathers, what the
layers keep of one microbatch, and a chunk of its logits or one layer that is computed again. A frozen model
takes 4P, shared by its ranks; a rollout worker has eP and a KV cache. With LoRA, moments, gradients and
checkpoints are those of the adapters alone. Every item says how it is computed.

A process's peak is what it always holds plus its most expensive phase. Not counted: a GPU's context (about
1 GiB per process), the driver and Ray (about 1 GiB), and fragmentation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Literal

from asyncrl_cli.base.errors import counted
from asyncrl_cli.engines.port import EngineMemory, cache_bytes_left, kind_of, worker_merges
from asyncrl_cli.engines.transformers import CACHE_SHARE_OF_MEMORY, PAGE_TOKENS, PREFILL_TOKENS_PACKED
from asyncrl_cli.models.shape import BYTES_OF, FAMILY, ModelShape, shape_of
from asyncrl_cli.plan.job_plan import LENT, ROLLOUT, TRAINER, JobPlan
from asyncrl_cli.profile.arithmetic import (
    CRITIC,
    PROX,
    REF,
    REWARD,
    TEACHER,
    max_context_tokens,
    sends_deltas,
    sends_rows,
)
from asyncrl_cli.profile.keys import of_lent
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.train import LOGITS_CHUNK_ELEMENTS, LOGITS_COPIES, MOMENTS_SLICE_BYTES, keeps_whole_gradients

MASTER_BYTES = 4
MIB = 2**20
SAMPLED_LOGIT_BYTES = 24
"""Per value: float32 logits, log-softmax, probabilities and choice, and the sampler's float64 running sum."""
PAYLOAD_BYTES = 256 * MIB
"""Shared memory of a local session for the payloads in flight."""
PROCESS_BYTES = 384 * MIB
"""Of Python, torch and transformers in one process, without shared pages: 0.35 to 0.4 GiB on a CPU."""
CACHE, SHARED_CACHE = "KV cache", "engine's cache"
"""Item names: a cache of a given size, and one that takes what its engine's share of the device leaves."""
PROCESS, WIRE_BUFFERS = "process", "wire buffers"
HOST_MOMENTS = "AdamW's two moments, float32, between optimizer steps"
SNAPSHOT = "the snapshot that is being written"

Phase = Literal["always", "start", "score", "step", "update", "sync"]
REUSED: dict[str, Phase] = {"cpu": "step", "cuda": "sync"}
"""The phase of host memory that is filled again for each version or snapshot (BufferPool in
weights/buckets.py). On CPUs it lies beside a train step."""
MemoryKind = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Something that each of a role's `processes` holds, and when. At rollout workers a smaller
    number is that of each node, for its workers together. On CPUs the device is the host, too."""

    role: str
    processes: int
    kind: MemoryKind
    phase: Phase
    what: str
    num_bytes: int
    how: str

    @property
    def total_bytes(self) -> int:
        return self.processes * self.num_bytes


def peak(
    items: Iterable[MemoryItem], size: Callable[[MemoryItem], int] = lambda item: item.num_bytes
) -> tuple[int, tuple[MemoryItem, ...]]:
    """The bytes of what is always held and of the most expensive phase, and the items that coincide then."""
    items, phases = tuple(items), Counter[str]()
    for item in items:
        phases[item.phase] += size(item)
    always = phases.pop("always", 0)
    worst = max(phases, key=phases.__getitem__, default="always")
    return always + phases[worst], tuple(item for item in items if item.phase in ("always", worst))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The memory items of a job. For a tensor-parallel rollout worker, `device` items are those of one of its
    GPUs. `available_bytes`: of one device, if known. `engine`: set if the engine manages its memory itself.
    """

    profile: Profile
    plan: JobPlan
    shape: ModelShape
    available_bytes: int | None
    engine: EngineMemory | None
    items: tuple[MemoryItem, ...] = ()

    def of(self, role: str, kind: MemoryKind) -> list[MemoryItem]:
        return [item for item in self.items if (item.role, item.kind) == (role, kind)]

    def always_bytes(self, role: str) -> int:
        """What one process holds on its device in every phase."""
        return sum(item.num_bytes for item in self.of(role, "device") if item.phase == "always")

    @property
    def rollout_weights(self) -> MemoryItem:
        return next(item for item in self.of(ROLLOUT, "device") if item.what == "weights")

    @property
    def value_bytes(self) -> int:
        return BYTES_OF[self.profile.model.dtype]

    @property
    def is_offloaded(self) -> bool:
        """Whether AdamW's moments wait on the host between optimizer steps."""
        return self.profile.trainer.offload_optimizer and self.plan.device != "cpu"

    @property
    def is_sent_by_rows(self) -> bool:
        """Whether each trainer rank holds its rows of a version. If not, rank 0 is taken to hold all of it,
        even where it gathers only joined experts, or what adapters are merged into."""
        is_merged = self.profile.lora.rank and self.profile.lora.sync == "merged"
        return sends_rows(self.profile) and self.shape.model_type in FAMILY and not is_merged

    @property
    def store_bytes(self) -> int:
        """Size of a local session's object store."""
        return object_store_bytes(self.profile, published_bytes(self.profile, self.shape))


def estimate_memory(
    profile: Profile, plan: JobPlan, shape: ModelShape, available_bytes: int | None = None
) -> MemoryEstimate:
    """Raises ShapeUnknown if the path of a reference, teacher, critic or reward model is not known here."""
    engine, known = kind_of(profile).memory(profile, plan.device), available_bytes
    job = MemoryEstimate(profile=profile, plan=plan, shape=shape, available_bytes=known, engine=engine)
    trainer = replace(job, items=tuple(_trainer(job)))
    left_bytes = available_bytes
    if left_bytes is not None and plan.colocate and engine is None:
        # A colocated rank's weights and moments stay where they are while its GPU generates.
        left_bytes -= trainer.always_bytes(TRAINER)
    items = (*trainer.items, *_scorers(job), *_rollout(job, left_bytes))
    if plan.lend:
        one = replace(plan, gpus_per_rollout_worker=min(plan.gpus_per_rollout_worker, 1))
        lent = replace(job, plan=one, engine=kind_of(profile).memory(of_lent(profile), plan.device))
        left_bytes = available_bytes and available_bytes - trainer.always_bytes(TRAINER)
        items += tuple(_rollout(lent, left_bytes if lent.engine is None else available_bytes, LENT))
    what = "Python, torch and transformers"
    items += tuple(
        MemoryItem(role.role, role.workers, "host", "always", PROCESS, PROCESS_BYTES, what)
        for role in plan.roles
    )
    order = [role.role for role in plan.roles]
    held = (item for item in items if item.num_bytes)
    return replace(job, items=tuple(sorted(held, key=lambda item: order.index(item.role))))


def activation_bytes_per_token(shape: ModelShape, value_bytes: int) -> int:
    """Bytes that autograd keeps per token and layer of a llama-like model: the residual stream is normalized
    in float32, attention is fused (no scores are kept), rotations keep nothing."""
    h, i, e = shape.hidden_size, shape.intermediate_size, value_bytes
    a, j = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    normalized = 2 * h + (a + j if shape.has_qk_norm else 0)
    norms = normalized * (MASTER_BYTES + e) + 2 * h * e
    attention = (2 * a + 2 * j) * e + shape.num_heads * MASTER_BYTES
    return norms + attention + 4 * i * e


def kv_cache_bytes(profile: Profile, shape: ModelShape) -> int:
    """Bytes for all slots of one worker at full length, in whole pages, as the engine allocates them."""
    pages = profile.rollout.slots * ceil(max_context_tokens(profile) / PAGE_TOKENS)
    return pages * PAGE_TOKENS * shape.kv_values_per_token * BYTES_OF[profile.model.dtype]


def adapter_parameters(profile: Profile, shape: ModelShape) -> int:
    """Parameters of LoRA's adapters, on the linear layers of the llama family; 0 without LoRA."""
    h, i = shape.hidden_size, shape.intermediate_size
    a, j = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sides = {"q_proj": h + a, "k_proj": h + j, "v_proj": h + j, "o_proj": a + h}
    sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), h + i)
    chosen = profile.lora.target_modules or sides
    return shape.num_layers * profile.lora.rank * sum(sides.get(name, 2 * h) for name in chosen)


def published_bytes(profile: Profile, shape: ModelShape) -> int:
    """Size of a version on its way to the workers: adapters are float32."""
    if profile.lora.sync == "adapter":
        return MASTER_BYTES * adapter_parameters(profile, shape)
    return BYTES_OF[profile.model.dtype] * shape.parameters


def object_store_bytes(profile: Profile, version_bytes: int) -> int:
    """Size of a local session's object store: the payloads in flight and, if versions of that size travel
    through it, two of them, and a third for their deltas."""
    versions = (3 if sends_deltas(profile) else 2) * version_bytes
    return PAYLOAD_BYTES + (versions if profile.weights.transport == "object-store" else 0)


def _trainer(job: MemoryEstimate) -> Iterator[MemoryItem]:
    """The policy in training, its published versions, and the models that share the trainer's processes."""
    profile, ranks = job.profile, job.plan.role(TRAINER).workers
    device, host = (partial(MemoryItem, TRAINER, ranks, kind) for kind in ("device", "host"))
    recomputes = profile.algorithm.old_logprobs == "recompute" and PROX not in job.plan.scorers
    keeps_first = recomputes and profile.async_training.trigger_parameter_sync_step > 1
    adapters = adapter_parameters(profile, job.shape)
    yield from _trained(job, TRAINER, ranks, job.shape, adapters=adapters, num_states=4 if keeps_first else 3)
    yield from _wires(job, TRAINER, 1)
    if keeps_first:
        first = MASTER_BYTES * ceil((adapters or job.shape.parameters) / ranks)
        yield host("always", "window's first weights", first, "float32, for the old-logprob pass")
    bucket_mb = profile.weights.gather_bucket_size_mb
    holders = {"disk": "; the run's directory", "directory": "; weights.url"}
    holders |= {"object-store": "; Ray's object store"}
    holder = holders.get(profile.weights.transport, "")
    held = 3 if sends_deltas(profile) else 2
    which = "new version and two that deltas may start from" if held == 3 else "new and previous version"
    who, senders = ("each rank's rows", ranks) if job.is_sent_by_rows else ("rank 0", 1)
    version = ceil(published_bytes(profile, job.shape) / senders)
    buckets = counted(ceil(version / (bucket_mb * MIB)), "gather bucket")
    how = f"{who}: {buckets} at most {bucket_mb} MB each, {which}"
    how += f"{holder} holds as much again" if holder else ""
    phase = REUSED[job.plan.device]
    yield MemoryItem(TRAINER, senders, "host", phase, "published weights", held * version, how)
    if profile.algorithm.has_reference and REF not in job.plan.scorers:
        shape = shape_of(profile.ref.path) if profile.ref.path else job.shape
        shard = MASTER_BYTES * ceil(shape.parameters / ranks)
        yield device("always", "reference", shard, "float32 weights, never trained")
    if TEACHER not in job.plan.scorers:
        yield from _teachers(job, TRAINER, ranks)
    if profile.algorithm.has_critic and CRITIC not in job.plan.scorers:
        # Its step takes turns with the policy's and has no logits: it is never the most expensive.
        shape = _critic_shape(job)
        shard = MASTER_BYTES * ceil(shape.parameters / ranks)
        yield device("always", "critic", shard, "float32 master weights")
        moments = host if job.is_offloaded else device
        yield moments("always", "critic's optimizer", 2 * shard, "AdamW's two moments, float32")
        yield host("start", "whole critic", *_read_whole(shape))
        yield host(REUSED[job.plan.device], "critic's checkpoint", 3 * shard, SNAPSHOT)


def _teachers(job: MemoryEstimate, role: str, processes: int) -> Iterator[MemoryItem]:
    """All teachers, sharded over these processes. One at a time scores: its parameters are gathered."""
    device, host = (partial(MemoryItem, role, processes, kind) for kind in ("device", "host"))
    shapes = {name: shape_of(path) for name, path in job.profile.teacher.paths.items()}
    for name, shape in shapes.items():
        what = f"teacher {name}".rstrip()
        shard = MASTER_BYTES * ceil(shape.parameters / processes)
        yield device("always", what, shard, "float32 weights, never trained")
        yield host("start", f"whole {what}", *_read_whole(shape))
    if shapes:
        num_bytes, how = max(_gathered(job, shape) for shape in shapes.values())
        yield device("score", "gathered teacher", num_bytes, how)
    if shapes and job.profile.algorithm.distill_loss == "full":
        values = job.profile.trainer.max_tokens_per_microbatch * job.shape.vocab_size
        how = f"at most {job.profile.trainer.max_tokens_per_microbatch} tokens * {job.shape.vocab_size}"
        yield device("step", "teacher's distributions", 3 * MASTER_BYTES * values, f"{how} of vocabulary")


def _trained(
    job: MemoryEstimate, role: str, ranks: int, shape: ModelShape, *, adapters: int = 0, num_states: int = 3
) -> Iterator[MemoryItem]:
    """A model in training on `ranks` processes. A checkpoint has `num_states` values per parameter."""
    trainer, e, on_cpus = job.profile.trainer, job.value_bytes, job.plan.device == "cpu"
    device, host = (partial(MemoryItem, role, ranks, kind) for kind in ("device", "host"))
    over = f"shared by {counted(ranks, 'rank')}"
    shard = MASTER_BYTES * ceil(shape.parameters / ranks)
    state = MASTER_BYTES * ceil(adapters / ranks) if adapters else shard
    yield device("always", "parameters", shard, f"float32 master weights, {over}")
    if adapters:
        yield device("always", "adapters", state, f"LoRA of rank {job.profile.lora.rank}, float32, {over}")
    if job.is_offloaded:
        largest = ceil(2 * MASTER_BYTES * shape.vocab_size * shape.hidden_size / ranks)
        moments = min(2 * state, max(MOMENTS_SLICE_BYTES, largest))
        what = "the gradients, and a slice of AdamW's two moments"
        yield device("update", "optimizer's step", state + moments, what)
        yield host("always", "optimizer", 2 * state, HOST_MOMENTS)
    else:
        yield device("always", "optimizer", 2 * state, f"AdamW's two moments, float32, {over}")
    # On CPUs the whole gradients stay until the last backward pass, and are then replaced group by group.
    yield device("update" if on_cpus else "step", "gradients", state, f"float32, {over}")
    yield device("step", "gathered", *_gathered(job, shape))
    sums_once = on_cpus or keeps_whole_gradients(
        trainer.whole_gradients,
        ranks=ranks,
        parameters=adapters or shape.parameters,
        device_bytes=job.available_bytes,
    )
    if adapters:
        whole = MASTER_BYTES * adapters * sums_once
        how = "float32, of the adapters, until the last microbatch"
    elif sums_once:
        # The sum is float32. With a smaller dtype, the gradients of the current backward pass come on top
        # until they are added.
        fresh = e * max(shape.root_parameters, shape.layer_parameters) if e < MASTER_BYTES else 0
        whole = MASTER_BYTES * shape.parameters + fresh
        how = "float32, of all parameters, until the last microbatch"
    else:
        whole, how = (e + MASTER_BYTES) * shape.root_parameters, "of embedding and head, not yet reduced"
    yield device("step", "whole gradients", whole, how)
    yield from _microbatch(job, device, ranks, shape, is_policy=role == TRAINER, trains_head=not adapters)
    yield host("start", "whole model", *_read_whole(shape))
    yield host(REUSED[job.plan.device], "checkpoint", num_states * state, SNAPSHOT)


def _microbatch(
    job: MemoryEstimate,
    device: Callable[..., MemoryItem],
    ranks: int,
    shape: ModelShape,
    *,
    is_policy: bool,
    trains_head: bool,
) -> Iterator[MemoryItem]:
    """Activations and logits of one microbatch. A critic has no logits, and its ranks divide no sequence.

    Not counted: the hidden states of sampled tokens that share a position, because only responses that begin
    with the same tokens have them. They are bounded (train/prefix_trees.py).
    """
    trainer, e = job.profile.trainer, job.value_bytes
    # A rank has no more than its part of an optimizer step: B * n trajectories of the greatest length, each
    # divided by `sharing` ranks, without forks. One that is longer than a microbatch has its own.
    sharing = trainer.sequence_parallel_size if is_policy else 1
    rows = ceil(trainer.ppo_mini_batch_size * job.profile.rollout.n * sharing / ranks)
    row_tokens = ceil((max_context_tokens(job.profile) - 1) / sharing)
    tokens = max(min(trainer.max_tokens_per_microbatch, rows * row_tokens), row_tokens)
    recompute, everything = trainer.activation_checkpointing, activation_bytes_per_token(shape, e)
    # What a layer keeps until its backward pass: all, or its input, and if `selective` the outputs of matrix
    # products and attention.
    h, a, j = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    products = (2 * a + 2 * j + 2 * shape.intermediate_size + 2 * h) * e + shape.num_heads * MASTER_BYTES
    each = {"none": everything, "selective": h * e + products, "full": h * e}[recompute]
    how = f"{tokens} tokens of a microbatch; trainer.activation_checkpointing = {recompute}"
    yield device("step", "activations", tokens * shape.num_layers * each, how)
    logits, how = _logits(job, tokens, e if trains_head else 0) if is_policy else (0, "")
    again = 0 if recompute == "none" else tokens * everything
    if logits >= again:  # the head's backward pass comes before the layers'
        yield device("step", "logits", logits, how)
    else:
        how = f"{tokens} tokens in one layer, while its backward pass runs"
        yield device("step", "recomputed layer", again, how)


def _logits(job: MemoryEstimate, tokens: int, gradient_bytes: int) -> tuple[int, str]:
    """Logits of a chunk, and the head's gradient, if it is trained: that of one chunk and, if there are
    several or an entropy bonus, their float32 sum."""
    shape, chunk_values = job.shape, LOGITS_CHUNK_ELEMENTS[job.plan.device]
    values, head = tokens * shape.vocab_size, shape.vocab_size * shape.hidden_size
    value_bytes = LOGITS_COPIES * MASTER_BYTES + job.profile.rollout.trains_kept_tokens  # a mask of booleans
    if values <= chunk_values and not job.profile.algorithm.entropy_coeff:
        logits = value_bytes * values + gradient_bytes * head
        return logits, f"{tokens} tokens * {shape.vocab_size} of vocabulary"
    gradient = (MASTER_BYTES + gradient_bytes) * head if gradient_bytes else 0
    chunk_values = min(values, chunk_values)
    chunk = f"{chunk_values // shape.vocab_size} tokens * {shape.vocab_size} of vocabulary at a time"
    how = f"{chunk}, and the gradient of the head" if gradient else chunk
    return value_bytes * chunk_values + gradient, how


def _gathered(job: MemoryEstimate, shape: ModelShape) -> tuple[int, str]:
    """Whole parameters that FSDP2 holds beside the shards. On CPUs they stay for an optimizer step
    (train/sharded_model.py)."""
    dtype = job.profile.model.dtype
    if job.plan.device == "cpu":
        how = f"{dtype}: all parameters whole, for an optimizer step (FSDP2)"
        return job.value_bytes * shape.parameters, how
    num_bytes = job.value_bytes * (shape.root_parameters + 2 * shape.layer_parameters)
    return num_bytes, f"{dtype}: embedding, head and two layers whole (FSDP2)"


def _read_whole(shape: ModelShape) -> tuple[int, str]:
    """The whole model, as a rank may have to read it. If the files have the same tensors as memory, it reads
    only its own rows."""
    num_bytes = 0 if shape.model_type in FAMILY else MASTER_BYTES * shape.parameters
    return num_bytes, f"float32, if {shape.model_type} joins tensors of its files"


def _critic_shape(job: MemoryEstimate) -> ModelShape:
    """The critic's shape. Its own head replaces the language model's and takes next to no memory."""
    path = job.profile.critic.path
    shape = shape_of(path) if path else job.shape
    embedding = shape.vocab_size * shape.hidden_size
    head = embedding if shape.root_parameters > 2 * embedding else 0  # else it is tied to the embedding
    return replace(shape, parameters=shape.parameters - head, root_parameters=shape.root_parameters - head)


def _scorers(job: MemoryEstimate) -> Iterator[MemoryItem]:
    """The models with processes of their own."""
    profile, dtype = job.profile, job.profile.model.dtype
    paths = {REF: profile.ref.path, REWARD: profile.reward_model.path}
    for task, processes in job.plan.scorers.items():
        if task in profile.task.scorers:  # nobody knows what it needs
            continue
        if task == CRITIC:
            yield from _trained(job, CRITIC, processes, _critic_shape(job))
            continue
        if task == TEACHER:
            yield from _teachers(job, TEACHER, processes)
            continue
        path = paths.get(task)
        shape = shape_of(path) if path else job.shape
        whole = job.value_bytes * shape.parameters
        device, host = (partial(MemoryItem, task, processes, kind) for kind in ("device", "host"))
        if task == REWARD:
            yield device("always", "reward model", whole, f"{dtype}, whole in each process")
            continue
        weights = MASTER_BYTES * ceil(shape.parameters / processes)
        whose = "of the window's start" if task == PROX else "never trained"
        yield device("always", "weights", weights, f"float32 weights, {whose}")
        yield host("start", "whole model", *_read_whole(shape))
        yield device("step", "gathered", *_gathered(job, shape))
        if task == PROX:
            yield host("sync", "received version", whole, "until each process has its part of it")


def _wires(job: MemoryEstimate, role: str, processes: int) -> Iterator[MemoryItem]:
    """Buffers on a GPU through which a version is transferred. vLLM closes an NCCL buffer with the tensor
    that exceeds its size, so it may be larger by one tensor; rank 0 packs the next buffer while two are being
    sent."""
    weights, shape = job.profile.weights, job.shape
    transport, wire_mb = weights.transport, weights.load_bucket_size_mb
    if transport not in DIRECT_TRANSPORTS:
        return
    largest = job.value_bytes * shape.hidden_size * max(shape.vocab_size, shape.intermediate_size)
    phase: Phase = "sync"
    wire, how = max(wire_mb * MIB, largest), f"{wire_mb} MB or the largest tensor"
    if transport == "nccl":
        buffers, phase, beside = (3, "step", ", beside training") if role == TRAINER else (2, "sync", "")
        wire = buffers * (wire_mb * MIB + largest)
        how = f"{buffers} of {wire_mb} MB and the largest tensor{beside}"
    how = f"weights.transport = {transport}: {how}"
    yield MemoryItem(role, processes, "device", phase, WIRE_BUFFERS, wire, how)


def _rollout(job: MemoryEstimate, left_bytes: int | None, role: str = ROLLOUT) -> Iterator[MemoryItem]:
    """A rollout worker. `left_bytes`: what a colocated rank leaves of the device, None if unknown. Adapters
    are within an engine's share, and counted whole; tensor parallelism splits one of their two matrices."""
    if job.plan.servers:  # which have their own
        return
    profile, shape, engine, e = job.profile, job.shape, job.engine, job.value_bytes
    rollout, on_gpus, dtype = profile.rollout, job.plan.device == "cuda", profile.model.dtype
    gpus = max(job.plan.gpus_per_rollout_worker, 1) if on_gpus else 1
    batch_tokens = rollout.slots + max(PREFILL_TOKENS_PACKED, rollout.max_prompt_tokens)
    batch_tokens = engine.batch_tokens if engine else batch_tokens
    # Without gradients: a layer's three inner products and its float32 norm, of all tokens of the batch.
    token_bytes = 3 * shape.intermediate_size * e + shape.hidden_size * (MASTER_BYTES + 2 * e)
    prefill = batch_tokens * token_bytes // gpus
    sampled = rollout.slots * shape.vocab_size * SAMPLED_LOGIT_BYTES
    over = f", shared by {gpus} GPUs" if gpus > 1 else ""
    whole = e * shape.parameters
    weights, cache, name = whole // gpus, kv_cache_bytes(profile, shape) // gpus, CACHE
    merges = worker_merges(of_lent(profile) if role == LENT else profile, job.plan.device)
    adapters = 0
    if profile.lora.sync == "adapter" and not merges:
        rank = (engine and engine.adapter_rank) or profile.lora.rank
        adapters = e * adapter_parameters(profile, shape) * rank // profile.lora.rank
    how = f"{rollout.slots} slots * {max_context_tokens(profile)} tokens, {dtype}{over}"
    each = f", in each of {engine.num_caches} processes" if engine and engine.num_caches > 1 else ""
    if engine and engine.cache_bytes is not None:
        cache = engine.num_caches * engine.cache_bytes
        how = f"kv_cache_memory_bytes that {engine.name} is given{each}"
    elif engine and left_bytes is not None:
        left = cache_bytes_left(left_bytes, engine.share, weights + adapters + prefill + sampled)
        name, cache = SHARED_CACHE, engine.num_caches * left
        how = f"what {engine.name}'s share of {engine.share:g} leaves (rollout.gpu_memory_utilization){each}"
    elif engine is None and left_bytes is not None and not profile.run.deterministic:
        room = max(int((left_bytes - weights) * CACHE_SHARE_OF_MEMORY), 0)
        if cache > room:
            cache, how = room, f"half of what is free; {how} would take more"

    workers = job.plan.role(role).workers
    device, host = (partial(MemoryItem, role, workers, kind) for kind in ("device", "host"))
    yield device("always", "weights", weights, f"{dtype}{over}")
    if engine:
        yield host("always", engine.name, engine.process_bytes, engine.process_names)
    yield device("always", name, cache, how)
    version = published_bytes(profile, shape)
    yield device("always", "adapters", adapters, f"{dtype}, beside the weights")
    yield device("step", "prefill", prefill, f"{batch_tokens} tokens in one pass")
    yield device("step", "sampling", sampled, f"{rollout.slots} slots * {shape.vocab_size} of vocabulary")
    if profile.weights.transport in DIRECT_TRANSPORTS:
        yield from _wires(job, role, workers)
    elif profile.weights.dual_buffer:  # a version that waits to be loaded
        how = f"received weights of a node's workers{f', which {engine.name} maps' if engine else ''}"
        # One worker may still wait with the version before, which with deltas is counted as their base.
        is_alone = profile.weights.mode == "sync" or (sends_deltas(profile) and not merges)
        buffers = 1 if is_alone else min(2, workers)
        how += "; two, while one of them still drains for the version before" if buffers == 2 else ""
        waits = whole if merges else version
        yield MemoryItem(role, buffers, "host", "sync", "load buffer", waits, how)
    if sends_deltas(profile):
        how = "the newest version, of a node's workers; the next one's are applied to it"
        yield MemoryItem(role, 1, "host", "always", "base of deltas", version, how)
