"""Loop settings from short keywords, for tests."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from asyncrl_cli.profile.arithmetic import LoopSettings, Schedule
from asyncrl_cli.profile.schema import Profile

KEYS = {
    "seed": "run.seed",
    "deterministic": "run.deterministic",
    "max_response_tokens": "rollout.max_response_tokens",
    "train_steps": "run.train_steps",
    "stop_grace_s": "run.stop_grace_s",
    "stall_timeout_s": "run.stall_timeout_s",
    "step_groups": "trainer.ppo_mini_batch_size",
    "max_skipped_steps": "trainer.max_skipped_steps",
    "window_steps": "async_training.trigger_parameter_sync_step",
    "eta": "async_training.staleness_threshold",
    "target_kl": "async_training.target_kl",
    "max_staleness": "async_training.max_staleness",
    "on_stale": "async_training.on_stale",
    "max_requeues": "async_training.max_requeues",
    "on_exhausted": "async_training.on_exhausted",
    "mixed_versions": "async_training.mixed_versions",
    "n": "rollout.n",
    "hold_slots": "rollout.hold_slots",
    "prefetch_groups": "rollout.prefetch_groups",
    "placement": "rollout.placement",
    "max_restarts": "rollout.max_restarts",
    "min_workers": "rollout.min_workers",
    "call_timeout_s": "rollout.call_timeout_s",
    "colocate": "placement.colocate",
    "lend": "placement.lend",
    "filter_groups": "algorithm.filter_groups",
    "max_num_gen_batches": "algorithm.max_num_gen_batches",
    "max_failed_ratio": "task.max_failed_ratio",
    "max_logprob_diff": "weights.max_logprob_diff",
    "weights_mode": "weights.mode",
    "checkpoint_every_steps": "checkpoint.every_steps",
    "eval_every_versions": "eval.every_versions",
    "eval_timeout_s": "eval.timeout_s",
    "samples_per_prompt": "eval.samples_per_prompt",
}
PLAIN = dict(
    seed=0, checkpoint_every_steps=0, eval_every_versions=0, stall_timeout_s=300.0, sync_timeout_s=300.0
)


def loop_settings(**keywords: Any) -> LoopSettings:
    """`KEYS` says which keys they are; `interrupt` is two, and `sync_timeout_s` follows from some: it is what
    comes out."""
    return changed(LoopSettings.of(Profile.model_validate({"run": {"train_steps": 1}})), **(PLAIN | keywords))


def changed(settings: LoopSettings, **keywords: Any) -> LoopSettings:
    tables: dict[str, dict[str, Any]] = settings.profile.model_dump(exclude_unset=True)
    sync_timeout_s = keywords.pop("sync_timeout_s", settings.sync_timeout_s)
    if "interrupt" in keywords:
        interrupt = keywords.pop("interrupt")
        tables.setdefault("async_training", {})["partial_rollout"] = interrupt != "drain"
        tables.setdefault("rollout", {})["interrupt"] = None if interrupt == "drain" else interrupt
    for name, value in keywords.items():
        section, key = KEYS[name].split(".")
        tables.setdefault(section, {})[key] = _decimal(value) if name == "eta" else value
    profile = Profile.model_validate(tables)
    made = LoopSettings(profile=profile, schedule=Schedule.of(profile), load_timeout_s=sync_timeout_s)
    return replace(made, load_timeout_s=2 * sync_timeout_s - made.sync_timeout_s)


def _decimal(eta: Fraction | float) -> Decimal:
    return (
        Decimal(eta.numerator) / Decimal(eta.denominator) if isinstance(eta, Fraction) else Decimal(str(eta))
    )
