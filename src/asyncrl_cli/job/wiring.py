"""A profile's numbers in the form that each room takes them: the loop's settings, the observers' facts, the checkpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.checkpoint.files import telling_storage
from asyncrl_cli.errors import StorageError
from asyncrl_cli.loop.settings import LoopSettings
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.weights.limits import LOOP_MARGIN_S, load_s

if TYPE_CHECKING:
    from asyncrl_cli.checkpoint.store import CheckpointStore
    from asyncrl_cli.loop.ports import Cut, Interrupt, Trainer
    from asyncrl_cli.observe.live_status import RunFacts

STALL_MARGIN_S = 60.0
MAX_LOGPROB_DIFF = {"float32": 1e-3, "bfloat16": 0.1}
"""Bfloat16 rounds logits from 8 to 16 to sixteenths, on both sides and before them in every layer."""


def loop_settings(profile: Profile, workers: int = 1) -> LoopSettings:
    """`workers`: of the job, by its plan; with some transports their loads wait for each other."""
    schedule, training = Schedule.of(profile), profile.async_training
    return LoopSettings(
        seed=profile.run.seed,
        step_groups=schedule.step_groups,
        window_steps=schedule.window_steps,
        train_steps=schedule.train_steps,
        eta=Fraction(schedule.eta),
        max_staleness=schedule.max_staleness,
        n=profile.rollout.n,
        colocate=profile.placement.colocate,
        interrupt=interrupt_of(profile),
        on_stale=training.on_stale,
        max_requeues=training.max_requeues,
        on_exhausted=training.on_exhausted,
        prefetch_groups=profile.rollout.prefetch_groups,
        max_restarts=profile.rollout.max_restarts,
        call_timeout_s=profile.rollout.call_timeout_s,
        max_failed_ratio=profile.task.max_failed_ratio,
        max_skipped_steps=profile.trainer.max_skipped_steps,
        max_logprob_diff=profile.weights.max_logprob_diff or MAX_LOGPROB_DIFF[profile.model.dtype],
        checkpoint_every_steps=profile.checkpoint.every_steps,
        eval_every_versions=profile.eval.every_versions,
        eval_timeout_s=profile.eval.timeout_s,
        sync_timeout_s=_sync_timeout_s(profile, workers),
        weights_mode=profile.weights.mode,
        stop_grace_s=profile.run.stop_grace_s,
        stall_timeout_s=_stall_timeout_s(profile, workers),
    )


def _sync_timeout_s(profile: Profile, workers: int) -> float:
    drain_s = profile.rollout.call_timeout_s if interrupt_of(profile) == "drain" else 0.0
    timeout_s = profile.weights.timeout_s
    if profile.weights.transport in DIRECT_TRANSPORTS:
        timeout_s = load_s(timeout_s, workers) + LOOP_MARGIN_S
    return timeout_s + drain_s


def _stall_timeout_s(profile: Profile, workers: int) -> float:
    """The watchdog is for what nothing else bounds: it waits until every call to a worker, and every load, has had its time."""
    if profile.run.stall_timeout_s is not None:
        return profile.run.stall_timeout_s
    return max(profile.rollout.call_timeout_s, profile.eval.timeout_s, _sync_timeout_s(profile, workers)) + STALL_MARGIN_S


def interrupt_of(profile: Profile) -> Interrupt:
    """What a load does to a worker's running rollouts: without partial rollouts they finish first."""
    return (profile.rollout.interrupt or "keep-kv") if profile.async_training.partial_rollout else "drain"


def run_facts(profile: Profile, run_dir: Path, attempt: int) -> RunFacts:
    from asyncrl_cli.observe.live_status import RunFacts

    schedule = Schedule.of(profile)
    return RunFacts(
        name=run_dir.name,
        profile=profile.name,
        mode=schedule.mode,
        run_dir=str(run_dir),
        train_steps=schedule.train_steps,
        step_groups=schedule.step_groups,
        window_groups=schedule.window_groups,
        trigger_parameter_sync_step=schedule.window_steps,
        max_staleness=schedule.max_staleness,
        on_stale=profile.async_training.on_stale,
        attempt=attempt,
    )


class RunCheckpoints:
    """Implements `loop.ports.CheckpointWriter`: the store's directory, the trainer's part written by the trainer."""

    def __init__(self, store: CheckpointStore, trainer: Trainer) -> None:
        self._store = store
        self._trainer = trainer

    async def write(self, cut: Cut) -> Path:
        try:
            with telling_storage():
                return await self._store.write(cut, self._write_trainer(cut))
        except StorageError as error:
            raise StorageError(f"the checkpoint of step {cut.step} cannot be written: {error.message}", hint=error.hint) from error

    def _write_trainer(self, cut: Cut) -> Callable[[Path], Awaitable[Any]]:
        with_published = not cut.at_window_boundary
        return lambda directory: self._trainer.write(cut.step, directory, cut.payloads, with_published)
