"""Checks of a profile's keys against each other. Every refusal names the conflicting values and a way out.

The schema checks the type and range of each key by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.errors import ConfigError, combine
from asyncrl_cli.plugins import ENGINES, engine_kind
from asyncrl_cli.profile.arithmetic import Schedule, train_steps_of
from asyncrl_cli.profile.keys import values_of
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.profile.toml_files import shortened, toml_value
from asyncrl_cli.safe_files import check_name


@dataclass(frozen=True, slots=True)
class Clash:
    """A refused combination of keys. `values`: for each key the value, or a function that tests it."""

    values: Mapping[str, object]
    because: str
    hint: str

    def is_in(self, values: Mapping[str, Any]) -> bool:
        return all(wrong(values[key]) if callable(wrong) else values[key] == wrong for key, wrong in self.values.items())

    def error(self, values: Mapping[str, Any]) -> ConfigError:
        shown = " with ".join(f"{key} = {shortened(toml_value(values[key]))}" for key in self.values)
        return ConfigError(f"{shown}: {self.because}", hint=self.hint)


def _given(value: object) -> bool:
    return value not in (None, {})


def _positive(value: Any) -> bool:
    return value is not None and value > 0


def _one_sided(rule: str | None) -> bool:
    return rule is not None and not rule.endswith("k1")


def _band(value: object) -> bool:
    return isinstance(value, str)


def _direct(transport: object) -> bool:
    return transport in DIRECT_TRANSPORTS


def _other_than(value: object) -> Callable[[object], bool]:
    return lambda other: other != value


ETA, PARTIAL, COLOCATE = "async_training.staleness_threshold", "async_training.partial_rollout", "placement.colocate"
OLD_LOGPROBS, LOSS = "algorithm.old_logprobs", "algorithm.loss_mode"
TRANSPORT, DUAL_BUFFER = "weights.transport", "weights.dual_buffer"
CLASHES = (
    Clash(
        {PARTIAL: True, ETA: 0},
        "nothing is running at a weight sync, so no rollout can be partial",
        "--set async_training.staleness_threshold=0.5, or partial_rollout=false",
    ),
    Clash(
        {"rollout.interrupt": _given, PARTIAL: False},
        "workers finish their rollouts before they load, so there is nothing to interrupt",
        "--set async_training.partial_rollout=true, or leave rollout.interrupt out",
    ),
    Clash(
        {"async_training.max_staleness": _positive, ETA: 0},
        "nothing is generated ahead, so nothing may be stale",
        "--set async_training.max_staleness=0, or a staleness_threshold above 0",
    ),
    Clash(
        {"async_training.on_stale": _other_than("wait"), ETA: 0},
        "no group can become stale",
        "--set async_training.on_stale=wait, or a staleness_threshold above 0",
    ),
    Clash(
        {COLOCATE: True, ETA: _positive},
        "trainer and rollout take turns on the same resources, so nothing can be generated ahead",
        "--set async_training.staleness_threshold=0, or placement.colocate=false",
    ),
    *(
        Clash(
            {"async_training.use_rollout_log_probs": alias, "algorithm.old_logprobs": _other_than(name)},
            "they are two names for the same setting and disagree",
            'give one of the two (true is "rollout", false is "recompute")',
        )
        for alias, name in ((True, "rollout"), (False, "recompute"))
    ),
    Clash(
        {"algorithm.rollout_is_threshold": _given, OLD_LOGPROBS: "rollout", LOSS: _other_than("reinforce")},
        "the proximal policy is the sampler, so every weight is 1 and no threshold matters",
        "--set algorithm.old_logprobs=recompute, or leave algorithm.rollout_is_threshold out",
    ),
    *(
        Clash(
            {"algorithm.rollout_is_batch_normalize": True, OLD_LOGPROBS: wrong},
            "the mean weight of an optimizer step is needed before its first loss, when only a recomputed prox is there",
            "--set algorithm.old_logprobs=recompute, or algorithm.rollout_is_batch_normalize=false",
        )
        for wrong in ("rollout", "loglinear")
    ),
    Clash(
        {"algorithm.rollout_is_batch_normalize": True, LOSS: "reinforce"},
        "its weights are of the policy in training, which is not known before its first loss",
        "--set algorithm.loss_mode=vanilla, or algorithm.rollout_is_batch_normalize=false",
    ),
    Clash(
        {"algorithm.rollout_rs": _given, "algorithm.rollout_rs_threshold": None},
        "nothing says what is too far",
        '--set algorithm.rollout_rs_threshold=0.01 (k2, k3), or "0.5_2.0" (k1)',
    ),
    Clash(
        {"algorithm.rollout_rs": None, "algorithm.rollout_rs_threshold": _given},
        "nothing is judged by it",
        "--set algorithm.rollout_rs=seq_mean_k3, or leave algorithm.rollout_rs_threshold out",
    ),
    Clash(
        {
            "algorithm.rollout_rs": lambda rule: rule is not None and not rule.endswith("k1"),
            "algorithm.rollout_rs_threshold": _band,
        },
        "k2 and k3 are never negative, so they have an upper bound only",
        "--set algorithm.rollout_rs_threshold=0.01, or a k1 rule",
    ),
    Clash(
        {"algorithm.clip_ratio_c": _given, LOSS: _other_than("vanilla")},
        "only the loss vanilla has a dual clip",
        "--set algorithm.loss_mode=vanilla, or leave algorithm.clip_ratio_c out",
    ),
    Clash(
        {TRANSPORT: _direct, "placement.device": _other_than("cuda")},
        "the bytes go from GPU memory to GPU memory",
        "--set placement.device=cuda, or --set weights.transport=object-store",
    ),
    Clash(
        {TRANSPORT: "nccl", COLOCATE: True},
        "NCCL connects GPUs, and the trainer and its rollout worker share one",
        "--set weights.transport=ipc, or --set placement.colocate=false",
    ),
    Clash(
        {TRANSPORT: "ipc", COLOCATE: False},
        "only a process that computes on the same GPU can map the trainer's GPU memory",
        "--profile colocate --set placement.device=cuda, or --set weights.transport=nccl",
    ),
    Clash(
        {DUAL_BUFFER: False, TRANSPORT: _direct},
        "the bytes come within the load, so there is no second buffer to do without",
        "--set weights.dual_buffer=true, or --set weights.transport=object-store",
    ),
    Clash(
        {"weights.probe_sequences": 0, TRANSPORT: _direct},
        "no fingerprint is compared on a GPU, so wrong weights would go unnoticed",
        "--set weights.probe_sequences=4, or --set weights.transport=object-store",
    ),
    Clash(
        {DUAL_BUFFER: False, TRANSPORT: "disk"},
        "what is read from files takes memory until it is loaded, so it is a second buffer",
        "--set weights.dual_buffer=true, or weights.transport=object-store",
    ),
)


ENGINE = "rollout.engine"
ENGINE_KEYS = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "enforce_eager", "engine_args")
"""Keys of [rollout] that only some engines know."""


def _engine_clashes(kind: Any) -> Iterator[Clash]:
    """What an engine cannot do, as its `EngineKind` says. Engines are looked up by name: this module imports none."""
    for key in (f"rollout.{key}" for key in ENGINE_KEYS if key not in kind.keys):
        knows = next(name for name in ENGINES if key.removeprefix("rollout.") in engine_kind(name).keys)
        hint = f"--set rollout.engine={knows}, or leave {key} out"
        yield Clash({key: _given, ENGINE: _given}, "this engine does not know the key", hint)
    for transport in (transport for transport in DIRECT_TRANSPORTS if transport not in kind.direct_transports):
        able = next(name for name in ENGINES if transport in engine_kind(name).direct_transports)
        yield Clash(
            {TRANSPORT: transport, ENGINE: _given},
            "the bytes go into an engine's own processes on a GPU, and it has none that take them",
            f"--set rollout.engine={able}, or --set weights.transport=object-store",
        )
    if not kind.loads_in_place:
        able = next(name for name in ENGINES if engine_kind(name).loads_in_place)
        yield Clash(
            {DUAL_BUFFER: False, ENGINE: _given, TRANSPORT: lambda transport: not _direct(transport)},
            "it reads new weights from memory that holds all of a version at once, so there is always a second buffer",
            f"--set weights.dual_buffer=true, or rollout.engine={able}",
        )


def check(profile: Profile) -> list[str]:
    """Check a whole profile. Returns the warnings; raises one ConfigError for all conflicts."""
    values = values_of(profile)
    clashes, conflicts = [*CLASHES], list[ConfigError]()
    try:
        kind = engine_kind(profile.rollout.engine)
        clashes += _engine_clashes(kind)
        conflicts += kind.conflicts(profile)
    except ConfigError as unknown:
        conflicts.append(unknown)
    length = _raised(train_steps_of, profile)
    name = [] if profile.run.name is None else _raised(check_name, profile.run.name)
    wrong = [clash.error(values) for clash in clashes if clash.is_in(values)]
    if problems := [*length, *name, *_sizes(profile), *wrong, *conflicts]:
        raise combine(problems)
    return list(_warnings(profile))


def _raised(rule: Callable[[Any], object], value: Any) -> list[ConfigError]:
    try:
        rule(value)
    except ConfigError as error:
        return [error]
    return []


def _sizes(profile: Profile) -> Iterator[ConfigError]:
    training, rollout = profile.async_training, profile.rollout
    least = math.ceil(training.staleness_threshold)
    if training.max_staleness is not None and training.max_staleness < least:
        yield ConfigError(
            f"async_training.max_staleness = {training.max_staleness} is less than ceil(staleness_threshold) = "
            f"ceil({training.staleness_threshold}) = {least}: groups admitted that far ahead are that old when they are trained",
            hint=f"--set async_training.max_staleness={least}, or a smaller async_training.staleness_threshold",
        )
    buffer = profile.algorithm.overlong_buffer_tokens
    if buffer is not None and buffer >= rollout.max_response_tokens:
        yield ConfigError(
            f"algorithm.overlong_buffer_tokens = {buffer} is not less than rollout.max_response_tokens = "
            f"{rollout.max_response_tokens}: every response would be punished for its length",
            hint=f"--set algorithm.overlong_buffer_tokens={max(rollout.max_response_tokens // 4, 1)}",
        )
    spread = rollout.workers or 1 if rollout.placement == "response" else 1
    if rollout.slots * spread < rollout.n:
        where = f" on {spread} workers" if spread > 1 else ""
        yield ConfigError(
            f"rollout.slots = {rollout.slots}{where} is less than rollout.n = {rollout.n}: a group never finds room",
            hint=f"--set rollout.slots={-(-rollout.n // spread)} or more",
        )


def _warnings(profile: Profile) -> Iterator[str]:
    """What is allowed, but probably not meant."""
    rollout, schedule = profile.rollout, Schedule.of(profile)
    for key, value, off in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, 0)):
        if value != off:
            yield f"rollout.{key} = {value}: the sampled distribution is not the one that is trained"
    algorithm, age = profile.algorithm, schedule.max_staleness
    if age and algorithm.rollout_is == "none" and (algorithm.loss_mode == "reinforce" or algorithm.old_logprobs != "rollout"):
        yield (
            f'algorithm.rollout_is = "none": data up to {age} versions old is trained as if the current weights had sampled it, '
            "which biases the gradient and can end in a collapse"
        )
    stall_s, call_s = profile.run.stall_timeout_s, rollout.call_timeout_s
    if stall_s is not None and stall_s <= call_s:
        yield (
            f"run.stall_timeout_s = {stall_s:g} is not longer than rollout.call_timeout_s = {call_s:g}: where all wait for a call "
            "that hangs, the run ends as a stall before the call's own limit names it or restarts its worker"
        )
    if profile.task.train_prompts is not None and profile.task.train_prompts < schedule.step_groups:
        yield (
            f"task.train_prompts = {profile.task.train_prompts} is less than R = {schedule.step_groups}: "
            "one train step holds the same prompt more than once"
        )
    if profile.trainer.warmup_steps >= schedule.optimizer_steps:
        yield (
            f"trainer.warmup_steps = {profile.trainer.warmup_steps} and the run has "
            f"{schedule.optimizer_steps} optimizer steps: the learning rate never reaches trainer.lr"
        )
