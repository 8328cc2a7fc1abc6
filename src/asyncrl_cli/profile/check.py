"""Checks of a profile's keys against each other. Every error names the conflicting values and a way out.

The schema checks the type and range of each single key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal
from typing import Any

from asyncrl_cli.base.errors import ConfigError, combine, counted
from asyncrl_cli.base.named_code import ENGINES, engine_kind
from asyncrl_cli.base.paths import check_name
from asyncrl_cli.profile.arithmetic import (
    Schedule,
    asked_workers,
    groups_ahead,
    step_optimizer_steps,
    train_steps_of,
    window_groups_of,
)
from asyncrl_cli.profile.clashes import CLASHES, DUAL_BUFFER, ETA, PARTIAL, TRANSPORT, Clash, direct, given
from asyncrl_cli.profile.keys import values_of
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, MOST_REWARDS, Profile, TaskSection
from asyncrl_cli.profile.toml_files import shortened, toml_value

ENGINE = "rollout.engine"
ENGINE_KEYS = (
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "max_model_len",
    "enforce_eager",
    "engine_args",
    "urls",
    "token_file",
)
"""Keys of [rollout] that only some engines support."""
OUTWEIGHS = "the penalty outweighs the rewards, and the policy stays what it was"
DOUBTFUL: tuple[tuple[str, float, str], ...] = (
    ("trainer.lr", 0.01, "AdamW moves every weight by about as much in each optimizer step"),
    ("trainer.ppo_epochs", 16, "after so many passes a sample has little more to say"),
    ("rollout.temperature", 2, "responses are hardly more than random tokens"),
    ("rollout.n", 256, "so many responses of one prompt say little more than fewer of more prompts"),
    ("algorithm.entropy_coeff", 0.1, "the bonus outweighs the rewards, and responses become random"),
    ("algorithm.kl_coef", 1, OUTWEIGHS),
    ("algorithm.kl_loss_coef", 1, OUTWEIGHS),
    ("algorithm.kl_target", 1, "so far from its reference, in nats per token, a policy writes other text"),
    ("algorithm.distill_coef", 10, "the log ratios of rare tokens are large already"),
    ("algorithm.clip_ratio_high", 5, "hardly any token is clipped"),
    ("async_training.staleness_threshold", 8, "samples are older than corrections were tried with"),
    ("lora.rank", 512, "training all weights costs hardly more"),
)
"""Keys with the values above which they are probably a mistake, and why."""


def _engine_clashes(kind: Any) -> Iterator[Clash]:
    """What an engine does not support, according to its `EngineKind`. Engines are looked up by name: this
    module imports none."""
    for key in (f"rollout.{key}" for key in ENGINE_KEYS if key not in kind.keys):
        knows = next(name for name in ENGINES if key.removeprefix("rollout.") in engine_kind(name).keys)
        hint = f"--set rollout.engine={knows}, or leave {key} out"
        yield Clash({key: given, ENGINE: given}, "this engine does not support the key", hint)
    for transport in (one for one in DIRECT_TRANSPORTS if one not in kind.direct_transports):
        able = next(name for name in ENGINES if transport in engine_kind(name).direct_transports)
        yield Clash(
            {TRANSPORT: transport, ENGINE: given},
            "this engine has no processes on a GPU that can receive weights directly",
            f"--set rollout.engine={able}, or --set weights.transport=object-store",
        )
    if not kind.loads_in_place:
        able = next(name for name in ENGINES if engine_kind(name).loads_in_place)
        yield Clash(
            {DUAL_BUFFER: False, ENGINE: given, TRANSPORT: lambda transport: not direct(transport)},
            "this engine reads new weights from memory that holds a whole version, so there is always a "
            "second buffer",
            f"--set weights.dual_buffer=true, or rollout.engine={able}",
        )


def check(profile: Profile) -> list[str]:
    """Check a whole profile. Returns the warnings. Raises one ConfigError for all conflicts."""
    if holds_credentials(profile.weights.url or ""):  # before any message that would show it
        hint = "they come from the environment, such as AWS_ACCESS_KEY_ID, or from fsspec's settings"
        raise ConfigError("weights.url holds credentials, which a run's files would show", hint=hint)
    values = values_of(profile)
    clashes, conflicts = [*CLASHES], list[ConfigError]()
    try:
        kind = engine_kind(profile.rollout.engine)
        clashes += _engine_clashes(kind)
        conflicts += kind.conflicts(profile)
        if profile.rollout.trains_kept_tokens and not kind.returns_kept_tokens:
            why = f'rollout.engine = "{profile.rollout.engine}" does not return the tokens that it has kept'
            hint = "--set rollout.sampling_mask=false trains the whole distribution instead"
            conflicts.append(ConfigError(f"top_p, top_k or min_p: {why}", hint=hint))
        if profile.trainer.router_replay and not kind.returns_routed_experts:
            why = f'rollout.engine = "{profile.rollout.engine}" does not return the experts of each token'
            hint = "--set rollout.engine=transformers, or trainer.router_replay=false"
            conflicts.append(ConfigError(f"trainer.router_replay = true: {why}", hint=hint))
    except ConfigError as unknown:
        conflicts.append(unknown)
    problems = list[ConfigError]()
    try:
        steps = train_steps_of(profile) * step_optimizer_steps(profile)
        head_start = profile.critic.head_start_steps
        if head_start >= steps:
            never = f"the run has {steps} optimizer steps, so the policy is never trained"
            hint = "lower critic.head_start_steps, or raise run.train_steps"
            problems.append(ConfigError(f"critic.head_start_steps = {head_start}: {never}", hint=hint))
    except ConfigError as no_length:
        problems.append(no_length)
    try:
        check_name(profile.run.name or "unnamed")
    except ConfigError as wrong_name:
        problems.append(wrong_name)
    problems += [*_sizes(profile), *_rewards(profile.task), *_url(profile.weights.url)]
    problems += filter(None, (clash.error(values) for clash in clashes))
    if problems or conflicts:
        raise combine([*problems, *conflicts])
    return list(_warnings(profile))


def _sizes(profile: Profile) -> Iterator[ConfigError]:
    training, rollout = profile.async_training, profile.rollout
    least = math.ceil(training.staleness_threshold)
    if training.max_staleness is not None and training.max_staleness < least:
        less = f"less than ceil(staleness_threshold) = ceil({training.staleness_threshold}) = {least}"
        why = "groups admitted that far ahead are this old when they are trained"
        hint = f"--set async_training.max_staleness={least}, or a smaller {ETA}"
        given_bound = f"async_training.max_staleness = {training.max_staleness}"
        yield ConfigError(f"{given_bound} is {less}: {why}", hint=hint)
    if training.partial_rollout and (too_small := _too_small_eta(profile)):
        why = "no rollout is running at a weight sync, so none can be partial"
        hint = f"--set {ETA}={_least_eta(profile)} or more, or {PARTIAL.rpartition('.')[2]}=false"
        yield ConfigError(f"{PARTIAL} = true with {too_small}: {why}", hint=hint)
    spread = asked_workers(profile) or 1 if rollout.placement == "response" else 1
    if rollout.slots * spread < rollout.n:
        where = f" on {spread} workers" if spread > 1 else ""
        why = f"is less than rollout.n = {rollout.n}: no group ever fits"
        hint = f"--set rollout.slots={-(-rollout.n // spread)} or more"
        yield ConfigError(f"rollout.slots = {rollout.slots}{where} {why}", hint=hint)


def _rewards(task: TaskSection) -> Iterator[ConfigError]:
    """What is wrong with a list or a table of rewards."""
    if isinstance(task.reward, str):
        return
    shown = f"task.reward = {shortened(toml_value(task.reward))}"
    if not 1 <= len(task.reward) <= MOST_REWARDS:
        hint = f"name 1 to {MOST_REWARDS}, or one as text"
        yield ConfigError(f"{shown}: it has {len(task.reward)} rewards", hint=hint)
    uses = [one.use for one in task.rewards]
    if len(set(uses)) < len(uses):
        hint = 'give it a weight: {"my_rewards:score" = 2.0}'
        yield ConfigError(f"{shown}: a reward is named twice", hint=hint)
    if alone := [name for name in ("auto", "none") if name in uses]:
        hint = "name each reward, such as exact-match"
        yield ConfigError(f'{shown}: "{alone[0]}" is not one of several rewards', hint=hint)
    own = [one.name for one in task.rewards if one.name != one.use]
    taken = ("names_answer", "get_reward")  # asyncrl's own part, and that of a tool class
    if wrong := [name for name in own if not re.fullmatch(r"[\w.-]+", name) or name in taken]:
        hint = f"letters, digits, _, - and dots, such as right; {' and '.join(taken)} are taken"
        yield ConfigError(f'{shown}: "{shortened(wrong[0])}" cannot be the name of a metric', hint=hint)
    if any(one.weight == 0 for one in task.rewards):
        yield ConfigError(f"{shown}: a weight is 0", hint="leave that reward out, or give it a small weight")


def holds_credentials(url: str) -> bool:
    """Whether the URL names a password, a user of HTTP (mostly a token), or a query, which may be signed."""
    protocol, _, rest = url.partition("://")
    is_token = protocol in ("http", "https") and "@" in rest.partition("/")[0]
    return is_token or "?" in url or ":" in rest.rpartition("@")[0]


def _url(url: str | None) -> Iterator[ConfigError]:
    hint = "s3://bucket/path, gs://bucket/path or file:///path"
    if url is not None and (not re.match(r"[a-z][a-z0-9+.-]*://[^/]*/?[^/]", url) or "::" in url):
        yield ConfigError(
            f"weights.url = {shortened(toml_value(url))} is not a URL of a directory", hint=hint
        )
    elif url is not None and url.startswith("memory:"):
        why = "it lies in one process, but the trainer and its workers are several"
        yield ConfigError(f"weights.url = {shortened(toml_value(url))}: {why}", hint=hint)


def _too_small_eta(profile: Profile) -> str:
    """A text that says so if eta is above 0 but too small for one whole group ahead; otherwise ""."""
    eta, window = profile.async_training.staleness_threshold, window_groups_of(profile)
    if eta == 0 or groups_ahead(profile):
        return ""
    return f"{ETA} = {eta} (floor((1 + {eta}) * W) = W = {window}: no group is generated ahead)"


def _least_eta(profile: Profile) -> str:
    """The smallest eta that admits one group ahead, rounded up."""
    least = (Decimal(1) / window_groups_of(profile)).quantize(Decimal("0.00001"), ROUND_CEILING)
    return str(least).rstrip("0").rstrip(".")


def _warnings(profile: Profile) -> Iterator[str]:
    """Settings that are allowed, but probably a mistake."""
    rollout, schedule, values = profile.rollout, Schedule.of(profile), values_of(profile)
    for key, most, why in DOUBTFUL:
        if values[key] is not None and values[key] > most:
            yield f"{key} = {values[key]:g} is a doubtful value, more than {most:g}: {why}"
    if rollout.truncates and not rollout.sampling_mask:
        how = f"top_p = {rollout.top_p:g}, top_k = {rollout.top_k}, min_p = {rollout.min_p:g}"
        why = "the sampled distribution is not the one that is trained"
        yield f"rollout.sampling_mask = false with {how}: {why}"
    algorithm, age = profile.algorithm, schedule.max_staleness
    ignores_sampling = algorithm.loss_mode == "reinforce" or algorithm.old_logprobs != "rollout"
    if age and algorithm.rollout_is == "none" and ignores_sampling:
        yield (
            f'algorithm.rollout_is = "none": data up to {counted(age, "version")} old is trained as if the '
            "current weights had sampled it, which biases the gradient and can end in a collapse"
        )
    if profile.task.answer_format == "anywhere":
        yield (
            'task.answer_format = "anywhere": any expression of a response counts as its answer, so a model '
            "can learn to repeat the prompt instead of answering it"
        )
    if too_small := _too_small_eta(profile):
        least = _least_eta(profile)
        yield f"{too_small}, as with {ETA.rpartition('.')[2]} = 0; {least} or more generates ahead"
    stall_s, calls = profile.run.stall_timeout_s, {"rollout.call_timeout_s": rollout.call_timeout_s}
    calls["trainer.step_timeout_s"] = profile.trainer.step_timeout_s
    key = max(calls, key=calls.__getitem__)
    if stall_s is not None and stall_s <= calls[key]:
        yield (
            f"run.stall_timeout_s = {stall_s:g} is not longer than {key} = {calls[key]:g}: if everything "
            "waits for a hanging call, the run ends as a stall before the call's own timeout can name it or "
            "restart its worker"
        )
    if profile.task.train_prompts is not None and profile.task.train_prompts < schedule.step_groups:
        yield (
            f"task.train_prompts = {profile.task.train_prompts} is less than R = {schedule.step_groups}: "
            "one train step contains the same prompt more than once"
        )
    if profile.trainer.warmup_steps >= schedule.optimizer_steps:
        yield (
            f"trainer.warmup_steps = {profile.trainer.warmup_steps} and the run has "
            f"{schedule.optimizer_steps} optimizer steps: the learning rate never reaches trainer.lr"
        )
