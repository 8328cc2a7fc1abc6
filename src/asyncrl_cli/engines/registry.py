"""Settings -> engine and group runner. The only place in `job/` that knows which engines there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl_cli.engines.port import Engine, Sampling
from asyncrl_cli.job.settings import RolloutSettings, planned_vllm
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile


def check_engine(profile: Profile, device: str, *, is_elsewhere: bool = False) -> None:
    """Raises PreflightError if the engine cannot run here, ConfigError if it would refuse its arguments.

    `is_elsewhere`: the workers run on the nodes of a cluster, and each looks on its own node when it starts.
    """
    if profile.rollout.engine == "vllm":
        from asyncrl_cli.engines.vllm.preflight import check_stray_packages, check_vllm

        if is_elsewhere:
            check_stray_packages()
        else:
            check_vllm(device)
            check_arguments(profile, device)


def check_arguments(profile: Profile, device: str) -> None:
    """ConfigError for arguments that vLLM would refuse, as far as that can be told without importing it."""
    from asyncrl_cli.engines.vllm.arguments import names_in_source
    from asyncrl_cli.engines.vllm.settings import check_engine_args

    if profile.rollout.engine == "vllm":
        setup = planned_vllm(profile, device)
        check_engine_args(setup, names_in_source() if profile.rollout.engine_args else None)


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
        from asyncrl_cli.engines.vllm.preflight import check_vllm

        check_vllm(settings.device)  # on this worker's own node
        from asyncrl_cli.engines.vllm.engine import VllmEngine
        from asyncrl_cli.engines.vllm.plugin import BACKEND
        from asyncrl_cli.engines.vllm.settings import VllmSetup

        setup = VllmSetup(
            model_dir=settings.model_dir,
            truncated_sampling=settings.truncates,
            sleeps=settings.takes_turns_on_gpu,
            weight_backend=settings.transport if settings.transport in DIRECT_TRANSPORTS else BACKEND,
            options=settings.vllm,
            **sizes,
        )
        return VllmEngine(setup, version=settings.version, on_running=on_running)
    from asyncrl_cli.engines.transformers.engine import TransformersEngine

    return TransformersEngine(settings.model_dir, version=settings.version, on_running=on_running, **sizes)


def sampling_of(settings: RolloutSettings, temperature: float) -> Sampling:
    return Sampling(
        temperature=temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_response_tokens=settings.max_response_tokens,
        stop=settings.stop,
    )
