"""The keys of a profile. A field's docstring is its help, its schema description and its reference: written once.

`[rollout]`, `[env]`, `[async_training]` and `[weights]` are in rollout_sections.py; `[algorithm]`, `[ref]`, `[critic]` and
`[reward_model]` in algorithm_section.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from asyncrl_cli.profile.algorithm_section import AlgorithmSection, CriticSection, RefSection, RewardModelSection
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
)
from asyncrl_cli.profile.rollout_sections import AsyncTrainingSection, EnvSection, RolloutSection, WeightsSection

Interrupt = Literal["drain", "keep-kv", "recompute-kv"]
"""What a weight load does to a worker's running rollouts: they finish first, or freeze and keep or rebuild their KV cache."""
VERIFIERS = "verifiers:"
ActivationCheckpointing = Literal["none", "selective", "full"]
DIRECT_TRANSPORTS = ("nccl", "ipc")
"""Values of `weights.transport` that copy from GPU memory to GPU memory during a worker's load."""
PROBE_TOKENS = 32
"""Length of a probe (`weights.probe_sequences`): enough to exercise every layer and position encoding, at next to no cost."""


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
    ship: Strings = ()
    """Files and directories in the working directory that `asyncrl submit` takes along, as `["data/*.parquet", "helpers.py"]`; the
    modules that a key names as `module:name` go along by themselves."""
    stall_timeout_s: PositiveFloat | None = None
    """Seconds without any progress after which the watchdog fails the run and names who waits for whom. If not given, one minute
    more than the longest limit of any single wait, so that a hanging call meets its own limit first, which names the call and
    restarts its worker."""


class ModelSection(Section):
    """The model that is trained."""

    path: PathText = "builtin:tiny"
    """A local Hugging Face directory, a hub name, or `builtin:tiny`: a small Qwen3 warm-started on the task's demonstrations.
    `builtin:untaught` is one that writes noise to any task, for rehearsals without a network."""
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
    """`reasoning-gym:<dataset>`, `jsonl:<path>`, `parquet:<path>` (several files by a pattern: `train-*.parquet`), a task of
    many turns that comes with asyncrl (`builtin:calculator` or `builtin:guess`), or `verifiers:<environment>`: an environment made
    with the package verifiers, which brings its own prompts and rewards (docs/agents.md)."""
    params: Params = Field(default_factory=dict)
    """Parameters of the reasoning-gym dataset, of the builtin task, or of the environment's `load_environment`; a layer that sets
    `source` discards those of lower layers."""
    python: PathText | None = None
    """Python that has the package verifiers and the environment of `source`, if it is not the one that runs asyncrl:
    `/path/to/venv/bin/python`, 3.11 or newer, on every machine of a cluster."""
    adapter: Literal["auto", "plain", "worked"] = "auto"
    """How a dataset item becomes a prompt: `plain` is its question; `worked` is the compact form with demonstrations
    that write their working first; `auto` takes `worked` if the source has that form and the model is builtin:tiny."""
    train_prompts: PositiveInt | None = None
    """Number of training prompts: made by reasoning-gym (4096 if not given) or by a builtin task (2048), or taken from a file's
    beginning (all if not given)."""
    prompt_key: str = "prompt"
    """Column of the prompt in a file: text, or a list of messages with `role` and `content`. `column.field` is a field in it."""
    answer_key: str = "answer"
    """Column of the answer in a file, or a field in it: `reward_model.ground_truth` in verl's files."""
    eval_path: PathText | None = None
    """File of eval prompts; without one, `eval.prompts` items are held out of the source."""
    environment: str = "auto"
    """The episode that a prompt starts: `one-turn` is one response and its reward; `module:Class` is a class of yours with tools,
    in the convention of TRL's environment_factory. Packages add others as entry points `asyncrl.environments`. `auto` is the
    builtin task's own, and one-turn for other sources."""
    agent: str | None = None
    """`module:function`, an `async def episode(client, item)` that plays each prompt through an OpenAI client and returns the
    reward, instead of an environment (docs/agents.md)."""
    reward: str = "auto"
    """`dataset` (its own verifier, which may forgive: number_sorting's accepts numbers 1 off), `exact-match`, `math-verify`,
    `module:function` (in TRL's signature, if the environment is a class of yours), or `none`. `auto` is the class's `get_reward`,
    `none` beside a reward model, `dataset` for reasoning-gym, and `exact-match` for files and for the worked form."""
    reward_timeout_s: PositiveFloat = 10.0
    """Seconds one reward may take before its trajectory counts as failed; importing its module may take as long, at least 10 s."""
    reward_workers: Annotated[int, Field(ge=1, le=256)] | None = None
    """Processes per rollout worker that compute rewards; if not given, half of its machine's cores, at most 4. With an async
    reward function each process awaits up to 128 rewards at once."""
    import_path: PathText | None = None
    """Directory from which the modules of `reward`, `environment` and `agent` are imported, if they are there; else they are looked
    up in the working directory, and among what is installed. By default it is that of the profile's file, in a chain of the file
    that names the module; two such directories are refused. A name from `--set` or the environment means the working directory."""
    max_failed_ratio: Ratio = 0.1
    """Share of failed trajectories (reward raised or hung, prompt too long) above which the run fails."""

    @property
    def has_agent(self) -> bool:
        """Whether episodes are played over an OpenAI client: by `agent`, or by an environment of the package verifiers."""
        return self.agent is not None or self.source.startswith(VERIFIERS)


class TrainerSection(Section):
    """The policy trainer."""

    ppo_mini_batch_size: PositiveInt = 16
    """B: groups per optimizer step, over all ranks."""
    nnodes: Processes | None = None
    """Nodes of the trainer; 1 if not given. Colocated, they are the rollout's, too."""
    n_gpus_per_node: Processes | None = None
    """GPUs, and so ranks, on each of its nodes, in place of placement.trainer_workers or a ratio."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Token budget of one forward/backward on one rank, with padding where rows have it."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What a layer's backward pass computes again instead of keeping it: nothing; all but its matrix products and attention
    (`selective`: about half of the memory, little time); or all from the layer's input (`full`: a third more time). Long
    responses of large models need `full`: `asyncrl plan` shows the memory."""
    sequence_parallel_size: Processes = 1
    """Ranks that divide the tokens of each trajectory (Ulysses): neighbours have the same trajectories, a microbatch has up to
    `max_tokens_per_microbatch` tokens of each, and attention's heads are exchanged between them. For responses too long for one
    GPU; must divide the trainer ranks and the model's attention heads."""
    offload_optimizer: bool = False
    """AdamW's moments wait on the host between optimizer steps, for the price of two copies per step. On CPUs they are there
    anyway."""
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
    """How many optimizer steps in a row may be skipped because their gradient is not finite; one more ends the run, with a
    checkpoint. A resumed run counts from zero."""
    meeting_timeout_s: PositiveFloat = 120.0
    """Longest wait of the ranks for each other before they load the model. Missing ones are named, with their nodes."""


Task = Literal["train", "prox", "ref", "critic", "reward", "rollout"]
"""What processes can be for: training, the old-logprob pass, the reference's logprobs, the critic's values, the reward model,
generation."""


class LoraSection(Section):
    """LoRA: adapters are trained in place of all weights (docs/algorithms.md)."""

    rank: NonNegativeInt = 0
    """Rank of the adapters (r); 0: no adapters, all weights are trained."""
    alpha: PositiveFloat = 16.0
    """An adapter's product counts alpha / rank times."""
    target_modules: Strings = ()
    """Linear layers that get one, by the last part of their name, as `["q_proj", "v_proj"]`; all but the head if not given."""
    sync: Literal["merged", "adapter"] = "merged"
    """What a weight sync sends: whole weights with the adapters merged in, or the adapters alone, which each rollout worker merges
    into the base model's files (a small part of the bytes; each node reads the files at each sync)."""


Strategy = Literal["pack", "spread", "strict_pack", "strict_spread"]


class PlacementSection(Section):
    """Which resources the roles get."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if the Ray cluster has GPUs, else cpu."""
    gpu_bundles: bool = False
    """With `device = "cpu"`: count and place ranks and workers as on GPUs, in bundles that claim Ray's logical GPUs, but compute on
    CPUs. A rehearsal of a profile for GPUs; a session on this machine then has as many logical GPUs as the job asks for."""
    colocate: bool = False
    """Trainer and rollout share all resources in turns (the baseline)."""
    trainer_workers: Processes | None = None
    """Trainer ranks, one device each; from `gpus` and `ratio` if not given."""
    gpus: Processes | None = None
    """GPUs of the whole job; all of the cluster's if not given."""
    ratio: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}:[1-9][0-9]{0,3}$", examples=["1:1"])] = "1:1"
    """trainer : rollout share of `gpus`."""
    tasks: Annotated[tuple[Annotated[tuple[Task, ...], ARRAY], ...], ARRAY] | None = None
    """Which tasks share resources, as [["train", "prox"], ["ref"], ["critic"], ["rollout"]]; what is not named is done by the
    trainer. `ref` (the reference's logprobs), `prox` (the old-logprob pass), `critic` (values, and its own training) and `reward`
    (the reward model, never the trainer's) may each be alone: its processes score finished groups while others are trained."""
    ratios: Annotated[tuple[Processes, ...], ARRAY] | None = None
    """The share of `gpus` of each of `tasks`, in place of `ratio`, as [2, 1, 1]; on CPUs the number of processes of each, 1 if not
    given."""
    gpus_per_rollout_worker: Processes = 1
    """GPUs of one rollout worker (tensor parallel size)."""
    cpus_per_worker: Processes = 1
    """CPU cores (and compute threads) of each trainer rank and rollout worker."""
    trainer_strategy: Strategy = "pack"
    """How the trainer's ranks are spread over nodes: `pack`: on few; `spread`: on many; `strict_pack`: all on one; `strict_spread`:
    each on another. With trainer.n_gpus_per_node that says it."""
    rollout_strategy: Strategy = "pack"
    """Likewise of rollout workers; the GPUs of one worker are on one node in any case."""
    trainer_labels: Labels = Field(default_factory=dict)
    """Labels that the trainer's nodes must have, in Ray's syntax: `{"ray.io/accelerator-type" = "in(H100, H200)", zone = "!b"}`."""
    rollout_labels: Labels = Field(default_factory=dict)
    """Labels that the rollout workers' nodes must have."""
    disjoint_nodes: bool = False
    """Trainer and rollout workers share no node."""
    autoscaler: bool = False
    """The cluster has an autoscaler: a job that does not fit its nodes waits for others, instead of being refused at once."""
    timeout_s: PositiveFloat = 60.0
    """Longest wait for room on the cluster. An autoscaler may need minutes."""


class CheckpointSection(Section):
    """When checkpoints are written and how many stay."""

    every_steps: NonNegativeInt = 50
    """Train steps between checkpoints; 0: only at step 0, at the last step and at a stop."""
    keep: PositiveInt = 3
    """Newest checkpoints kept."""


class EvalSection(Section):
    """Held-out evaluation on the rollout workers."""

    every_versions: NonNegativeInt = 50
    """Versions between evals. Version 0 and the last one are always scored; 0: only those two."""
    prompts: NonNegativeInt = 512
    """Held-out prompts per eval, never among the training prompts; 0: no eval."""
    sets: dict[str, PathText] = Field(default_factory=dict)
    """Further sets by name, each all prompts of a file: `{aime = "parquet:aime.parquet", math = "jsonl:math.jsonl"}`. Columns and
    reward are the task's. Training prompts that are in a set are left out."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    """Trajectories per prompt: their mean is mean@n, and with more than one there are best@2, best@4, ... best@n."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature of the eval; 0 is greedy."""
    timeout_s: PositiveFloat = 300.0
    """Longest time of an eval; one that takes longer gives no result."""


class LoggingSection(Section):
    """What is written beside metrics.jsonl and events.jsonl."""

    samples_every_steps: NonNegativeInt = 20
    """Dump trajectories of every so many train steps, the first and the last, for `asyncrl samples` and the report; 0 is off."""
    samples_per_step: NonNegativeInt = 16
    """Trajectories of a dumped step, group by group; 0 dumps all, but not what probability the trainer gives to their tokens."""
    samples_max_mb: PositiveInt = 256
    """Largest size of the run's dumps: the oldest are deleted. One dump takes an eighth of it at most."""
    trace_sequences: bool = False
    """Record for `asyncrl trace` when each sequence was in which slot: some 50 bytes each in timeline.jsonl, 256 MB at most."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode."""
    wandb_project: str = "asyncrl"
    """Weights & Biases project, and MLflow experiment."""
    tensorboard: bool = False
    """Write TensorBoard's files to `tensorboard/` in the run's directory. Needs the extra `tensorboard`."""
    mlflow_uri: str | None = None
    """MLflow's tracking server or store, as `http://host:5000`. Needs the extra `mlflow`."""
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Serve the run's gauges for Prometheus on this port of the loopback interface; `asyncrl init grafana` has a dashboard."""


class Profile(Section):
    """A run, fully described. Made by `profile.loaded.load`, never by hand."""

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
    critic: CriticSection = CriticSection()
    reward_model: RewardModelSection = RewardModelSection()
    trainer: TrainerSection = TrainerSection()
    lora: LoraSection = LoraSection()
    rollout: RolloutSection = RolloutSection()
    async_training: AsyncTrainingSection = AsyncTrainingSection()
    placement: PlacementSection = PlacementSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one process of a role computes, which a job's plan adds to the profile. The role has `workers` processes, each with
    `device` and `threads`; `model_dir` holds the model, whose weights are `version`. `ref_dir` and `critic_dir` hold the first
    weights of these models, if they are not those of `model_dir`; `reward_model_dir` holds the reward model, if there is one."""

    model_dir: str
    ref_dir: str = ""
    critic_dir: str = ""
    reward_model_dir: str = ""
    device: str = "cpu"
    threads: int = 1
    workers: int = 1
    version: int = 0
