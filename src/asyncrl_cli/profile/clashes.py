"""A table of key combinations that are refused, each with the reason and a way out.

A row's keys are shown in the error with their values: `weights.dual_buffer = false with weights.transport =
"disk": weights read from files stay in memory ...`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.profile import arithmetic
from asyncrl_cli.profile.keys import values_of
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, FILE_TRANSPORTS, VERIFIERS, Profile
from asyncrl_cli.profile.toml_files import Value, Values, shortened, toml_value


@dataclass(frozen=True, slots=True)
class Clash:
    """A refused combination of keys. `values`: for each key the value, or a function that tests it.
    `together` tests all values at once, if one alone says nothing. A hint may depend on them, too."""

    values: Mapping[str, object]
    because: str
    hint: str | Callable[[Values], str]
    together: Callable[[Values], bool] = lambda values: True

    def error(self, values: Values) -> ConfigError | None:
        """None if the values do not clash."""
        for key, wrong in self.values.items():
            if not (wrong(values[key]) if callable(wrong) else values[key] == wrong):
                return None
        if not self.together(values):
            return None
        first, *others = (
            f"no {key}" if values[key] is None else f"{key} = {shortened(toml_value(values[key]))}"
            for key in self.values
        )
        shown = f"{first} with {' and '.join(others)}" if others else first
        hint = self.hint if isinstance(self.hint, str) else self.hint(values)
        return ConfigError(f"{shown}: {self.because}", hint=hint)


def given(value: object) -> bool:
    return value not in (None, {})


def _positive(value: Value) -> bool:
    return value is not None and value > 0


def _several(path: object) -> bool:
    return isinstance(path, dict)


def direct(transport: object) -> bool:
    return transport in DIRECT_TRANSPORTS


def _of_verifiers(source: Value) -> bool:
    return bool(source.startswith(VERIFIERS))


def _any(value: object) -> bool:
    return True


def _lists(wrong: Callable[[frozenset[str]], bool]) -> Callable[[Value], bool]:
    """Tests whether one of the lists of `placement.tasks` is wrong."""
    return lambda tasks: tasks is not None and any(wrong(frozenset(sharing)) for sharing in tasks)


def _apart(task: str) -> Callable[[Value], bool]:
    return _lists(lambda sharing: sharing == {task})


def _lacks(task: str) -> Callable[[Value], bool]:
    return lambda tasks: tasks is not None and not any(task in sharing for sharing in tasks)


def _names_twice(tasks: Value) -> bool:
    named = [task for sharing in tasks or () for task in sharing]
    return len(named) > len(set(named))


def _differs_from_shape(role: str, key: str, values: Values) -> bool:
    each = values[GPUS_PER_WORKER] if role == "rollout" else 1
    nodes, gpus = values[f"{role}.nnodes"] or 1, values[f"{role}.n_gpus_per_node"]
    return bool(values[key] != nodes * (gpus // each))


def _other_than(value: object) -> Callable[[object], bool]:
    return lambda other: other != value


def _ends_in(*ends: str) -> Callable[[str | None], bool]:
    return lambda rule: rule is not None and rule.endswith(ends)


def _unused(keys: str, where: Mapping[str, object], because: str, hint: str) -> Iterator[Clash]:
    """Keys that have no effect `where` other keys have these values. Each is refused unless it has its
    default."""
    defaults = values_of(Profile())
    for key in keys.split():
        yield Clash({key: _other_than(defaults[key]), **where}, because, f"{hint}, or leave {key} out")


ETA, PARTIAL = "async_training.staleness_threshold", "async_training.partial_rollout"
COLOCATE, LEND, DEVICE = "placement.colocate", "placement.lend", "placement.device"
OLD_LOGPROBS, LOSS, ADVANTAGES = "algorithm.old_logprobs", "algorithm.loss_mode", "algorithm.adv_estimator"
KL_LOSS, KL_REWARD = "algorithm.use_kl_loss", "algorithm.use_kl_in_reward"
KL_TARGET = "algorithm.kl_target"
RS, RS_THRESHOLD = "algorithm.rollout_rs", "algorithm.rollout_rs_threshold"
TEACHER, DISTILL_COEF, DISTILL_LOSS = "teacher.path", "algorithm.distill_coef", "algorithm.distill_loss"
NORMALIZE, LORA_RANK, N = "algorithm.rollout_is_batch_normalize", "lora.rank", "rollout.n"
AGENT, SOURCE, REWARD_MODEL = "task.agent", "task.source", "reward_model.path"
TRANSPORT, DUAL_BUFFER = "weights.transport", "weights.dual_buffer"
SLOTS, MIN_WORKERS, OVERLONG = "rollout.slots", "rollout.min_workers", "algorithm.overlong_buffer_tokens"
CONTEXT, PROMPT = "env.max_context_tokens", "rollout.max_prompt_tokens"
RESPONSE = "rollout.max_response_tokens"
TOOL_TIMEOUT, EPISODE_TIMEOUT = "env.tool_timeout_s", "env.episode_timeout_s"
SCORERS = "task.scorers"
DETERMINISTIC = "run.deterministic"
TASKS, RATIOS, GPUS_PER_WORKER = "placement.tasks", "placement.ratios", "placement.gpus_per_rollout_worker"
EACH = 'a list of its own for each: placement.tasks = [["train"], ["ref"], ["reward"], ["rollout"]]'
BUILT_IN_TASKS = (arithmetic.TRAIN, *arithmetic.SCORERS, arithmetic.ROLLOUT)
# fmt: off
CLASHES = (
    Clash({PARTIAL: True, ETA: 0},
        "no rollout is running at a weight sync, so none can be partial",
        "--set async_training.staleness_threshold=0.5, or async_training.partial_rollout=false"),
    Clash({"rollout.interrupt": given, PARTIAL: False},
        "workers finish their rollouts before they load, so there is nothing to interrupt",
        "--set async_training.partial_rollout=true, or leave rollout.interrupt out"),
    Clash({"async_training.mixed_versions": _other_than("train"), PARTIAL: False},
        "workers finish their rollouts before they load, so none has tokens of two versions",
        "--set async_training.partial_rollout=true, or leave async_training.mixed_versions out"),
    Clash({"async_training.mixed_versions": _other_than("train"), "rollout.interrupt": "restart"},
        "responses begin again at a load, so none has tokens of two versions",
        "leave one of the two out"),
    *(
        Clash({"weights.encoding": "delta", TRANSPORT: other},
            "only object-store and directory send deltas",
            "--set weights.transport=object-store, or weights.encoding=auto")
        for other in ("disk", "nccl", "ipc")
    ),
    Clash({"weights.encoding": "delta", "rollout.engine": "remote"},
        "servers read whole versions",
        "--set weights.encoding=full"),
    Clash({"async_training.max_staleness": _positive, ETA: 0},
        "nothing is generated ahead, so nothing can be stale",
        "--set async_training.max_staleness=0, or async_training.staleness_threshold above 0"),
    Clash({"async_training.on_stale": _other_than("wait"), ETA: 0},
        "no group can become stale",
        "--set async_training.on_stale=wait, or async_training.staleness_threshold above 0"),
    *_unused("async_training.target_kl",
        {ETA: 0},
        "nothing is generated ahead, so there is nothing to steer",
        "--set async_training.staleness_threshold=1"),
    Clash({COLOCATE: True, ETA: _positive},
        "trainer and rollout take turns on the same resources, so nothing can be generated ahead",
        "--set async_training.staleness_threshold=0, or placement.colocate=false"),
    *(
        Clash({LEND: True, key: value}, why, f"--set placement.lend=false, or {hint}")
        for key, value, why, hint in (
            (COLOCATE, True, "the trainer's devices generate already, in turns", "placement.colocate=false"),
            (DETERMINISTIC, True, "what is lent, and when, depends on time", "run.deterministic=false"),
            (TRANSPORT, "nccl", "NCCL connects different GPUs, but a lent worker shares a rank's",
                "weights.transport=object-store"),
        )
    ),
    Clash({COLOCATE: True, MIN_WORKERS: given},
        "each worker shares its resources with a trainer rank, and the trainer needs all of its ranks",
        "leave rollout.min_workers out, or placement.colocate=false"),
    *(
        Clash({"async_training.use_rollout_log_probs": alias, OLD_LOGPROBS: _other_than(name)},
            "they are two names for the same setting and disagree",
            'give one of the two (true means "rollout", false means "recompute")')
        for alias, name in ((True, "rollout"), (False, "recompute"))
    ),
    *(
        Clash({key: wrong, OLD_LOGPROBS: "rollout", LOSS: _other_than("reinforce")},
            "the proximal policy is the sampler, so every weight is 1",
            f"--set algorithm.old_logprobs=recompute, or leave {key} out")
        for key, wrong in (
            ("algorithm.rollout_is_threshold", given),
            ("algorithm.rollout_is", lambda over: over in ("sequence", "geometric")),
        )
    ),
    *(
        Clash({NORMALIZE: True, OLD_LOGPROBS: wrong},
            "it needs the mean weight of an optimizer step before the first loss, which only a recomputed "
            "prox gives",
            "--set algorithm.old_logprobs=recompute, or algorithm.rollout_is_batch_normalize=false")
        for wrong in ("rollout", "loglinear")
    ),
    Clash({NORMALIZE: True, LOSS: "reinforce"},
        "this loss's weights depend on the policy in training, so their mean is not known before the first "
        "loss",
        "--set algorithm.loss_mode=vanilla, or algorithm.rollout_is_batch_normalize=false"),
    Clash({RS: given, RS_THRESHOLD: None},
        "the rule needs a threshold",
        '--set algorithm.rollout_rs_threshold=0.01 (k2, k3), or "0.5_2.0" (k1)'),
    Clash({RS: None, RS_THRESHOLD: given},
        "no rule uses the threshold",
        "--set algorithm.rollout_rs=seq_mean_k3, or leave algorithm.rollout_rs_threshold out"),
    Clash({RS: _ends_in("k1"), RS_THRESHOLD: lambda x: isinstance(x, float) and x <= 1},
        "k1 keeps ratios between 1/x and x, so x must be above 1",
        '--set algorithm.rollout_rs_threshold=2.0, or "0.5_2.0"'),
    Clash({RS: _ends_in("k2", "k3"), RS_THRESHOLD: lambda band: isinstance(band, str)},
        "k2 and k3 are never negative, so they only have an upper bound",
        "--set algorithm.rollout_rs_threshold=0.01, or a k1 rule"),
    Clash({"algorithm.clip_ratio_c": given, LOSS: _other_than("vanilla")},
        "only loss_mode vanilla has a dual clip",
        "--set algorithm.loss_mode=vanilla, or leave algorithm.clip_ratio_c out"),
    Clash({"model.chat_template": given, "model.path": lambda path: path.startswith("builtin:")},
        "the built-in models have a template of their own",
        "leave model.chat_template out"),
    Clash({"trainer.router_replay": True, "model.path": lambda path: path.startswith("builtin:")},
        "the built-in models are dense: they have no experts whose choice could be replayed",
        "leave trainer.router_replay out"),
    Clash({"task.reward": "none", REWARD_MODEL: None, ADVANTAGES: _other_than("none")},
        "nothing gives a reward",
        "--set reward_model.path=..., or another task.reward"),
    *_unused("reward_model.weight",
        {REWARD_MODEL: None},
        "there is no reward model",
        "--set reward_model.path=..."),
    *_unused("critic.path critic.lr critic.grad_clip critic.cliprange_value critic.head_start_steps "
        "algorithm.gamma algorithm.lam algorithm.bootstrap_truncated",
        {ADVANTAGES: _other_than("gae")},
        "only gae has a critic and per-token advantages",
        "--set algorithm.adv_estimator=gae"),
    *_unused("algorithm.kl_loss_coef algorithm.kl_loss_type",
        {KL_LOSS: False},
        "there is no KL in the loss",
        "--set algorithm.use_kl_loss=true"),
    *_unused("algorithm.kl_coef algorithm.kl_penalty",
        {KL_REWARD: False},
        "there is no KL in the reward",
        "--set algorithm.use_kl_in_reward=true"),
    *_unused("algorithm.kl_target",
        {KL_REWARD: False},
        "only the weight of the KL in the reward follows a target; that of the KL in the loss is fixed",
        "--set algorithm.use_kl_in_reward=true"),
    *_unused("algorithm.kl_horizon",
        {KL_TARGET: None},
        "there is no target to follow",
        "--set algorithm.kl_target=0.1"),
    Clash({KL_TARGET: given, "algorithm.kl_coef": 0},
        "the weight is changed by factors, so it would remain 0",
        "--set algorithm.kl_coef=0.001"),
    *_unused("ref.path algorithm.warn_ref_kl",
        {KL_LOSS: False, KL_REWARD: False},
        "nothing is compared with a reference",
        "--set algorithm.use_kl_loss=true (with kl_loss_coef=0 it only measures)"),
    Clash({ADVANTAGES: "none", TEACHER: None},
        "neither rewards nor a teacher train the policy",
        "--set teacher.path=..., or algorithm.adv_estimator=grpo"),
    *_unused("algorithm.filter_groups algorithm.overlong_buffer_tokens algorithm.use_kl_in_reward",
        {ADVANTAGES: "none"},
        "rewards do not train the policy",
        "--set algorithm.adv_estimator=grpo"),
    Clash({ADVANTAGES: "none", DISTILL_COEF: 0},
        "neither rewards nor the teacher train the policy",
        "--set algorithm.distill_coef=1, or algorithm.adv_estimator=grpo (then 0 only measures)"),
    Clash({DISTILL_LOSS: "full", TASKS: _apart("teacher")},
        "whole distributions are not sent between processes",
        "--set algorithm.distill_loss=sampled, or leave teacher out of placement.tasks"),
    Clash({DISTILL_LOSS: "full", "trainer.sequence_parallel_size": lambda size: size > 1},
        "the ranks of a sequence share no distributions",
        "--set trainer.sequence_parallel_size=1, or algorithm.distill_loss=sampled"),
    *_unused(f"{DISTILL_COEF} {DISTILL_LOSS}",
        {TEACHER: None},
        "there is no teacher",
        "--set teacher.path=..."),
    Clash({TEACHER: _several, "teacher.column": None},
        "nothing says which teacher a prompt has",
        "--set teacher.column=data_source, or the column that has the teachers' names"),
    Clash({"teacher.column": given, TEACHER: lambda path: not _several(path)},
        "only one of several teachers is chosen by a column",
        "leave teacher.column out, or give teacher.path a table of names and paths"),
    Clash({ADVANTAGES: lambda name: name not in ("gae", "reinforce_plus_plus", "none"), N: 1},
        "a response is compared with the others of its group, but a group of one has no others",
        "--set rollout.n=8, or algorithm.adv_estimator=gae"),
    Clash({"algorithm.filter_groups": True, N: 1},
        "all rewards of a group of one are equal, so every group would be dropped",
        "--set algorithm.filter_groups=false, or rollout.n=8"),
    Clash({"algorithm.bootstrap_truncated": True, "algorithm.mask_truncated": True},
        "responses that a limit has cut off are either trained or not",
        "leave one of the two out"),
    Clash({"task.curriculum": given, N: 1},
        "all rewards of a group of one are equal, so every prompt would come less often",
        "leave task.curriculum out, or --set rollout.n=8"),
    Clash({KL_REWARD: True, "algorithm.mask_truncated": True, ADVANTAGES: _other_than("gae")},
        "a group's responses are compared by reward minus KL, and masked responses have no KL",
        "--set algorithm.use_kl_loss=true instead, or algorithm.mask_truncated=false"),
    Clash({"eval.samples_per_prompt": _other_than(1), "eval.temperature": 0},
        "all greedy samples of a prompt are the same",
        "--set eval.samples_per_prompt=1, or an eval.temperature above 0"),
    *(
        clash
        for agent, is_given in (("task.agent", given), ("task.source", _of_verifiers))
        for clash in (
            Clash({agent: is_given, "task.environment": _other_than("auto")},
                "an agent plays the whole episode itself",
                "leave one of the two out"),
            Clash({agent: is_given, "task.reward": _other_than("auto")},
                "the agent's own result is the reward",
                "leave task.reward out: the agent, or the environment's rubric, gives the reward"),
            Clash({agent: is_given, "rollout.hold_slots": False},
                "an agent may call the model at any time, so its trajectory keeps its slot",
                "--set rollout.hold_slots=true"),
        )
    ),
    Clash({SOURCE: _of_verifiers, AGENT: given},
        "the environment plays its episodes itself",
        "leave task.agent out, or take prompts from a file for your agent"),
    Clash({SOURCE: lambda source: not _of_verifiers(source), "task.python": given},
        "only environments of the package verifiers run in another Python",
        "leave task.python out"),
    Clash({TRANSPORT: direct, DEVICE: _other_than("cuda")},
        "this transport copies between GPU memories",
        "--set placement.device=cuda, or --set weights.transport=object-store"),
    *_unused("rollout.nnodes rollout.n_gpus_per_node placement.rollout_strategy placement.rollout_labels "
        "placement.disjoint_nodes",
        {COLOCATE: True},
        "colocated rollout workers run where the trainer's ranks are",
        "--set placement.colocate=false"),
    *(
        Clash({f"placement.{role}_strategy": _other_than("pack"), f"{role}.n_gpus_per_node": given},
            "the number of GPUs per node already determines the placement",
            f"leave placement.{role}_strategy out")
        for role in ("trainer", "rollout")
    ),
    Clash({"placement.gpu_bundles": True, DEVICE: _other_than("cpu")},
        "the bundles claim logical GPUs, for a rehearsal on CPUs",
        "--set placement.device=cpu, or leave placement.gpu_bundles out"),
    Clash({TRANSPORT: "nccl", COLOCATE: True},
        "NCCL connects different GPUs, but a trainer rank and its rollout worker share one",
        "--set weights.transport=ipc, or --set placement.colocate=false"),
    Clash({TRANSPORT: "ipc", COLOCATE: False},
        "only a process on the same GPU can map the trainer's GPU memory",
        "--profile colocate --set placement.device=cuda, or --set weights.transport=nccl"),
    Clash({DUAL_BUFFER: False, TRANSPORT: direct},
        "weights arrive during the load, so there is no second buffer to switch off",
        "--set weights.dual_buffer=true, or --set weights.transport=object-store"),
    Clash({"weights.probe_sequences": 0, TRANSPORT: direct},
        "fingerprints are not compared on GPUs, so without probes wrong weights would go unnoticed",
        "--set weights.probe_sequences=4, or --set weights.transport=object-store"),
    *_unused("lora.alpha lora.target_modules lora.sync",
        {LORA_RANK: 0},
        "without a rank there are no adapters",
        "--set lora.rank=8"),
    Clash({"lora.sync": "adapter", TRANSPORT: direct},
        "what goes directly to the engine's processes are whole weights",
        "--set lora.sync=merged, or weights.transport=object-store"),
    Clash({"lora.sync": "adapter", "weights.keep_versions": _other_than(0)},
        "versions are kept as whole models, but rank 0 does not assemble them",
        "--set lora.sync=merged, or leave weights.keep_versions out; `asyncrl export` merges checkpoints"),
    *_unused("gateway.host",
        {"gateway.enabled": False, AGENT: None, SOURCE: lambda source: not _of_verifiers(source)},
        "no gateway is started",
        "--set gateway.enabled=true"),
    Clash({TRANSPORT: "directory", "weights.url": None},
        "there is no URL to write versions to",
        "--set weights.url=s3://bucket/path, gs://bucket/path or file:///path"),
    *_unused("weights.url",
        {TRANSPORT: _other_than("directory")},
        "versions travel another way",
        "--set weights.transport=directory"),
    Clash({DUAL_BUFFER: False, TRANSPORT: lambda transport: transport in FILE_TRANSPORTS},
        "weights read from files stay in memory until they are loaded, so there is always a second buffer",
        "--set weights.dual_buffer=true, or weights.transport=object-store"),
    Clash({SLOTS: _any, N: _any, MIN_WORKERS: given},
        "so few workers have fewer slots than a group needs, and no group would fit any more",
        lambda v: f"--set {MIN_WORKERS}={-(-v[N] // v[SLOTS])}, or {SLOTS}={-(-v[N] // v[MIN_WORKERS])}",
        lambda v: v[MIN_WORKERS] * v[SLOTS] < v[N]),
    Clash({CONTEXT: given, PROMPT: _any},
        "the longest prompt leaves no room for a response",
        lambda v: f"--set {CONTEXT}={v[PROMPT] + v[RESPONSE]}, or leave it out",
        lambda v: v[CONTEXT] <= v[PROMPT]),
    Clash({TOOL_TIMEOUT: _any, EPISODE_TIMEOUT: _any},
        "an episode would end before the tool's timeout could name the tool",
        lambda v: f"--set {EPISODE_TIMEOUT}={v[TOOL_TIMEOUT]:g} or more",
        lambda v: v[TOOL_TIMEOUT] > v[EPISODE_TIMEOUT]),
    Clash({OVERLONG: given, RESPONSE: _any},
        "every response would be penalized for its length",
        lambda v: f"--set {OVERLONG}={max(v[RESPONSE] // 4, 1)}",
        lambda v: v[OVERLONG] >= v[RESPONSE]),
    Clash({COLOCATE: True, REWARD_MODEL: given},
        "trainer and rollout workers take turns on all resources, but the reward model needs its own",
        "--set placement.colocate=false"),
    Clash({COLOCATE: True, SCORERS: given},
        "trainer and rollout workers take turns on all resources, but a scorer of yours needs its own",
        "--set placement.colocate=false"),
    Clash({TASKS: given, SCORERS: _any},
        "it names a task that does not exist",
        lambda values: f"there are {', '.join((*BUILT_IN_TASKS, *values[SCORERS]))}",
        lambda values: bool({*chain(*values[TASKS])} - {*BUILT_IN_TASKS, *values[SCORERS]})),
    Clash({TASKS: given, SCORERS: given},
        "a scorer of yours is never in the trainer",
        lambda values: f'["{next(iter(values[SCORERS]))}"], a list of its own for each scorer',
        lambda values: any(len(one) > 1 and {*one} & {*values[SCORERS]} for one in values[TASKS])),
    Clash({TASKS: given, COLOCATE: True},
        "there everything shares all resources",
        "leave one of the two out"),
    Clash({RATIOS: given, TASKS: None}, "the ratios have no tasks", "give both, or placement.ratio"),
    Clash({RATIOS: given, "placement.ratio": _other_than("1:1")},
        "both say who gets what",
        "leave placement.ratio out"),
    Clash({RATIOS: given, TASKS: given},
        "each list of tasks needs its number",
        "one number for each list of placement.tasks, in their order",
        lambda values: len(values[RATIOS]) != len(values[TASKS])),
    *(
        Clash({TASKS: _lacks(task)}, f"it has no {task}", f'add ["{task}"], a list of its own')
        for task in ("train", "rollout")
    ),
    Clash({TASKS: _names_twice}, "it names a task more than once", "name each task once"),
    Clash({TASKS: _lists(lambda sharing: not sharing)}, "it has an empty list", "leave it out"),
    Clash({TASKS: _lists(lambda sharing: "rollout" in sharing and len(sharing) > 1)},
        "other tasks and rollout share resources only if they take turns",
        "--set placement.colocate=true, or a list of its own for rollout"),
    Clash({TASKS: _lists(lambda sharing: {"train", "reward"} <= sharing)},
        "rewards are needed before groups are taken to be trained",
        EACH),
    Clash({TASKS: _lists(lambda sharing: len(sharing) > 1 and not sharing & {"train", "rollout"})},
        "these tasks share resources only with train",
        EACH),
    Clash({TASKS: _apart("ref"), KL_LOSS: False, KL_REWARD: False},
        "nothing asks for the reference's logprobs",
        "--set algorithm.use_kl_loss=true (or algorithm.use_kl_in_reward=true), or leave ref out"),
    Clash({TASKS: _apart("teacher"), TEACHER: None},
        "there is no teacher",
        "--set teacher.path=..., or leave teacher out"),
    Clash({TASKS: _apart("critic"), ADVANTAGES: _other_than("gae")},
        "nothing asks for values",
        "--set algorithm.adv_estimator=gae, or leave critic out"),
    Clash({TASKS: _apart("critic"), ADVANTAGES: "gae", KL_REWARD: True},
        "the critic's returns need the reference's logprobs, which only the trainer would have",
        "give ref a list of its own, too",
        lambda values: not _apart("ref")(values[TASKS])),
    Clash({TASKS: _apart("reward"), REWARD_MODEL: None},
        "there is no reward model",
        "--set reward_model.path=..., or leave reward out"),
    Clash({TASKS: _apart("prox"), OLD_LOGPROBS: _other_than("recompute")},
        "it has no such pass",
        "--set algorithm.old_logprobs=recompute, or leave prox out"),
    Clash({TASKS: _apart("prox"), TRANSPORT: direct},
        "versions go directly from the trainer's GPU memory to that of rollout workers, and nowhere else",
        "--set weights.transport=object-store, or name prox beside train"),
    Clash({TASKS: _apart("prox"), LORA_RANK: _positive, "model.dtype": "bfloat16"},
        "prox would use merged weights, where rounding to bfloat16 is larger than the adapters' change",
        "name prox beside train, or --set model.dtype=float32"),
    *(
        Clash({DETERMINISTIC: True, key: wrong}, because, f"--set run.deterministic=false, or {hint}")
        for key, wrong, because, hint in (
            ("rollout.engine", _other_than("transformers"),
                "only the embedded engine computes a response independently of the rest of its batch",
                "--set rollout.engine=transformers"),
            (DEVICE, "cuda", "only on CPUs is the embedded engine's batch without influence",
                "--set placement.device=cpu"),
            ("model.dtype", "bfloat16", "it is proved for float32 only", "--set model.dtype=float32"),
            (TRANSPORT, _other_than("object-store"),
                "a restarted worker loads an older version again, which no other transport keeps",
                "--set weights.transport=object-store"),
            ("weights.encoding", "delta", "a restarted worker loads an older version again, whole",
                "--set weights.encoding=full"),
            ("async_training.on_stale", _other_than("wait"),
                "no group is ever late: which version samples it follows from its place in the run",
                "--set async_training.on_stale=wait"),
            ("rollout.interrupt", given,
                "responses stop at fixed tokens before a load, and their caches are rebuilt after it",
                "leave rollout.interrupt out"),
            ("async_training.mixed_versions", "requeue",
                "a response crosses an update at fixed tokens, however often it is sampled",
                "--set async_training.mixed_versions=reject"),
            ("async_training.target_kl", given,
                "how far generation runs ahead would depend on how long the trainer waits",
                "leave async_training.target_kl out"),
            ("rollout.placement", "group", "each response is placed by itself",
                "--set rollout.placement=response"),
            (MIN_WORKERS, given, "only the restarted worker has the weights that its responses need",
                "leave rollout.min_workers out"),
            (AGENT, given, "an agent's requests come in the order of its own clock", "leave task.agent out"),
            (SOURCE, _of_verifiers, "the environment's requests come in the order of its own clock",
                "take prompts from a file"),
            (REWARD_MODEL, given, "it scores groups in batches that depend on when they finish",
                "leave reward_model.path out"),
            (SCORERS, given, "they score groups in batches that depend on when they finish",
                "leave task.scorers out"),
            (TASKS, _lists(lambda sharing: len(sharing) == 1 and not sharing <= {"train", "rollout"}),
                "a scorer apart scores groups in batches that depend on when they finish",
                "name it beside train"),
        )
    ),
    *(
        Clash({f"{role}.nnodes": given, f"{role}.n_gpus_per_node": None},
            "the number of GPUs per node is missing",
            f"--set {role}.n_gpus_per_node=N; `asyncrl plan` says what fits")
        for role in ("trainer", "rollout")
    ),
    *(
        Clash({f"{role}.nnodes": _any, f"{role}.n_gpus_per_node": given, key: given},
            "nodes and GPUs per node mean another number of processes",
            f"leave out {key}, or the other two",
            partial(_differs_from_shape, role, key))
        for role, key in (("trainer", "placement.trainer_workers"), ("rollout", "rollout.workers"))
    ),
    Clash({"rollout.n_gpus_per_node": given, GPUS_PER_WORKER: given},
        "the GPUs of a worker are on one node",
        "a multiple of placement.gpus_per_rollout_worker",
        lambda values: values["rollout.n_gpus_per_node"] % values[GPUS_PER_WORKER] > 0),
)
# fmt: on
