"""Settings -> engine and group runner. The only place in `job/` that knows which engines there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl_cli.errors import PreflightError
from asyncrl_cli.job.settings import RolloutSettings
from asyncrl_cli.rollout.engine import Engine, Sampling


def make_engine(settings: RolloutSettings, on_running: Callable[[int], None]) -> Engine:
    """The engine, not yet started. Raises PreflightError if it is not installed."""
    if settings.engine != "transformers":
        raise PreflightError(f'rollout.engine = "{settings.engine}" is not available', hint="--set rollout.engine=transformers")
    from asyncrl_cli.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(
        settings.model_dir,
        slots=settings.slots,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_response_tokens=settings.max_response_tokens,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        seed=settings.seed,
        version=settings.version,
        trust_remote_code=settings.trust_remote_code,
        on_running=on_running,
    )


def sampling_of(settings: RolloutSettings, temperature: float) -> Sampling:
    return Sampling(
        temperature=temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_response_tokens=settings.max_response_tokens,
        stop=settings.stop,
    )


def make_runner(settings: RolloutSettings, engine: Engine, rewards: Any) -> Any:
    from transformers import AutoTokenizer

    from asyncrl_cli.rollout.group_runner import GroupRunner

    tokenizer = AutoTokenizer.from_pretrained(settings.model_dir, trust_remote_code=settings.trust_remote_code)
    return GroupRunner(
        engine,
        tokenizer,
        rewards,
        sampling_of(settings, settings.temperature),
        max_prompt_tokens=settings.max_prompt_tokens,
    )
