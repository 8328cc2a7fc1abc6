"""The keys of a profile. A field's docstring is its help, its schema description and its reference: written once.

Types are strict: "8" is no integer, 1 is no boolean. TOML floats arrive as decimals, so that eta is exact; every other
number becomes a float here.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from asyncrl_cli.safe_files import is_path


def _plain(value: Any) -> Any:
    """Decimals become floats, also inside the tables and arrays of `task.params`."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _plain_tuple(value: Any) -> Any:
    return tuple(_plain(value)) if isinstance(value, list) else value


def _exact(value: Any) -> Any:
    """Integers and floats become the decimal that they are written as; anything else is left to be refused."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Decimal(str(value))
    return value


def _path(text: str) -> str:
    if not is_path(text):
        raise ValueError("no file system takes this as a path")
    return text


Interrupt = Literal["drain", "keep-kv", "recompute-kv"]
"""What a weight load does to a worker's running rollouts: they finish first, or freeze and keep or rebuild their KV cache."""
DIRECT_TRANSPORTS = ("nccl", "ipc")
"""Values of `weights.transport` that go from GPU memory to GPU memory, within a worker's load."""
PROBE_TOKENS = 32
"""Length of a probe (`weights.probe_sequences`): it reaches every layer and position encoding, and costs nothing."""

MOST, MOST_PROCESSES, MOST_DECIMALS = 10**9, 4096, 12
"""What is larger is a slip of the keyboard: steps, tokens, sizes and seconds; processes; digits of eta after the point."""
PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
"""Of workers, ranks, devices: each is planned by itself."""
PositiveFloat = Annotated[float, Field(gt=0, le=MOST), BeforeValidator(_plain)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MOST), BeforeValidator(_plain)]
Bytes = Annotated[float, Field(gt=0, le=10**18), BeforeValidator(_plain)]
PathText = Annotated[str, AfterValidator(_path), WithJsonSchema({"type": "string", "format": "path"})]
Ratio = Annotated[float, Field(ge=0, le=1), BeforeValidator(_plain)]
TopP = Annotated[float, Field(gt=0, le=1), BeforeValidator(_plain)]
Eta = Annotated[
    Decimal,
    Field(ge=0, le=100, decimal_places=MOST_DECIMALS),
    BeforeValidator(_exact),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": 100, "multipleOf": f"1e-{MOST_DECIMALS}"}),
]
Betas = Annotated[tuple[Ratio, Ratio], BeforeValidator(_plain_tuple)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_plain_tuple)]
Params = Annotated[dict[str, Any], BeforeValidator(_plain)]


class Section(BaseModel):
    """Base of every section: frozen, strict, no unknown keys, field docstrings become descriptions."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


class RunSection(Section):
    """How long the run is and how it ends."""

    name: str | None = None
    """Directory of the run below the runs directory; made from profile and time if not given."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of prompts, sampling and initial weights."""
    train_steps: PositiveInt | None = None
    """Length of the run in train steps."""
    total_rollout_steps: PositiveInt | None = None
    """Length of the run in trained groups (verl's meaning); a multiple of require_batches * ppo_mini_batch_size."""
    stop_grace_s: PositiveFloat = 60.0
    """Seconds a stop may take to finish the train step and write a checkpoint."""
    stall_timeout_s: PositiveFloat | None = None
    """Seconds without any progress after which the watchdog fails the run and names who waits for whom. If not given, one minute
    more than the longest wait that has a limit of its own: a call that hangs is named, and its worker restarted, by that."""


class ModelSection(Section):
    """The model that is trained."""

    path: PathText = "builtin:tiny"
    """A local Hugging Face directory, a hub name, or `builtin:tiny`: a small Qwen3 warm-started on
    the task's demonstrations."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the rollout engine and of the trainer's forward pass (master weights stay float32). Most CPUs have no
    instructions for bfloat16 and are several times slower with it: `asyncrl doctor` says which yours has."""
    trust_remote_code: bool = False
    """Let a hub model run code of its own."""
    warm_start_steps: NonNegativeInt = 300
    """builtin:tiny: supervised steps on demonstrations before RL begins."""
    warm_start_label_noise: Ratio = 0.48
    """builtin:tiny: share of flawed demonstrations; sets the starting reward."""
    cache_dir: PathText | None = None
    """Where built models are kept; the user's cache directory if not given."""


class TaskSection(Section):
    """Prompts and their rewards."""

    source: PathText = "reasoning-gym:number_sorting"
    """`reasoning-gym:<dataset>`, `jsonl:<path>` or `parquet:<path>`."""
    params: Params = Field(default_factory=dict)
    """Parameters of the reasoning-gym dataset; a layer that sets `source` starts without those of lower layers."""
    adapter: Literal["auto", "plain", "worked"] = "auto"
    """How a dataset item becomes a prompt: `plain` is its question; `worked` is the compact form with demonstrations
    that write their working first; `auto` takes `worked` where there is one and the model is builtin:tiny."""
    train_prompts: PositiveInt | None = None
    """Training prompts: as many are made (reasoning-gym; 4096 if not given) or taken from a file's beginning (all if not given)."""
    prompt_column: str = "prompt"
    """Column of the prompt in a file."""
    answer_column: str = "answer"
    """Column of the answer in a file."""
    eval_path: PathText | None = None
    """File of eval prompts; without one, `eval.prompts` items are held out of the source."""
    environment: str = "one-turn"
    """What a prompt leads to: `one-turn` is one response and its reward. Packages add others as entry points
    `asyncrl.environments`."""
    reward: str = "auto"
    """`dataset` (its own verifier, which may forgive: number_sorting's takes numbers that are 1 off), `exact-match`, `math-verify`
    or `module:function`. `auto` is `dataset` for reasoning-gym, and `exact-match` for files and for the worked form."""
    reward_timeout_s: PositiveFloat = 10.0
    """Seconds one reward may take before its trajectory counts as failed; the import of its module may take as long, or 10."""
    reward_workers: Annotated[int, Field(ge=1, le=256)] | None = None
    """Processes per rollout worker that compute rewards; if not given, half of its machine's cores, at most 4. In each an async
    function awaits up to 128 rewards."""
    max_failed_ratio: Ratio = 0.1
    """Share of failed trajectories (reward raised or hung, prompt too long) above which the run fails."""


class AlgorithmSection(Section):
    """Advantages and loss."""

    normalize_advantages: bool = True
    """GRPO: divide by the group's standard deviation."""
    loss_mode: str = "vanilla"
    """The policy's loss: `vanilla` is decoupled PPO with a clipped ratio. Packages add others as entry points `asyncrl.losses`."""
    clip_ratio_low: PositiveFloat = 0.2
    """eps_low of the clipped ratio."""
    clip_ratio_high: PositiveFloat = 0.28
    """eps_high of the clipped ratio."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """The proximal policy: `rollout` takes the sampler's logprobs (w = 1), `recompute` those of the
    window's first weights."""
    max_importance_weight: PositiveFloat | None = None
    """Tokens whose w = exp(prox - mu) lies above this are masked; none if not given. Needs old_logprobs = "recompute"."""


class TrainerSection(Section):
    """The policy trainer."""

    ppo_mini_batch_size: PositiveInt = 16
    """B: groups per optimizer step, over all ranks."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Token budget of one forward/backward on one rank (padded tokens)."""
    lr: PositiveFloat = 2e-4
    """Peak learning rate of AdamW."""
    betas: Betas = (0.9, 0.99)
    """AdamW's betas."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up; zero would be reached one step after the run's last optimizer step."""
    max_skipped_steps: NonNegativeInt = 3
    """Optimizer steps in a row that are skipped because their gradient is not finite; the next one ends the run, with a
    checkpoint. A resumed run counts anew."""


class RolloutSection(Section):
    """Rollout workers and sampling."""

    engine: str = "transformers"
    """The inference engine in each rollout worker: `transformers`, `vllm`, or one that an installed package adds."""
    workers: Processes | None = None
    """Rollout workers; if not given, what `placement` yields (1 on a CPU)."""
    slots: PositiveInt = 64
    """Sequences that one worker generates at once."""
    n: Annotated[int, Field(ge=2, le=MOST_PROCESSES)] = 8
    """Trajectories per prompt: the size of a group."""
    prefetch_groups: NonNegativeInt = 0
    """Groups admitted beyond the free slots, to wait in the engines' queues."""
    max_prompt_tokens: PositiveInt = 256
    """Longest prompt, in tokens; a task with a longer one is refused before the run starts."""
    max_response_tokens: PositiveInt = 256
    """Longest response."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer applies the same."""
    top_p: TopP = 1.0
    """Nucleus sampling; below 1 the trained distribution is not the sampled one, and asyncrl warns."""
    top_k: NonNegativeInt = 0
    """Top-k sampling; 0 is off; above 0 asyncrl warns."""
    stop: Strings = ()
    """Strings that end a response."""
    interrupt: Literal["keep-kv", "recompute-kv"] | None = None
    """With partial_rollout: what happens to the KV cache at a weight load; keep-kv if not given."""
    tensor_parallel_size: Processes | None = None
    """vllm: processes that share one model. On GPUs one for each of the worker's: `placement.gpus_per_rollout_worker`, and
    nothing else; on CPUs 1 if not given."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), BeforeValidator(_plain)] | None = None
    """vllm: share of a GPU's memory for weights and KV cache; if not given vLLM's own default, and 0.5 where a trainer shares
    the GPU (colocate). On a CPU: of the machine's memory; if not given, the cache is as large as the slots need."""
    max_model_len: PositiveInt | None = None
    """vllm: longest sequence; max_prompt_tokens + max_response_tokens if not given."""
    enforce_eager: bool | None = None
    """vllm: no compilation and no CUDA graphs; if not given, true on CPUs (compilation takes a minute) and false on GPUs."""
    engine_args: Params = Field(default_factory=dict)
    """vllm: further arguments of its `AsyncEngineArgs`, by its own names."""
    call_timeout_s: PositiveFloat = 600.0
    """Longest silence of a rollout worker that has work: one that makes no token for so long is lost, unless it computes rewards or
    loads weights, which have limits of their own. A group may take longer, queueing included. It is also the longest time of a
    train step, and of what a worker answers at once."""
    max_restarts: NonNegativeInt = 0
    """How often each worker may be restarted after a failure (its process or its engine's died, or it was silent for too long);
    at 0 the first failure ends the run. A resumed run counts anew."""


class AsyncTrainingSection(Section):
    """The asynchronous schedule; verl's `async_training` names."""

    trigger_parameter_sync_step: PositiveInt = 1
    """K: train steps between two weight syncs."""
    staleness_threshold: Eta = Decimal(0)
    """eta: groups admitted ahead, as a share of a window's groups."""
    require_batches: PositiveInt = 1
    """Mini-batches per train step: R = require_batches * ppo_mini_batch_size groups, which the seed deals out to them."""
    partial_rollout: bool = False
    """Running rollouts are frozen at a weight sync and go on with the new weights."""
    max_staleness: NonNegativeInt | None = None
    """Strict bound, in versions, on the staleness of any trained token; ceil(eta) if not given, never less."""
    on_stale: Literal["wait", "accept", "drop", "requeue"] = "wait"
    """What happens to a group that would pass the bound; `wait` keeps any from doing so."""
    max_requeues: NonNegativeInt = 2
    """How often one prompt is requeued for staleness."""
    on_exhausted: Literal["fail", "drop"] = "drop"
    """What happens to a prompt requeued more often than that."""
    use_rollout_log_probs: bool | None = None
    """verl's name: true is algorithm.old_logprobs = "rollout", false is "recompute"."""


class PlacementSection(Section):
    """Which resources the roles get."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if the Ray cluster has GPUs, else cpu."""
    colocate: bool = False
    """Trainer and rollout share all resources in turns (the baseline)."""
    trainer_workers: Processes | None = None
    """Trainer ranks, one device each; from `gpus` and `ratio` if not given."""
    gpus: Processes | None = None
    """GPUs of the whole job; all of the cluster's if not given."""
    ratio: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}:[1-9][0-9]{0,3}$")] = "1:1"
    """trainer : rollout share of `gpus`."""
    gpus_per_rollout_worker: Processes = 1
    """GPUs of one rollout worker (tensor parallel size)."""
    cpus_per_worker: Processes = 1
    """CPU cores (and compute threads) of each trainer rank and rollout worker."""
    timeout_s: PositiveFloat = 60.0
    """Longest wait for the placement groups."""


class WeightsSection(Section):
    """How published weights reach the rollout workers."""

    transport: Literal["object-store", "disk", "nccl", "ipc"] = "object-store"
    """The way of a version to the workers: `object-store` is buckets as Ray objects; `disk` is safetensors files below the
    run's directory, which all nodes must share; `nccl` is from the trainer's GPU to the GPUs of vLLM; `ipc` is within the one GPU
    that the trainer and vLLM share (colocate)."""
    gather_bucket_size_mb: PositiveInt = 2048
    """Bucket size on the trainer's side."""
    load_bucket_size_mb: PositiveInt = 128
    """nccl, ipc: size of the buffers on the GPUs at both ends that a version passes through."""
    mode: Literal["async", "sync"] = "async"
    """async: the trainer goes on as soon as its weights are gathered; sync: once every rollout worker holds them."""
    overlap: bool = True
    """Bucket by bucket: one is sent while the next is gathered, one is copied while the next arrives; false: one phase
    after the other."""
    dual_buffer: bool = True
    """Rollout workers receive the next version beside generation, into a second buffer, and only swap; false: no second buffer,
    so weights arrive while generation stands still."""
    probe_sequences: NonNegativeInt = 4
    """Fixed sequences scored by trainer and worker after each load; 0 turns the check off."""
    max_logprob_diff: PositiveFloat | None = None
    """Mean absolute difference of the probes' logprobs above which a sync is alarmed, whatever the version before says; if not
    given, 0.001 with model.dtype = "float32" and 0.1 with "bfloat16"."""
    keep_versions: NonNegativeInt | Literal["all"] = 0
    """Published versions kept on disk (safetensors), for audits."""
    timeout_s: PositiveFloat = 300.0
    """Longest time a gather, a send or a load may take; likewise a checkpoint's snapshot, write or read, and a dump
    of samples. `nccl`, `ipc`: of a meeting with a worker and of each transfer within a load; waits for others come on top."""


class CheckpointSection(Section):
    """When checkpoints are written and how many stay."""

    every_steps: NonNegativeInt = 50
    """Train steps between checkpoints; 0: only step 0, the last step and stops."""
    keep: PositiveInt = 3
    """Newest checkpoints kept."""


class EvalSection(Section):
    """Held-out evaluation on the rollout workers."""

    every_versions: NonNegativeInt = 50
    """Versions between evals; version 0 and the last one always; 0: those two only."""
    prompts: NonNegativeInt = 512
    """Held-out prompts per eval, never among the training prompts; 0: no eval."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature of the eval; 0 is greedy."""
    timeout_s: PositiveFloat = 300.0
    """Longest time of an eval; one that takes longer is reported absent."""


class LoggingSection(Section):
    """What is written beside metrics.jsonl and events.jsonl."""

    samples_every_steps: NonNegativeInt = 0
    """Dump the trajectories of every so many train steps; 0 is off."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode."""
    wandb_project: str = "asyncrl"
    """Weights & Biases project."""


class Profile(Section):
    """A run, fully described. Made by `profile.layers.load`, never by hand."""

    name: str = "custom"
    """Name of the profile."""
    purpose: str = ""
    """One line: what the profile is for."""
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection = TrainerSection()
    rollout: RolloutSection = RolloutSection()
    async_training: AsyncTrainingSection = AsyncTrainingSection()
    placement: PlacementSection = PlacementSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()
