"""How much memory a job's processes need: an estimate from the profile and the model's config.json, before
anything starts.

P parameters, e bytes per value of `model.dtype`, r trainer ranks:

    trainer rank   always   float32 master weights 4P/r, AdamW's two moments 8P/r
                   step     what FSDP2 gathers (GPU: root group and two layers; CPU: all of it), gradients not yet reduced (GPU: the
                            root group's; CPU: all, in float32), on GPUs float32 gradients 4P/r, what the layers keep of one
                            microbatch, and a chunk of its logits with the head's gradient, or one layer that is computed again
                   update   on CPUs float32 gradients 4P/r, which replace the whole ones; with trainer.offload_optimizer, on GPUs,
                            the gradients and a slice of the moments (which are on the host otherwise)
                   host     the window's first weights 4P/r (recompute, K > 1), a checkpoint's copy; rank 0: published buckets
    reference      always   float32 weights 4P/r of its own P (algorithm.use_kl_loss, use_kl_in_reward)
    ref, prox      always   apart (placement.tasks): 4P/r by their own r; prox receives eP at a sync
    reward         always   eP of its own P in each process
    critic         always   weights and moments 12P/r of its own P, without the language model's head. Its step takes turns with the
                            policy's and has no logits: it is not counted; apart (placement.tasks) as a rank's, by its own r
                   host     a checkpoint's copy
    rollout worker always   weights eP, KV cache of all slots at full length
                   step     a prefill's activations, the logits that are sampled from
                   host     the second buffer eP: a version that waits to be loaded; none with weights.dual_buffer = false
    with vLLM      always   a cache of a configured size, or of what its share of the device leaves (engines/vllm/launch.py)
                   host     its own processes

    wire buffers            of nccl and ipc, on the GPUs at both ends; w = weights.load_bucket_size_mb, m the largest tensor:
                            nccl 3 (w + m) at rank 0 during training, 2 (w + m) in each process of vLLM; ipc max(w, m) at both

A microbatch's tokens are counted per rank: trainer.sequence_parallel_size ranks divide a longer trajectory
between them. It has no more than its rank's part of an optimizer step: B * n trajectories of the greatest
length, without forks. With LoRA (`lora.rank`) moments, gradients, the window's first weights and a
checkpoint's copy are those of the adapters alone.

A process's peak is what it always holds plus its most expensive phase. Not counted: Python, torch and a GPU's
context (about 1 GiB per process), and fragmentation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from asyncrl_cli.engines.port import EngineMemory, kind_of
from asyncrl_cli.engines.transformers import CACHE_SHARE_OF_MEMORY, PAGE_TOKENS, PREFILL_TOKENS_PACKED
from asyncrl_cli.models.shape import FAMILY, ModelShape, shape_of
from asyncrl_cli.plan.cluster import cache_bytes_left
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan
from asyncrl_cli.profile.arithmetic import max_context_tokens
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, ActivationCheckpointing, Profile
from asyncrl_cli.profile.sharing import CRITIC, PROX, REF, REWARD, is_apart
from asyncrl_cli.train import LOGITS_CHUNK_ELEMENTS, LOGITS_COPIES, MOMENTS_SLICE_BYTES, keeps_whole_gradients

MASTER_BYTES = 4
BYTES_OF = {"float32": 4, "bfloat16": 2}
BYTES_PER_MB = 2**20
SAMPLED_LOGIT_BYTES = 24
"""Per value: float32 logits, log-softmax, probabilities and choice, and the float64 running sum of the
sampler."""

PAYLOAD_BYTES = 256 * 2**20
"""Shared memory of a local session for the payloads in flight."""
SHARED_CACHE = "engine's cache"
"""Item name of a cache that takes whatever its engine's share of the device leaves."""

Phase = Literal["always", "start", "step", "update", "sync"]
Place = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Something that each of a role's `processes` holds in memory, where and when. On CPUs the device is the
    host's memory, too."""

    role: str
    processes: int
    place: Place
    phase: Phase
    what: str
    num_bytes: int
    how: str

    @property
    def total_bytes(self) -> int:
        return self.processes * self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The memory items of a job. For a tensor-parallel rollout worker, `device` items are those of one of its
    GPUs.

    `available_bytes`: of one device, if known. `engine`: set for an engine that manages its memory itself.
    """

    profile: Profile
    plan: JobPlan
    shape: ModelShape
    available_bytes: int | None
    engine: EngineMemory | None
    items: tuple[MemoryItem, ...]

    def of(self, role: str, place: Place) -> list[MemoryItem]:
        return [item for item in self.items if (item.role, item.place) == (role, place)]

    def peak_bytes(self, role: str, place: Place) -> int:
        """The peak of the process that holds the most: what it always holds plus its most expensive phase."""
        phases: Counter[str] = Counter()
        for item in self.of(role, place):
            phases[item.phase] += item.num_bytes
        return phases.pop("always", 0) + max(phases.values(), default=0)

    def at_peak(self, role: str) -> list[MemoryItem]:
        """The items that coincide at the peak of all the role's processes, if these share one machine's
        memory."""
        phases: Counter[str] = Counter()
        items = [*self.of(role, "device"), *self.of(role, "host")]
        for item in items:
            phases[item.phase] += item.total_bytes
        del phases["always"]
        return [
            item
            for item in items
            if item.phase in ("always", max(phases, key=phases.__getitem__, default=""))
        ]

    def always_bytes(self, role: str) -> int:
        """What one process holds on its device in every phase."""
        return sum(item.num_bytes for item in self.of(role, "device") if item.phase == "always")


def estimate_memory(
    profile: Profile, plan: JobPlan, shape: ModelShape, available_bytes: int | None = None
) -> MemoryEstimate:
    engine = kind_of(profile).memory(profile, plan.device)
    trainer = (
        *_trainer_device(profile, plan, shape, available_bytes),
        *_trainer_host(profile, plan, shape),
        *_further(profile, plan, shape, available_bytes),
    )
    # A colocated rank's weights and moments stay where they are while its GPU generates.
    stays = sum(
        item.num_bytes
        for item in trainer
        if (item.role, item.place, item.phase) == (TRAINER, "device", "always")
    )
    left_bytes = None if available_bytes is None else available_bytes - (stays if plan.colocate else 0)
    items = (
        *trainer,
        *_rollout(profile, plan, shape, engine, left_bytes if engine is None else available_bytes),
    )
    return MemoryEstimate(
        profile=profile,
        plan=plan,
        shape=shape,
        available_bytes=available_bytes,
        engine=engine,
        items=tuple(item for item in items if item.num_bytes),
    )


def activation_bytes_per_token(shape: ModelShape, value_bytes: int) -> int:
    """Bytes that autograd keeps per token and layer of a llama-like model: the residual stream is normalized
    in float32, attention is fused (no scores are kept), rotations keep nothing."""
    h, i, e = shape.hidden_size, shape.intermediate_size, value_bytes
    a, j = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    normalized = 2 * h + (a + j if shape.has_qk_norm else 0)
    norms = normalized * (MASTER_BYTES + e) + 2 * h * e
    attention = (2 * a + 2 * j) * e + shape.num_heads * MASTER_BYTES
    return norms + attention + 4 * i * e


def kept_bytes_per_token(shape: ModelShape, value_bytes: int, recompute: ActivationCheckpointing) -> int:
    """The part of `activation_bytes_per_token` that a layer keeps until its backward pass: its input, and if
    `selective` the outputs of matrix products and attention."""
    if recompute == "none":
        return activation_bytes_per_token(shape, value_bytes)
    h, a, j = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    products = (
        2 * a + 2 * j + 2 * shape.intermediate_size + 2 * h
    ) * value_bytes + shape.num_heads * MASTER_BYTES
    return h * value_bytes + (products if recompute == "selective" else 0)


def kv_cache_bytes(profile: Profile, shape: ModelShape) -> int:
    """Bytes for all slots of one worker at full length, in whole pages, as the engine allocates them."""
    pages = profile.rollout.slots * -(-max_context_tokens(profile) // PAGE_TOKENS)
    return pages * PAGE_TOKENS * shape.kv_values_per_token * BYTES_OF[profile.model.dtype]


def _trainer_device(
    profile: Profile, plan: JobPlan, shape: ModelShape, available_bytes: int | None
) -> Iterator[MemoryItem]:
    ranks, adapters = plan.role(TRAINER).workers, adapter_parameters(profile, shape)
    sharing = profile.trainer.sequence_parallel_size
    yield from _trained(
        TRAINER,
        ranks,
        profile,
        plan,
        shape,
        available_bytes,
        adapters=adapters,
        sharing=sharing,
        has_logits=True,
    )
    yield from _wires(profile, shape, TRAINER, 1)


def _trained(
    role: str,
    ranks: int,
    profile: Profile,
    plan: JobPlan,
    shape: ModelShape,
    available_bytes: int | None,
    *,
    adapters: int = 0,
    sharing: int = 1,
    has_logits: bool = False,
) -> Iterator[MemoryItem]:
    """A model in training on the devices of `ranks` processes, `sharing` of which divide a sequence."""
    e, shard, longest = (
        BYTES_OF[profile.model.dtype],
        -(-shape.parameters // ranks),
        max_context_tokens(profile),
    )
    trained = -(-adapters // ranks) if adapters else shard
    # of an optimizer step, on each rank
    rows = -(-profile.trainer.ppo_mini_batch_size * profile.rollout.n * sharing // ranks)
    row_tokens = -(-(longest - 1) // sharing)  # one that is longer than a microbatch has its own
    tokens = max(min(profile.trainer.max_tokens_per_microbatch, rows * row_tokens), row_tokens)
    over = f"shared by {ranks} rank{'s' if ranks > 1 else ''}"
    recompute = profile.trainer.activation_checkpointing
    kept = tokens * shape.num_layers * kept_bytes_per_token(shape, e, recompute)
    item = partial(MemoryItem, role, ranks, "device")
    yield item("always", "parameters", MASTER_BYTES * shard, f"float32 master weights, {over}")
    lora = f"LoRA of rank {profile.lora.rank}, float32, {over}"
    yield item("always", "adapters", MASTER_BYTES * trained if adapters else 0, lora)
    if is_offloaded(profile, plan):
        largest = -(-2 * MASTER_BYTES * shape.vocab_size * shape.hidden_size // ranks)
        moments = min(2 * MASTER_BYTES * trained, max(MOMENTS_SLICE_BYTES, largest))
        yield item(
            "update",
            "optimizer's step",
            MASTER_BYTES * trained + moments,
            "the gradients, and a slice of AdamW's two moments",
        )
    else:
        yield item("always", "optimizer", 2 * MASTER_BYTES * trained, f"AdamW's two moments, float32, {over}")
    # On CPUs the whole gradients stay until the last backward pass, and are then replaced group by group.
    yield item(
        "update" if plan.device == "cpu" else "step", "gradients", MASTER_BYTES * trained, f"float32, {over}"
    )
    yield item("step", "gathered", *_gathered(plan, shape, profile.model.dtype))
    yield item("step", "whole gradients", *_whole_gradients(profile, plan, shape, adapters, available_bytes))
    yield item(
        "step",
        "activations",
        kept,
        f"{tokens} tokens of a microbatch; trainer.activation_checkpointing = {recompute}",
    )
    logits, how = _logits(tokens, shape, e, plan.device, trains_head=not adapters) if has_logits else (0, "")
    again = 0 if recompute == "none" else tokens * activation_bytes_per_token(shape, e)
    if logits >= again:  # the head's backward pass comes before the layers'
        yield item("step", "logits", logits, how)
    else:
        yield item(
            "step", "recomputed layer", again, f"{tokens} tokens in one layer, while its backward pass runs"
        )


def _logits(
    tokens: int, shape: ModelShape, value_bytes: int, device: str, *, trains_head: bool
) -> tuple[int, str]:
    """Logits of a chunk, and the head's gradient: that of one chunk and, if there are several, their float32
    sum."""
    head, values = shape.vocab_size * shape.hidden_size * trains_head, tokens * shape.vocab_size
    chunk_values = LOGITS_CHUNK_ELEMENTS[device]
    if values <= chunk_values:
        return LOGITS_COPIES * MASTER_BYTES * values + value_bytes * head, (
            f"{tokens} tokens * {shape.vocab_size} of vocabulary"
        )
    copies = LOGITS_COPIES * MASTER_BYTES * chunk_values
    chunk = f"{chunk_values // shape.vocab_size} tokens * {shape.vocab_size} of vocabulary"
    return copies + (MASTER_BYTES + value_bytes) * head, (
        f"{chunk} at a time{', and the gradient of the head' * trains_head}"
    )


def _gathered(plan: JobPlan, shape: ModelShape, dtype: str) -> tuple[int, str]:
    """Whole parameters that FSDP2 holds beside the shards. On CPUs they stay for an optimizer step
    (train/sharded_model.py)."""
    if plan.device == "cpu":
        return BYTES_OF[dtype] * shape.parameters, (
            f"{dtype}: all parameters whole, for an optimizer step (FSDP2)"
        )
    held = shape.root_parameters + 2 * shape.layer_parameters
    return BYTES_OF[dtype] * held, f"{dtype}: embedding, head and two layers whole (FSDP2)"


def is_offloaded(profile: Profile, plan: JobPlan) -> bool:
    """Whether AdamW's moments wait on the host between optimizer steps."""
    return profile.trainer.offload_optimizer and plan.device != "cpu"


def adapter_parameters(profile: Profile, shape: ModelShape) -> int:
    """Parameters of LoRA's adapters, on the linear layers of the llama family; 0 without LoRA."""
    h, i = shape.hidden_size, shape.intermediate_size
    a, j = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = {"q_proj": h + a, "k_proj": h + j, "v_proj": h + j, "o_proj": a + h}
    sides = attention | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), h + i)
    chosen = profile.lora.target_modules or sides
    return shape.num_layers * profile.lora.rank * sum(sides.get(name, 2 * h) for name in chosen)


def _whole_gradients(
    profile: Profile, plan: JobPlan, shape: ModelShape, adapters: int, available_bytes: int | None
) -> tuple[int, str]:
    value_bytes, ranks = BYTES_OF[profile.model.dtype], plan.role(TRAINER).workers
    trained = adapters or shape.parameters
    sums_once = plan.device == "cpu" or keeps_whole_gradients(
        profile.trainer.whole_gradients, ranks=ranks, parameters=trained, device_bytes=available_bytes
    )
    if adapters:
        return MASTER_BYTES * adapters * sums_once, "float32, of the adapters, until the last microbatch"
    if sums_once:
        # The sum is float32; with a smaller dtype, the gradients of the current backward pass come on top
        # until they are added.
        fresh = (
            0
            if value_bytes == MASTER_BYTES
            else value_bytes * max(shape.root_parameters, shape.layer_parameters)
        )
        return MASTER_BYTES * shape.parameters + fresh, (
            "float32, of all parameters, until the last microbatch"
        )
    return (value_bytes + MASTER_BYTES) * shape.root_parameters, "of embedding and head, not yet reduced"


def published_parameters(profile: Profile, shape: ModelShape) -> int:
    """How many values a version has on its way to the workers."""
    return adapter_parameters(profile, shape) if profile.lora.sync == "adapter" else shape.parameters


def object_store_bytes(profile: Profile, parameters: int) -> int:
    """Size of a local session's object store: the payloads in flight and, if versions of so many parameters
    travel through it, two of them."""
    versions = (
        2 * BYTES_OF[profile.model.dtype] * parameters if profile.weights.transport == "object-store" else 0
    )
    return PAYLOAD_BYTES + versions


def _trainer_host(profile: Profile, plan: JobPlan, shape: ModelShape) -> Iterator[MemoryItem]:
    ranks, e, bucket_mb = (
        plan.role(TRAINER).workers,
        BYTES_OF[profile.model.dtype],
        profile.weights.gather_bucket_size_mb,
    )
    trained = -(-(adapter_parameters(profile, shape) or shape.parameters) // ranks)
    recomputes = profile.algorithm.old_logprobs == "recompute" and not is_apart(profile, PROX)
    keeps_first = recomputes and profile.async_training.trigger_parameter_sync_step > 1
    holders = {
        "disk": "; the run's directory holds as much again",
        "object-store": "; Ray's object store holds as much again",
    }
    buckets = -(-e * shape.parameters // (bucket_mb * BYTES_PER_MB))
    published = (
        f"rank 0: {buckets} gather bucket{'s' if buckets > 1 else ''} at most {bucket_mb} MB each, "
        f"new and previous version{holders.get(profile.weights.transport, '')}"
    )
    item = partial(MemoryItem, TRAINER, ranks, "host")
    yield item("start", "whole model", *_read_whole(shape))
    if is_offloaded(profile, plan):
        yield item(
            "always",
            "optimizer",
            2 * MASTER_BYTES * trained,
            "AdamW's two moments, float32, between optimizer steps",
        )
    if keeps_first:
        yield item(
            "always", "window's first weights", MASTER_BYTES * trained, "float32, for the old-logprob pass"
        )
    yield MemoryItem(TRAINER, 1, "host", "sync", "published weights", 2 * e * shape.parameters, published)
    yield item(
        "sync",
        "checkpoint",
        (4 if keeps_first else 3) * MASTER_BYTES * trained,
        "the snapshot that is being written",
    )


def _read_whole(shape: ModelShape) -> tuple[int, str]:
    """The whole model, as a rank may have to read it. If the files have the same tensors as memory, it reads
    only its own rows."""
    num_bytes = 0 if shape.model_type in FAMILY else MASTER_BYTES * shape.parameters
    return num_bytes, f"float32, if {shape.model_type} joins tensors of its files"


def _further(
    profile: Profile, plan: JobPlan, policy: ModelShape, available_bytes: int | None
) -> Iterator[MemoryItem]:
    """The reference and the critic, divided between the ranks as the policy is, and the models of scorers
    with their own processes. Raises ShapeUnknown if the path of one of them is not known here."""
    ranks, algorithm = plan.role(TRAINER).workers, profile.algorithm
    item = partial(MemoryItem, TRAINER, ranks)
    if algorithm.has_reference and REF not in plan.scorers:
        shape = shape_of(profile.ref.path) if profile.ref.path else policy
        yield item(
            "device",
            "always",
            "reference",
            MASTER_BYTES * -(-shape.parameters // ranks),
            "float32 weights, never trained",
        )
    for task, processes in plan.scorers.items():
        yield from _scorer(profile, plan, policy, task, processes, available_bytes)
    if algorithm.has_critic and CRITIC not in plan.scorers:
        shape = _critic_shape(profile, policy)
        shard = -(-shape.parameters // ranks)
        yield item("device", "always", "critic", MASTER_BYTES * shard, "float32 master weights")
        where: Place = "host" if is_offloaded(profile, plan) else "device"
        yield item(
            where, "always", "critic's optimizer", 2 * MASTER_BYTES * shard, "AdamW's two moments, float32"
        )
        yield item("host", "start", "whole critic", *_read_whole(shape))
        yield item(
            "host",
            "sync",
            "critic's checkpoint",
            3 * MASTER_BYTES * shard,
            "the snapshot that is being written",
        )


def _critic_shape(profile: Profile, policy: ModelShape) -> ModelShape:
    """The critic's shape. Its own head replaces the language model's and takes next to no memory."""
    shape = shape_of(profile.critic.path) if profile.critic.path else policy
    embedding = shape.vocab_size * shape.hidden_size
    head = embedding if shape.root_parameters > 2 * embedding else 0  # else it is tied to the embedding
    return replace(shape, parameters=shape.parameters - head, root_parameters=shape.root_parameters - head)


def _critic_apart(
    profile: Profile, plan: JobPlan, policy: ModelShape, processes: int, available_bytes: int | None
) -> Iterator[MemoryItem]:
    shape, item = _critic_shape(profile, policy), partial(MemoryItem, CRITIC, processes, "host")
    shard = -(-shape.parameters // processes)
    yield from _trained(CRITIC, processes, profile, plan, shape, available_bytes)
    yield item("start", "whole model", *_read_whole(shape))
    if is_offloaded(profile, plan):
        yield item(
            "always",
            "optimizer",
            2 * MASTER_BYTES * shard,
            "AdamW's two moments, float32, between optimizer steps",
        )
    yield item("sync", "checkpoint", 3 * MASTER_BYTES * shard, "the snapshot that is being written")


def _scorer(
    profile: Profile,
    plan: JobPlan,
    policy: ModelShape,
    task: str,
    processes: int,
    available_bytes: int | None,
) -> Iterator[MemoryItem]:
    if task == CRITIC:
        yield from _critic_apart(profile, plan, policy, processes, available_bytes)
        return
    path, dtype = {REF: profile.ref.path, REWARD: profile.reward_model.path}.get(task), profile.model.dtype
    shape, item = shape_of(path) if path else policy, partial(MemoryItem, task, processes)
    if task == REWARD:
        yield item(
            "device",
            "always",
            "reward model",
            BYTES_OF[dtype] * shape.parameters,
            f"{dtype}, whole in each process",
        )
        return
    whose = "of the window's start" if task == PROX else "never trained"
    yield item(
        "device",
        "always",
        "weights",
        MASTER_BYTES * -(-shape.parameters // processes),
        f"float32 weights, {whose}",
    )
    yield item("host", "start", "whole model", *_read_whole(shape))
    yield item("device", "step", "gathered", *_gathered(plan, shape, dtype))
    if task == PROX:
        yield item(
            "host",
            "sync",
            "received version",
            BYTES_OF[dtype] * shape.parameters,
            "until each process has its part of it",
        )


def _wires(profile: Profile, shape: ModelShape, role: str, processes: int) -> Iterator[MemoryItem]:
    """Buffers on a GPU through which a version is transferred. vLLM closes an NCCL buffer with the tensor
    that exceeds its size, so it may be larger by one tensor; rank 0 packs the next buffer while two are being
    sent."""
    transport, wire_mb = profile.weights.transport, profile.weights.load_bucket_size_mb
    if transport not in DIRECT_TRANSPORTS:
        return
    largest = (
        BYTES_OF[profile.model.dtype] * shape.hidden_size * max(shape.vocab_size, shape.intermediate_size)
    )
    wire, how, phase = max(wire_mb * BYTES_PER_MB, largest), f"{wire_mb} MB or the largest tensor", "sync"
    if transport == "nccl":
        buffers, phase, beside = (3, "step", ", beside training") if role == TRAINER else (2, "sync", "")
        wire = buffers * (wire_mb * BYTES_PER_MB + largest)
        how = f"{buffers} of {wire_mb} MB and the largest tensor{beside}"
    yield MemoryItem(
        role, processes, "device", phase, "wire buffers", wire, f"weights.transport = {transport}: {how}"
    )


def _rollout(
    profile: Profile,
    plan: JobPlan,
    shape: ModelShape,
    engine: EngineMemory | None,
    available_bytes: int | None,
) -> Iterator[MemoryItem]:
    rollout, workers, e = profile.rollout, plan.role(ROLLOUT).workers, BYTES_OF[profile.model.dtype]
    gpus = max(plan.gpus_per_rollout_worker, 1) if plan.device == "cuda" else 1
    batch_tokens = (
        engine.batch_tokens
        if engine
        else rollout.slots + max(PREFILL_TOKENS_PACKED, rollout.max_prompt_tokens)
    )
    # Without gradients: a layer's three inner products and its float32 norm, of all tokens of the batch.
    prefill = (
        batch_tokens * (3 * shape.intermediate_size * e + shape.hidden_size * (MASTER_BYTES + 2 * e)) // gpus
    )
    sampled = rollout.slots * shape.vocab_size * SAMPLED_LOGIT_BYTES

    apart = f", shared by {gpus} GPUs" if gpus > 1 else ""
    weights, tokens = e * shape.parameters, max_context_tokens(profile)
    wanted, cached = (
        kv_cache_bytes(profile, shape) // gpus,
        f"{rollout.slots} slots * {tokens} tokens, {profile.model.dtype}{apart}",
    )
    if engine is None and available_bytes is not None and plan.device == "cuda":
        room = max(int((available_bytes - weights // gpus) * CACHE_SHARE_OF_MEMORY), 0)
        if wanted > room:
            wanted, cached = room, f"half of what is free; {cached} would take more"
    cache = ("KV cache", wanted, cached)
    device, host = (partial(MemoryItem, ROLLOUT, workers, place) for place in ("device", "host"))
    yield device("always", "weights", weights // gpus, f"{profile.model.dtype}{apart}")
    if engine:
        yield host("always", engine.name, engine.own_bytes, engine.own_processes)
        cache = _cache(engine, available_bytes, weights // gpus + prefill + sampled) or cache
    yield device("always", *cache)
    yield device("step", "prefill", prefill, f"{batch_tokens} tokens in one pass")
    yield device("step", "sampling", sampled, f"{rollout.slots} slots * {shape.vocab_size} of vocabulary")
    if profile.weights.transport in DIRECT_TRANSPORTS:
        yield from _wires(profile, shape, ROLLOUT, workers)
    elif profile.weights.dual_buffer:
        yield host(
            "sync",
            "load buffer",
            weights,
            "received weights" + (f", which {engine.name}'s processes map" if engine else ""),
        )


def _cache(
    engine: EngineMemory, available_bytes: int | None, other_bytes: int
) -> tuple[str, int, str] | None:
    """The cache's (name, bytes, reason) on one device where the engine holds `other_bytes` besides; None if
    unknown."""
    each = f", in each of {engine.num_caches} processes" if engine.num_caches > 1 else ""
    if engine.cache_bytes is not None:
        return (
            "KV cache",
            engine.num_caches * engine.cache_bytes,
            (f"kv_cache_memory_bytes that {engine.name} is given{each}"),
        )
    if available_bytes is None:
        return None
    left = cache_bytes_left(available_bytes, engine.share, other_bytes)
    how = f"what {engine.name}'s share of {engine.share:g} leaves (rollout.gpu_memory_utilization){each}"
    return SHARED_CACHE, engine.num_caches * left, how
