"""The keys of `[rollout]`, `[env]`, `[async_training]`, `[data_plane]` and `[weights]`: how responses are
generated, within which limits, how far ahead of the trainer, where their arrays are until then, and how new
weights reach the rollout workers."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

from pydantic import Field

from asyncrl_cli.profile.fields import (
    Eta,
    NonNegativeFloat,
    NonNegativeInt,
    Params,
    PathText,
    PositiveFloat,
    PositiveInt,
    Processes,
    Ratio,
    Section,
    Share,
    Strings,
)


class RolloutSection(Section):
    """Rollout workers and sampling."""

    engine: str = "transformers"
    """The inference engine of each rollout worker: `transformers`, `vllm`, `remote` (servers that others have
    started, `urls`), or one that an installed package adds."""
    urls: Strings | None = None
    """remote: the servers, such as `http://host:8000`, each of them a rollout worker (docs/remote.md)."""
    token_file: PathText | None = None
    """remote: file with the servers' token, which only its user may read. It must be at the same path on
    every node of a cluster. Default: the environment variable ASYNCRL_REMOTE_TOKEN."""
    workers: Processes | None = None
    """Number of rollout workers. Default: as many as `placement` yields (1 on a CPU)."""
    nnodes: Processes | None = None
    """Number of nodes for the rollout workers, default 1."""
    n_gpus_per_node: Processes | None = None
    """GPUs for rollout workers on each of these nodes. Replaces rollout.workers or a ratio."""
    slots: PositiveInt = 64
    """How many sequences one worker generates at once."""
    n: Processes = 8
    """Trajectories per prompt: the size of a group. One is enough for `gae` and `reinforce_plus_plus`."""
    placement: Literal["response", "group"] = "response"
    """`response`: each response of a group goes to the worker with the newest weights and the most room, so a
    group may run on several workers at once. `group`: all responses of a group run on one worker."""
    prefetch_groups: NonNegativeInt = 0
    """How many groups are admitted beyond the free slots. They wait in the engines' queues."""
    hold_slots: bool = True
    """What happens to a trajectory's slot while it waits for a tool. true: the trajectory keeps the slot and
    continues at once. false: another response may use the slot meanwhile, and the trajectory queues for a
    slot afterwards; useful if tools are slow and slots are few. Agents (`task.agent`) always keep their
    slots."""
    max_prompt_tokens: PositiveInt = 256
    """Longest prompt, in tokens. A task with a longer prompt is refused before the run starts."""
    max_response_tokens: PositiveInt = 256
    """Longest response, in tokens of one turn."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. The trainer applies the same temperature."""
    top_p: Share = 1.0
    """Nucleus sampling, among the tokens that min_p and top_k have left. 1: off."""
    top_k: NonNegativeInt = 0
    """Top-k sampling, among the tokens that min_p has left. 0: off."""
    min_p: Ratio = 0.0
    """Leave out tokens whose probability is less than this share of the most likely token's. 0: off."""
    sampling_mask: bool = True
    """With top_p, top_k or min_p: train the distribution that was sampled. The engine returns the tokens that
    were kept at each position, and trainer and scorers compute logprobs among these. false: they compute them
    over the whole vocabulary, which was not what was sampled, and asyncrl warns (docs/exactness.md). `vllm`
    needs a top_k of at most 64 for it."""
    stop: Strings = ()
    """Strings that end a response."""
    interrupt: Literal["keep-kv", "recompute-kv", "restart"] | None = None
    """With partial_rollout: what happens to running responses at a weight load. `keep-kv`: they continue with
    their KV cache, `recompute-kv`: with one of the new weights. `restart`: they are given up and sampled
    again, so that no trajectory has tokens of two versions. Default: keep-kv."""
    tensor_parallel_size: Processes | None = None
    """vllm: number of processes that share one model. On GPUs always one per GPU of the worker
    (`placement.gpus_per_rollout_worker`); on CPUs 1 by default."""
    gpu_memory_utilization: Share | None = None
    """vllm: share of a GPU's memory for weights and KV cache. Default: vLLM's own, or 0.5 if a trainer shares
    the GPU (colocate). On CPUs: share of the machine's memory; by default the cache is as large as the slots
    need."""
    max_model_len: PositiveInt | None = None
    """vllm: longest sequence. Default: env.max_context_tokens."""
    enforce_eager: bool | None = None
    """vllm: no compilation and no CUDA graphs. Default: true on CPUs (compilation takes a minute) and false
    on GPUs."""
    engine_args: Params = Field(default_factory=dict)
    """vllm: additional arguments of `AsyncEngineArgs`, under vLLM's names."""
    call_timeout_s: PositiveFloat = 600.0
    """A rollout worker with work that produces no token for this long counts as lost, unless it computes
    rewards or loads weights, which have their own timeouts. A group as a whole may take longer. This is also
    the timeout of a train step, and of calls that a worker answers at once."""
    max_restarts: NonNegativeInt = 0
    """How often each worker may be restarted after a failure (its process or engine died, or it was silent
    for too long). With 0 the first failure ends the run. A resumed run counts from zero."""
    min_workers: Processes | None = None
    """The run continues with at least this many workers when others have no restart left or find no room
    (`placement.timeout_s`). Those without room come back when there is room. Default: all workers."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def trains_kept_tokens(self) -> bool:
        return self.truncates and self.sampling_mask


class EnvSection(Section):
    """Limits of an episode, which may have many turns and tool calls."""

    tool_timeout_s: PositiveFloat = 60.0
    """Seconds that a tool call, an environment's `reset` or its reward may take, and that an agent may run
    without awaiting. After that the process is killed and the trajectory counts as failed (`tool-timeout`;
    `environment` for a reset, `reward` for a reward). Importing the module may take as long: at least 30 s
    for an environment, at least 10 s for an agent."""
    max_turns: PositiveInt = 16
    """Most responses in one episode. After the last one the episode ends with the reward earned so far and
    counts as truncated."""
    episode_timeout_s: PositiveFloat = 600.0
    """Seconds from an episode's start to its end, including waits for a slot. A longer episode counts as
    failed (`episode-timeout`)."""
    max_context_tokens: PositiveInt | None = None
    """Longest token sequence of an episode: prompt, responses, and everything that tools and environment add.
    An episode that fills it ends as truncated. Default: rollout.max_prompt_tokens +
    rollout.max_response_tokens, which is enough for one turn."""


class AsyncTrainingSection(Section):
    """The asynchronous schedule, with the names of verl's `async_training`."""

    trigger_parameter_sync_step: PositiveInt = 1
    """K: train steps between two weight syncs."""
    staleness_threshold: Eta = Decimal(0)
    """eta: how many groups are admitted ahead, as a share of a window's groups."""
    target_kl: PositiveFloat | None = None
    """Steers, between 0 and staleness_threshold, how many groups are admitted ahead: more while the trainer
    waits for groups, fewer if `correction/kl` (sampler to policy, nats per token) is above this. Also limits
    the sequences in flight while engines preempt too many (docs/admission.md). By default nothing is
    steered."""
    require_batches: PositiveInt = 1
    """Mini-batches per train step: R = require_batches * ppo_mini_batch_size groups. The seed decides which
    group is in which."""
    partial_rollout: bool = False
    """Freeze running rollouts at a weight sync and continue them with the new weights."""
    max_staleness: NonNegativeInt | None = None
    """Strict bound, in versions, on the staleness of any trained token. Default, and minimum: ceil(eta)."""
    on_stale: Literal["wait", "accept", "drop", "requeue"] = "wait"
    """What happens to a group that would exceed max_staleness. With `wait` no group ever does."""
    max_requeues: NonNegativeInt = 2
    """How often one prompt may be requeued because its group is too stale, and one trajectory because its
    tokens come from more than one version (`mixed_versions`)."""
    on_exhausted: Literal["fail", "drop"] = "drop"
    """What happens to a prompt whose group is too stale again after `max_requeues` requeues."""
    mixed_versions: Literal["train", "reject", "requeue"] = "train"
    """With partial_rollout: what happens to a trajectory whose tokens come from more than one version.
    `train`: it is trained. `reject`: it leaves its group, as a failed one does. `requeue`: it is sampled
    again on its worker, at most `max_requeues` times, and then leaves its group."""
    use_rollout_log_probs: bool | None = None
    """verl's name for algorithm.old_logprobs: true means "rollout", false means "recompute"."""


class DataPlaneSection(Section):
    """Where the arrays of groups are between rollout workers, scorers and the trainer."""

    backend: Literal["ray", "transferqueue"] = "ray"
    """`ray`: Ray's object store. `transferqueue`: storage units of the package TransferQueue, which
    `pip install 'asyncrl-cli[transferqueue]'` brings (docs/data.md)."""
    storage_units: Processes = 2
    """`transferqueue`: number of storage processes, spread over the nodes."""
    storage_cpus_per_unit: NonNegativeFloat = 0.0
    """`transferqueue`: CPUs that Ray reserves for a storage unit, and for the controller. 0: they share those
    of the others. On a cluster with CPUs to spare, 1 keeps other work away."""
    timeout_s: PositiveFloat = 60.0
    """Limit of every call to the store, in seconds."""


class WeightsSection(Section):
    """How published weights reach the rollout workers."""

    transport: Literal["object-store", "disk", "directory", "nccl", "ipc"] = "object-store"
    """How a version travels to the workers. `object-store`: in buckets, as Ray objects, of each trainer rank
    its own rows; with the others rank 0 gathers and sends all. `disk`: as
    safetensors files in the run's directory, which all nodes must share. `directory`: as safetensors files at
    `weights.url`, such as a bucket. `nccl`: from the trainer's GPU to vLLM's GPUs. `ipc`: within the GPU that
    trainer and vLLM share (colocate)."""
    url: str | None = None
    """`directory`: where versions are, a URL that fsspec opens, such as `s3://bucket/path`, `gs://bucket/path`
    or `file:///path`. A run has a directory of its own below it, which goes when the run ends. Credentials do
    not belong in it: they come from the environment of every node."""
    encoding: Literal["full", "delta", "auto"] = "full"
    """What a sync sends with `object-store` and `directory`. `full`: all bytes. `delta`: what has changed,
    bit for bit, since the version before, to workers that have that one; all bytes to others (at the start,
    after a restart or a version that they missed), and where the difference would not be smaller. The workers
    of a node keep the newest version in its memory for it. `auto`: `delta` for bfloat16 with these
    transports, else `full` (docs/weights.md)."""
    gather_bucket_size_mb: PositiveInt = 2048
    """Size in MiB of a trainer rank's buckets."""
    load_bucket_size_mb: PositiveInt = 128
    """`nccl`, `ipc`: size in MiB of the GPU buffers at both ends of a transfer."""
    mode: Literal["async", "sync"] = "async"
    """When the trainer continues. `async`: once its weights are gathered. `sync`: once all rollout workers
    have loaded them."""
    overlap: bool = True
    """Overlap the buckets: send one while the next is gathered, copy one while the next arrives. false: no
    overlap."""
    dual_buffer: bool = True
    """Rollout workers receive the next version into a second buffer while they generate, and stop only to
    swap. false: there is no second buffer, so generation stops while weights arrive."""
    probe_sequences: NonNegativeInt = 4
    """Number of fixed sequences, pieces of the task's prompts, that trainer and worker both score after each
    load, as a check. 0: no check."""
    max_logprob_diff: PositiveFloat | None = None
    """A load warns if the median absolute difference of the probes' logprobs is larger, whatever it was for
    the version before. Default: 0.001 with model.dtype = "float32", 0.1 with "bfloat16"."""
    keep_versions: NonNegativeInt | Literal["all"] = 0
    """How many published versions to keep on disk (safetensors), for audits. Rank 0 then gathers the weights
    of all trainer ranks for every version."""
    timeout_s: PositiveFloat = 300.0
    """Longest time for a gather, a send or a load, for a checkpoint's snapshot, write or read, and for a dump
    of samples. `nccl`, `ipc`: for connecting to a worker, and for each transfer of a load; waiting for other
    workers' loads is not included."""
