"""The keys of a profile. A field's docstring is also its help, its schema description and its entry in the
reference.

`[rollout]`, `[env]`, `[async_training]` and `[weights]` are in rollout_sections.py; `[algorithm]`, `[ref]`,
`[teacher]`, `[critic]` and `[reward_model]` in algorithm_section.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, NotRequired

from pydantic import BeforeValidator, Field, with_config
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.profile.algorithm_section import (
    AlgorithmSection,
    CriticSection,
    RefSection,
    RewardModelSection,
    TeacherSection,
)
from asyncrl_cli.profile.fields import (
    ARRAY,
    Betas,
    Labels,
    NonNegativeFloat,
    NonNegativeInt,
    Params,
    PathText,
    PositiveFloat,
    PositiveInt,
    Processes,
    Ratio,
    Section,
    Strings,
    whole_ratios,
)
from asyncrl_cli.profile.rollout_sections import (
    AsyncTrainingSection,
    DataPlaneSection,
    EnvSection,
    RolloutSection,
    WeightsSection,
)

Interrupt = Literal["drain", "keep-kv", "recompute-kv", "restart"]
"""What a weight load does to a worker's running rollouts: they finish first (drain), or they freeze and then
keep their KV cache or rebuild it, or begin again (no engine knows `restart`: for it, it is keep-kv)."""
VERIFIERS = "verifiers:"
MOST_REWARDS = 16
ActivationCheckpointing = Literal["none", "selective", "full"]
DIRECT_TRANSPORTS = ("nccl", "ipc")
"""Values of `weights.transport` that copy between GPU memories during a worker's load."""
FILE_TRANSPORTS = ("disk", "directory")
"""Those by which versions travel as files."""
PROBE_TOKENS = 32
"""Length of a probe (`weights.probe_sequences`): long enough to exercise every layer and the position
encoding, and cheap."""


class RunSection(Section):
    """How long the run is and how it ends."""

    name: str | None = None
    """Name of the run, and of its directory in the runs directory. Default: made from profile and time."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of prompts, sampling and initial weights."""
    deterministic: bool = False
    """The same profile and seed give the same weights, bit for bit, on the same kind of machine: groups are
    trained in the order in which they were admitted, each token is sampled by a version that follows from its
    place in the run, and a response depends on nothing that runs beside it (docs/exactness.md). Costs speed.
    Only with `rollout.engine = "transformers"` on CPUs."""
    train_steps: PositiveInt | None = None
    """Length of the run in train steps."""
    total_rollout_steps: PositiveInt | None = None
    """Length of the run in trained groups, as in verl; a multiple of require_batches *
    ppo_mini_batch_size."""
    stop_grace_s: PositiveFloat = 60.0
    """Seconds that a stop may take to finish the train step and write a checkpoint; three times
    the run's longest train step, if that is longer."""
    ship: Strings = ()
    """Files and directories in the working directory that `asyncrl submit` uploads, e.g. `["data/*.parquet",
    "helpers.py"]`. Modules that a key names as `module:name` are uploaded anyway."""
    stall_timeout_s: PositiveFloat | None = None
    """Seconds without any progress after which the watchdog fails the run and names who waits for whom.
    Default: one minute more than the longest timeout of any single wait, so that a hanging call hits its own
    timeout first, which names the call and restarts its worker."""


class ModelSection(Section):
    """The model that is trained."""

    path: PathText = "builtin:tiny"
    """A local Hugging Face directory, a hub name, a `.gguf` file (or `package:NAME/FILE.gguf`, a file of an
    installed Python package), which is converted once into the model cache, or `builtin:tiny`: a small Qwen3
    warm-started on the task's demonstrations. `builtin:untaught` is a small model that answers any task with
    noise, for rehearsals without a network."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the rollout engine and of the trainer's forward pass; master weights stay float32. Default:
    bfloat16 on GPUs, and for a pretrained model on CPUs with matrix units for it (AMX); else float32, as
    `asyncrl plan` says. Most CPUs have no bfloat16 instructions and are several times slower with it:
    `asyncrl doctor` shows what yours has."""
    chat_template: PathText | None = None
    """A Jinja file in place of the model's own chat template. `builtin:tools` adds tools to the model's own
    (docs/agents.md). Exported models have it, too."""
    trust_remote_code: bool = False
    """Allow a hub model to run its own code."""
    warm_start_steps: NonNegativeInt = 300
    """builtin:tiny: supervised steps on demonstrations before RL begins."""
    warm_start_label_noise: Ratio = 0.48
    """builtin:tiny: share of demonstrations with a mistake, which determines the initial reward."""
    cache_dir: PathText | None = None
    """Directory for models that asyncrl builds or converts. Default: the user's cache directory."""


@with_config(Section.model_config)
class NamedReward(TypedDict):
    """A reward under a name of the user's. `use`: what `task.reward` may name."""

    use: str
    weight: NotRequired[float]


class RewardUse(NamedTuple):
    """One of a task's rewards: `use` says what it is."""

    name: str
    use: str
    weight: float = 1.0


class TaskSection(Section):
    """Prompts and their rewards."""

    source: PathText = "reasoning-gym:number_sorting"
    """`reasoning-gym:<dataset>`, `jsonl:<path>`, `parquet:<path>` (a pattern such as `train-*.parquet` names
    several files), a multi-turn task that comes with asyncrl (`builtin:calculator` or `builtin:guess`), or
    `verifiers:<environment>`: an environment of the package verifiers, with its own prompts and rewards
    (docs/agents.md)."""
    params: Params = Field(default_factory=dict)
    """Parameters of the reasoning-gym dataset, of the builtin task, or of the environment's
    `load_environment`. A layer that sets `source` discards the parameters of lower layers."""
    python: PathText | None = None
    """Python interpreter with the package verifiers and the environment of `source`, e.g.
    `/path/to/venv/bin/python`: 3.11 or newer, at this path on every machine of a cluster. Default: the one
    that runs asyncrl."""
    adapter: Literal["auto", "plain", "worked"] = "auto"
    """How a dataset item becomes a prompt. `plain`: its question. `worked`: a compact form, whose
    demonstrations write out the working before the answer, which alone is judged: the list after the last
    comma. `auto`: `worked` if the source has that form and the model is builtin:tiny, otherwise `plain`."""
    train_prompts: PositiveInt | None = None
    """Number of training prompts, generated by reasoning-gym (default 4096) or a builtin task (default 2048),
    or read from the beginning of a file (default: all)."""
    prompt_key: str = "prompt"
    """A file's column with the prompt: text, or a list of messages with `role` and `content`. `column.field`
    names a field."""
    answer_key: str = "answer"
    """A file's column with the answer, or a field of a column (`column.field`). By default, where there is no
    column `answer`, it is verl's `reward_model.ground_truth` or SkyRL's `reward_spec.ground_truth`."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What happens if prompts have more tokens than rollout.max_prompt_tokens. `error`: nothing starts.
    `drop`: they are left out, also of evals, with a warning that names the first one (metric
    `prompts/overlong`)."""
    curriculum: Annotated[float, Field(ge=0.01, le=1)] | None = None
    """The share of epochs in which a prompt comes whose last group had equal rewards: its responses were all
    right or all wrong. 0.25: every fourth epoch on average. Others come once per epoch. Only for runs long
    enough for prompts to come again. Default: all prompts come once per epoch."""
    eval_path: PathText | None = None
    """File of eval prompts. Default: `eval.prompts` items of the source are held out."""
    environment: str = "auto"
    """The episode that a prompt starts. `one-turn`: one response and its reward. `module:Class`: your own
    class with tools, in the convention of TRL's environment_factory. `auto`: the builtin task's own
    environment, one-turn for other sources. Packages can add others through the entry point group
    `asyncrl.environments`."""
    agent: str | None = None
    """`module:function`: used instead of an environment. An `async def episode(client, item)` that plays each
    prompt through an OpenAI client and returns the reward (docs/agents.md)."""
    reward: str | Strings | dict[str, float | NamedReward] = "auto"
    """`dataset` (the dataset's own verifier, which may be lenient: number_sorting's accepts numbers that are
    off by 1), `exact-match`, `math-verify`, `module:function`, or `none`. `auto`: the class's `get_reward`,
    `none` with a reward model, `dataset` for reasoning-gym, `exact-match` for files and `worked`. A function
    takes (item, response), or has the parameters of TRL's rewards (`prompts`, `completions`, columns) or of
    verl's `compute_score`; with an environment that is your own class, TRL's. It returns a number, or
    `{"reward": number, "<field>": value}` with declared fields of the trajectory (docs/data.md). Several
    rewards are a list, `["math-verify", "my_rewards:brief"]`, or a table with weights, `{math-verify = 1.0,
    "my_rewards:brief" = 0.2}`, or with names of your own, `{right = {use = "math-verify"}, short = {use =
    "my_rewards:brief", weight = 0.2}}`: their weighted sum is the reward, and each has its mean in the
    metrics (`reward/short/mean`) and its value in samples."""
    fields: str | None = None
    """`module:FIELDS`: fields of your own that travel with every trajectory (docs/data.md), a sequence of
    `asyncrl_cli.data.sample_fields.Field`. Packages add theirs through the entry point group
    `asyncrl.fields`."""
    scorers: dict[str, str] = Field(default_factory=dict)
    """Fields that classes of your own compute for groups that have finished, while others are trained:
    `{surprise = "my_scorers:Surprise"}` (docs/data.md). Each has processes of its own, as a reward model
    has."""
    answer_format: Literal["final", "anywhere"] = "final"
    """Where `math-verify` looks for a response's answer. `final`: in the last `<answer>` or `\\boxed{}`,
    after `####` on the last line, or after "answer is" or "answer:" at the end, and it must be worked out:
    `26+50` is not 76. `anywhere`: any expression of the response counts, even one repeated from the
    prompt."""
    rehearsal_items: Annotated[int, Field(ge=0, le=1024)] = 64
    """Items on which the reward is tried before a new run and by `asyncrl plan`, for at most 20 s: their
    reference answers must score; the prompt repeated, an empty text and other items' answers must not. 0: no
    rehearsal."""
    reward_timeout_s: PositiveFloat = 10.0
    """Seconds after which a reward's trajectory counts as failed. Importing the reward's module may take as
    long, at least 10 s."""
    reward_workers: Annotated[int, Field(ge=1, le=256)] | None = None
    """Processes per rollout worker that compute rewards. Default: half of the machine's cores, at most 4.
    With an async reward function, each process awaits up to 128 rewards at once."""
    import_path: PathText | None = None
    """Directory of the modules of `reward`, `environment`, `agent`, `fields` and `scorers`. Modules that are
    not there are imported from the working directory or from installed packages. Default: the directory of
    the profile file that names the module; for a module named by `--set` or the environment, the working
    directory. Modules in two different directories are refused."""
    max_failed_ratio: Ratio = 0.1
    """The run fails if a larger share of trajectories fails (the reward raised or hung, or the prompt was too
    long)."""

    @property
    def rewards(self) -> tuple[RewardUse, ...]:
        """The rewards in `reward`."""
        if isinstance(self.reward, str):
            return (RewardUse(self.reward, self.reward),)
        if not isinstance(self.reward, dict):
            return tuple(RewardUse(use, use) for use in self.reward)
        return tuple(
            RewardUse(name, one["use"], one.get("weight", 1.0))
            if isinstance(one, dict)
            else RewardUse(name, name, one)
            for name, one in self.reward.items()
        )

    @property
    def has_agent(self) -> bool:
        """Whether episodes use an OpenAI client: those of `agent` and of environments of the package
        verifiers do."""
        return self.agent is not None or self.source.startswith(VERIFIERS)


class TrainerSection(Section):
    """The policy trainer."""

    ppo_mini_batch_size: PositiveInt = 16
    """B: groups per optimizer step, over all ranks. Default: 16, or 4 for a pretrained model on this
    machine's CPUs."""
    ppo_epochs: PositiveInt = 1
    """How often a train step goes over its groups, with the same mini-batches in the same order. Policy and
    critic make require_batches optimizer steps in each epoch; the old logprobs, advantages and returns remain
    those of the train step's start."""
    nnodes: Processes | None = None
    """Number of nodes for the trainer, default 1. With placement.colocate, the rollout workers use the same
    nodes."""
    n_gpus_per_node: Processes | None = None
    """GPUs, and therefore ranks, on each of these nodes. Replaces placement.trainer_workers or a ratio."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Token budget of one forward and backward pass on one rank, including any padding. Tokens that responses
    share count once, if `shared_prefixes`. Default: 8192, or 2048 for a pretrained model on this machine's
    CPUs."""
    shared_prefixes: bool | None = None
    """Compute what several responses have in common from their beginning on (system prompt, prompt, earlier
    turns) once per microbatch, forward and backward, in all models of the trainer. Default: if the model
    allows it, which a sample shows when it is loaded, and where it saves at least a tenth of the tokens.
    Models with sliding windows or attention of their own compute every response whole; `true` refuses
    them."""
    router_replay: bool = False
    """For mixtures of experts: policy and prox give each token to the experts that the sampler gave it to,
    instead of choosing anew, where rounding may choose others. Gradients flow through the router's values of
    these experts. Engines `transformers`, and `vllm` on GPUs (docs/exactness.md)."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What the backward pass of a layer recomputes instead of keeping it. `none`: nothing. `selective`: all
    but matrix products and attention (about half of the memory, little extra time). `full`: everything, from
    the layer's input (a third more time). Large models with long responses need `full`: `asyncrl plan` shows
    the memory."""
    sequence_parallel_size: Processes = 1
    """Number of neighbouring ranks that share the tokens of each trajectory (Ulysses), for responses too long
    for one GPU. A microbatch has up to `max_tokens_per_microbatch` tokens per rank; attention exchanges
    tokens for heads. Must divide the number of trainer ranks and the model's attention heads."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory between optimizer steps, at the cost of two copies per step. No
    effect on CPUs."""
    whole_gradients: bool | None = None
    """Keep whole gradients, 4 bytes per parameter, on each GPU until an optimizer step's last microbatch, and
    sum over ranks once instead of after each microbatch. Default: if they take at most an eighth of a GPU. On
    CPUs always."""
    lr: PositiveFloat = 5e-4
    """Peak learning rate of AdamW. Default: 5e-4 for the tiny built-in model; for a pretrained one by its
    size, 2e-5 for 135 M parameters, 5e-6 for 0.5 B, 1e-6 from 2.7 B on, and ten times that with LoRA, as
    `asyncrl plan` says."""
    betas: Betas = (0.9, 0.99)
    """AdamW's betas."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up. It would reach zero one step after the run's last
    optimizer step."""
    max_skipped_steps: NonNegativeInt = 3
    """How many optimizer steps in a row may be skipped because their gradient is not finite. One more ends
    the run with a checkpoint. A resumed run counts from zero."""
    step_timeout_s: PositiveFloat = 600.0
    """How long a train step may take, on the trainer or a critic, and how long ranks wait for each other in
    it. Default: 600, and more for many tokens and large models, as `asyncrl plan` says."""
    meeting_timeout_s: PositiveFloat = 120.0
    """How long the ranks wait for each other before they load the model. The error names missing ranks and
    their nodes."""


Task = Annotated[str, Field(min_length=1)]
"""What a process can do: `train`; `prox`, the old-logprob pass; `ref`, the reference's logprobs; `teacher`,
those of the teachers; `critic`, its values; `reward`, the reward model's scores; `rollout`; or what a scorer
of `task.scorers` does."""


class LoraSection(Section):
    """LoRA: train adapters instead of all weights (docs/algorithms.md)."""

    rank: NonNegativeInt = 0
    """Rank of the adapters (r). 0: no adapters, all weights are trained."""
    alpha: PositiveFloat = 16.0
    """An adapter's product is scaled by alpha / rank."""
    target_modules: Strings = ()
    """Linear layers that get an adapter, by the last part of their name, e.g. `["q_proj", "v_proj"]`.
    Default: all but the head."""
    sync: Literal["merged", "adapter"] = "merged"
    """What a weight sync sends. `merged`: the whole model with the adapters merged in. `adapter`: only the
    adapters, far fewer bytes. vLLM applies them by its own LoRA support, beside the base model that it has;
    with the engine `transformers`, or `rollout.engine_args={enable_lora=false}`, each rollout worker merges
    them into the base model's files, which it reads at each sync."""


Strategy = Literal["pack", "spread", "strict_pack", "strict_spread"]


class PlacementSection(Section):
    """Which resources trainer and rollout workers get."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda if the Ray cluster has GPUs, otherwise cpu."""
    gpu_bundles: bool = False
    """With `device = "cpu"`: rehearse a profile for GPUs. Ranks and workers are counted and placed as on
    GPUs, in bundles that claim Ray's logical GPUs, but compute on CPUs. A local session gets as many logical
    GPUs as the job asks for."""
    colocate: bool = False
    """Trainer and rollout take turns on all resources (the baseline)."""
    lend: bool = False
    """The trainer's devices generate while the trainer waits for groups: each trainer rank shares its device
    with a rollout worker, which sleeps while the trainer computes. It pays where generation is the bottleneck
    and admission waits for slots."""
    trainer_workers: Processes | None = None
    """Trainer ranks, one device each. Default: from `gpus` and `ratio`."""
    gpus: Processes | None = None
    """GPUs of the whole job. Default: all GPUs of the cluster."""
    ratio: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}:[1-9][0-9]{0,3}$", examples=["1:1"])] = "1:1"
    """How `gpus` are divided, as trainer:rollout."""
    tasks: Annotated[tuple[Annotated[tuple[Task, ...], ARRAY], ...], ARRAY] | None = None
    """Which tasks share resources, e.g. [["train", "prox"], ["ref"], ["critic"], ["rollout"]]. Tasks that are
    not listed run in the trainer. `ref` (the reference's logprobs), `teacher` (those of the teachers), `prox`
    (the old-logprob pass), `critic` (values, and the critic's training) and `reward` (the reward model, never
    in the trainer) may have a list of their own: separate processes, which score finished groups while others
    are trained. So do scorers of your own (`task.scorers`), by name, which are never in the trainer."""
    ratios: Annotated[tuple[Processes, ...], ARRAY, BeforeValidator(whole_ratios)] | None = None
    """The share of `gpus` of each list of `tasks`, e.g. [2, 1, 1], or as fractions [0.5, 0.25, 0.25];
    replaces `ratio`. On CPUs its number of processes, default 1."""
    gpus_per_rollout_worker: Processes = 1
    """GPUs of one rollout worker (tensor parallel size)."""
    cpus_per_worker: Processes = 1
    """CPU cores (and compute threads) of each trainer rank and rollout worker."""
    trainer_strategy: Strategy = "pack"
    """How the trainer's ranks are placed on nodes: on few (`pack`) or many (`spread`), all on one
    (`strict_pack`), or each on a different one (`strict_spread`). Not with trainer.n_gpus_per_node, which
    determines the placement."""
    rollout_strategy: Strategy = "pack"
    """The same for rollout workers. The GPUs of one worker are always on one node."""
    trainer_labels: Labels = Field(default_factory=dict)
    """Labels that the trainer's nodes must have, in Ray's syntax: `{"ray.io/accelerator-type" = "in(H100,
    H200)", zone = "!b"}`."""
    rollout_labels: Labels = Field(default_factory=dict)
    """Labels that the rollout workers' nodes must have."""
    check_memory: bool = True
    """Refuse a job that needs more memory than there is, by the estimate of `asyncrl plan`. `false`: start it
    all the same, unless what a process always holds is more than its GPU has."""
    disjoint_nodes: bool = False
    """Never place trainer ranks and rollout workers on the same node."""
    autoscaler: bool = False
    """The cluster has an autoscaler: a job that does not fit the present nodes waits for new ones instead of
    being refused."""
    timeout_s: PositiveFloat = 60.0
    """How long to wait for room on the cluster. An autoscaler may need minutes."""
    start_timeout_s: PositiveFloat = 600.0
    """How long a trainer rank or a rollout worker may take to start: imports, the model's files, an engine's
    memory profiling. Default: 600, and more for large models, as `asyncrl plan` says."""


class CheckpointSection(Section):
    """When checkpoints are written and how many are kept."""

    every_steps: NonNegativeInt = 50
    """Train steps between checkpoints. 0: only at step 0, at the last step and at a stop."""
    keep: PositiveInt = 3
    """How many of the newest checkpoints to keep."""
    timeout_s: PositiveFloat = 300.0
    """How long a checkpoint may take to be copied, to be written beside training, and to be read. Default:
    300, and more for large models, as `asyncrl plan` says."""


class EvalSection(Section):
    """Held-out evaluation on the rollout workers."""

    every_versions: NonNegativeInt = 50
    """Versions between evals. Version 0 and the last version are always scored. 0: only those two."""
    prompts: NonNegativeInt = 512
    """Held-out prompts per eval, never used for training. 0: no held-out prompts. Default: 512, or 64 for a
    pretrained model on this machine's CPUs."""
    sets: dict[str, PathText] = Field(default_factory=dict)
    """Additional eval sets by name, each with all prompts of a file: `{aime = "parquet:aime.parquet", math =
    "jsonl:math.jsonl"}`. Columns and reward are the task's. Prompts of a set are removed from the training
    prompts."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    """Trajectories per prompt. Their mean is mean@n; with more than one there are also best@2, best@4, ...
    best@n."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature of the eval; 0 is greedy."""
    timeout_s: PositiveFloat = 300.0
    """An eval that takes longer gives no result."""


class GatewaySection(Section):
    """OpenAI's API in each rollout worker (docs/agents.md)."""

    enabled: bool = False
    """Start it with every task, for requests from outside of the run. With `task.agent` it is always
    there."""
    host: Annotated[str, Field(min_length=1, max_length=255)] = "127.0.0.1"
    """Address to listen on. `0.0.0.0` makes it reachable from other nodes: for whoever has its key, which is
    in `logs/attempt-N/rollout-M.gateway.json`."""


class LoggingSection(Section):
    """What is written besides metrics.jsonl and events.jsonl."""

    samples_every_steps: NonNegativeInt = 20
    """Train steps between dumps of trajectories for `asyncrl samples` and the report; also dumped: the first
    and last. 0: off."""
    samples_per_step: NonNegativeInt = 16
    """Trajectories per dumped step, group by group. 0: all, but without the trainer's probabilities of their
    tokens."""
    samples_max_mb: PositiveInt = 256
    """Largest size of all dumps of the run; the oldest are deleted. One dump takes at most an eighth of
    it."""
    samples: Literal["some", "all"] = "some"
    """`all`: keep all trained trajectories as arrays, too, for `asyncrl replay` and `asyncrl audit`: about 15
    bytes per token, more with sampling masks and `trainer.router_replay`, without a limit."""
    trace_sequences: bool = False
    """Record which sequence was in which slot when, for `asyncrl trace`: about 50 bytes each in
    timeline.jsonl, at most 256 MB."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode."""
    wandb_project: str = "asyncrl"
    """Name of the Weights & Biases project and of the MLflow experiment."""
    tensorboard: bool = False
    """Write TensorBoard files to `tensorboard/` in the run's directory. Needs the extra `tensorboard`."""
    mlflow_uri: str | None = None
    """MLflow tracking server or store, e.g. `http://host:5000`. Needs the extra `mlflow`."""
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Serve the run's gauges for Prometheus on this port of the loopback interface. `asyncrl init grafana`
    writes a dashboard."""
    sinks: Strings = ()
    """Further sinks of the run's figures, by name: entry points `asyncrl.sinks` of other packages."""


class Profile(Section):
    """The complete description of a run. Made by `profile.loaded.load`, never by hand."""

    name: str = "custom"
    """Name of the profile."""
    purpose: str = ""
    """One line: what the profile is for."""
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    env: EnvSection = EnvSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    ref: RefSection = RefSection()
    teacher: TeacherSection = TeacherSection()
    critic: CriticSection = CriticSection()
    reward_model: RewardModelSection = RewardModelSection()
    trainer: TrainerSection = TrainerSection()
    lora: LoraSection = LoraSection()
    rollout: RolloutSection = RolloutSection()
    async_training: AsyncTrainingSection = AsyncTrainingSection()
    placement: PlacementSection = PlacementSection()
    data_plane: DataPlaneSection = DataPlaneSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    gateway: GatewaySection = GatewaySection()
    logging: LoggingSection = LoggingSection()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """Where one process of a role computes. A job's plan adds this to the profile. The role has `workers`
    processes, each with `device` and `threads`; this one is `index`, and shares its device with a trainer
    rank if it `is_lent`. `model_dir` holds the model, with the
    weights of `version`.
    `ref_dir` and `critic_dir` hold the initial weights of these models if they differ from `model_dir`;
    `teacher_dirs` the teachers by name, `reward_model_dir` the reward model, if there are any. `scorers`: the
    classes of `task.scorers` by field."""

    model_dir: str
    ref_dir: str = ""
    teacher_dirs: Mapping[str, str] = field(default_factory=dict)
    critic_dir: str = ""
    reward_model_dir: str = ""
    scorers: Mapping[str, UserCode] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1
    workers: int = 1
    index: int = 0
    is_lent: bool = False
    version: int = 0
