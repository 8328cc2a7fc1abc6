"""The keys of `[rollout]`, `[env]`, `[async_training]` and `[weights]`: who generates, within which limits, how far ahead, and how
new weights get there."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

from pydantic import Field

from asyncrl_cli.profile.fields import (
    Eta,
    NonNegativeInt,
    Params,
    PositiveFloat,
    PositiveInt,
    Processes,
    Section,
    Share,
    Strings,
)


class RolloutSection(Section):
    """Rollout workers and sampling."""

    engine: str = "transformers"
    """The inference engine in each rollout worker: `transformers`, `vllm`, or one that an installed package adds."""
    workers: Processes | None = None
    """Rollout workers; if not given, what `placement` yields (1 on a CPU)."""
    nnodes: Processes | None = None
    """Nodes of the rollout workers; 1 if not given."""
    n_gpus_per_node: Processes | None = None
    """GPUs of rollout workers on each of their nodes, in place of rollout.workers or a ratio."""
    slots: PositiveInt = 64
    """Sequences that one worker generates at once."""
    n: Processes = 8
    """Trajectories per prompt: the size of a group. One is enough for `gae` and `reinforce_plus_plus`."""
    placement: Literal["response", "group"] = "response"
    """response: each response of a group goes to the worker with the newest weights and the most room, so that a group may run on
    several workers at once; group: all of a group's responses run on one worker."""
    prefetch_groups: NonNegativeInt = 0
    """Groups admitted beyond the free slots, to wait in the engines' queues."""
    hold_slots: bool = True
    """What becomes of a trajectory's slot while it waits for a tool. true: it keeps the slot, and goes on at once; false: another
    response may start there meanwhile, and the trajectory queues for a slot when it goes on, which is worth it where tools are slow
    and slots few. Agents (`task.agent`) keep theirs in any case."""
    max_prompt_tokens: PositiveInt = 256
    """Longest prompt, in tokens; a task with a longer one is refused before the run starts."""
    max_response_tokens: PositiveInt = 256
    """Longest response, of one turn."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer applies the same."""
    top_p: Share = 1.0
    """Nucleus sampling; below 1 the trained distribution is not the sampled one, and asyncrl warns."""
    top_k: NonNegativeInt = 0
    """Top-k sampling; 0 is off; above 0 asyncrl warns."""
    stop: Strings = ()
    """Strings that end a response."""
    interrupt: Literal["keep-kv", "recompute-kv"] | None = None
    """With partial_rollout: what happens to the KV cache at a weight load; keep-kv if not given."""
    tensor_parallel_size: Processes | None = None
    """vllm: processes that share one model. On GPUs always one per GPU of the worker (`placement.gpus_per_rollout_worker`);
    on CPUs 1 if not given."""
    gpu_memory_utilization: Share | None = None
    """vllm: share of a GPU's memory for weights and KV cache; if not given, vLLM's own default, or 0.5 where a trainer shares
    the GPU (colocate). On CPUs: share of the machine's memory; if not given, the cache is as large as the slots need."""
    max_model_len: PositiveInt | None = None
    """vllm: longest sequence; env.max_context_tokens if not given."""
    enforce_eager: bool | None = None
    """vllm: no compilation and no CUDA graphs; if not given, true on CPUs (compilation takes a minute) and false on GPUs."""
    engine_args: Params = Field(default_factory=dict)
    """vllm: further arguments of its `AsyncEngineArgs`, by its own names."""
    call_timeout_s: PositiveFloat = 600.0
    """Longest silence of a rollout worker that has work: a worker that makes no token for this long counts as lost, unless it
    computes rewards or loads weights, which have limits of their own. A group may take longer, queueing included. This is also
    the limit of a train step, and of calls that a worker answers at once."""
    max_restarts: NonNegativeInt = 0
    """How often each worker may be restarted after a failure (its process or its engine died, or it was silent for too long);
    at 0 the first failure ends the run. A resumed run counts from zero."""
    min_workers: Processes | None = None
    """With how many workers the run goes on when others have no restart left, or no room (`placement.timeout_s`): these come back
    when there is room. By default the run needs all of its workers."""


class EnvSection(Section):
    """Limits of an episode, which may have many turns and tools."""

    tool_timeout_s: PositiveFloat = 60.0
    """Seconds that a tool call, an environment's `reset` or its reward may take, or an agent without awaiting. What takes longer is
    killed with its process, and its trajectory counts as failed (`tool-timeout`; `environment` for a reset, `reward` for a reward).
    Importing the environment's module may take as long, at least 30 s; an agent's, at least 10 s."""
    max_turns: PositiveInt = 16
    """Responses of one episode. After the last one the episode ends, with the reward for what it has reached, and counts as
    truncated."""
    episode_timeout_s: PositiveFloat = 600.0
    """Seconds from an episode's start to its end, waiting for a slot included. A longer one counts as failed
    (`episode-timeout`)."""
    max_context_tokens: PositiveInt | None = None
    """Longest token sequence of an episode: prompt, responses and all that tools and environment add. An episode that fills it
    ends as truncated. rollout.max_prompt_tokens + rollout.max_response_tokens if not given, which suits one turn."""


class AsyncTrainingSection(Section):
    """The asynchronous schedule; verl's `async_training` names."""

    trigger_parameter_sync_step: PositiveInt = 1
    """K: train steps between two weight syncs."""
    staleness_threshold: Eta = Decimal(0)
    """eta: groups admitted ahead, as a share of a window's groups."""
    require_batches: PositiveInt = 1
    """Mini-batches per train step: R = require_batches * ppo_mini_batch_size groups; the seed decides which group is in which."""
    partial_rollout: bool = False
    """Running rollouts are frozen at a weight sync and go on with the new weights."""
    max_staleness: NonNegativeInt | None = None
    """Strict bound, in versions, on the staleness of any trained token; ceil(eta) if not given, never less."""
    on_stale: Literal["wait", "accept", "drop", "requeue"] = "wait"
    """What happens to a group that would pass the bound; with `wait` no group ever does."""
    max_requeues: NonNegativeInt = 2
    """How often one prompt is requeued for staleness."""
    on_exhausted: Literal["fail", "drop"] = "drop"
    """What happens to a prompt that is stale again after `max_requeues` requeues."""
    use_rollout_log_probs: bool | None = None
    """verl's name for algorithm.old_logprobs: true is "rollout", false is "recompute"."""


class WeightsSection(Section):
    """How published weights reach the rollout workers."""

    transport: Literal["object-store", "disk", "nccl", "ipc"] = "object-store"
    """How a version travels to the workers: `object-store`: as buckets in Ray objects; `disk`: as safetensors files below the
    run's directory, which all nodes must share; `nccl`: from the trainer's GPU to the GPUs of vLLM; `ipc`: within the one GPU
    that the trainer and vLLM share (colocate)."""
    gather_bucket_size_mb: PositiveInt = 2048
    """Bucket size on the trainer's side."""
    load_bucket_size_mb: PositiveInt = 128
    """nccl, ipc: size of the buffers on the GPUs at both ends that a version passes through."""
    mode: Literal["async", "sync"] = "async"
    """async: the trainer goes on as soon as its weights are gathered; sync: once every rollout worker holds them."""
    overlap: bool = True
    """Overlap the buckets: send one while the next is gathered, copy one while the next arrives; false: one phase after
    the other."""
    dual_buffer: bool = True
    """Rollout workers receive the next version into a second buffer while they generate, and stop only to swap; false: no second
    buffer, so generation stands still while weights arrive."""
    probe_sequences: NonNegativeInt = 4
    """Fixed sequences scored by trainer and worker after each load; 0 turns the check off."""
    max_logprob_diff: PositiveFloat | None = None
    """Mean absolute difference of the probes' logprobs above which a load raises a warning, however it compares with the
    version before; if not given, 0.001 with model.dtype = "float32" and 0.1 with "bfloat16"."""
    keep_versions: NonNegativeInt | Literal["all"] = 0
    """Published versions kept on disk (safetensors), for audits."""
    timeout_s: PositiveFloat = 300.0
    """Longest time a gather, a send or a load may take; likewise a checkpoint's snapshot, write or read, and a dump
    of samples. `nccl`, `ipc`: of connecting with a worker and of each transfer within a load; waits for others come on top."""
