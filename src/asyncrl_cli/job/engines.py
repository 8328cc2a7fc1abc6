"""Settings -> engine and group runner. The only place in `job/` that knows which engines there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl_cli.job.settings import RolloutSettings
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.rollout.engine import Engine, Sampling


def check_engine(profile: Profile, device: str) -> None:
    """Raises PreflightError if the engine cannot run here, ConfigError if it would refuse its arguments."""
    if profile.rollout.engine == "vllm":
        from asyncrl_cli.rollout.vllm_preflight import check_vllm
        from asyncrl_cli.rollout.vllm_settings import check_engine_args

        check_vllm(device)
        if profile.rollout.engine_args:
            check_engine_args(profile.rollout.engine_args, device)


def make_engine(settings: RolloutSettings, on_running: Callable[[int], None]) -> Engine:
    """The engine, not yet started."""
    sizes: dict[str, Any] = {
        "slots": settings.slots,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "max_response_tokens": settings.max_response_tokens,
        "device": settings.device,
        "dtype": settings.dtype,
        "threads": settings.threads,
        "seed": settings.seed,
        "trust_remote_code": settings.trust_remote_code,
    }
    if settings.engine == "vllm":
        from asyncrl_cli.rollout.vllm_engine import VllmEngine
        from asyncrl_cli.rollout.vllm_settings import VllmSetup

        setup = VllmSetup(
            model_dir=settings.model_dir,
            truncated_sampling=settings.truncates,
            sleeps=settings.takes_turns_on_gpu,
            options=settings.vllm,
            **sizes,
        )
        return VllmEngine(setup, version=settings.version, on_running=on_running)
    from asyncrl_cli.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(settings.model_dir, version=settings.version, on_running=on_running, **sizes)


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
