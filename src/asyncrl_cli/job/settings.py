"""What a rollout actor needs of the profile, as one picklable value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from asyncrl_cli.engines.vllm.settings import VllmOptions, VllmSetup
from asyncrl_cli.plan.job_plan import ROLLOUT, JobPlan, tensor_parallel_size
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.reward_spec import RewardSpec

BYTES_PER_MB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """See the profile's fields of the same names. `version` is that of the weights in `model_dir`."""

    model_dir: str
    engine: str
    dtype: str
    trust_remote_code: bool
    device: str
    threads: int
    slots: int
    max_prompt_tokens: int
    max_response_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    eval_temperature: float
    seed: int
    version: int
    reward: RewardSpec
    reward_timeout_s: float
    reward_workers: int | None
    environment: str
    load_bucket_size_bytes: int
    weights_timeout_s: float = 300.0
    workers: int = 1
    takes_turns_on_gpu: bool = False
    transport: str = "object-store"
    overlap: bool = True
    dual_buffer: bool = True
    vllm: VllmOptions = field(default_factory=VllmOptions)

    @property
    def truncates(self) -> bool:
        """Top-p or top-k is on."""
        return self.top_p < 1 or self.top_k > 0

    @classmethod
    def from_profile(
        cls, profile: Profile, plan: JobPlan, *, model_dir: Path | str, reward: RewardSpec, version: int
    ) -> RolloutSettings:
        rollout = profile.rollout
        return cls(
            model_dir=str(model_dir),
            engine=rollout.engine,
            dtype=profile.model.dtype,
            trust_remote_code=profile.model.trust_remote_code,
            device=plan.device,
            threads=plan.role(ROLLOUT).threads,
            slots=rollout.slots,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
            eval_temperature=profile.eval.temperature,
            seed=profile.run.seed,
            version=version,
            reward=reward,
            reward_timeout_s=profile.task.reward_timeout_s,
            reward_workers=profile.task.reward_workers,
            environment=profile.task.environment,
            load_bucket_size_bytes=profile.weights.load_bucket_size_mb * BYTES_PER_MB,
            weights_timeout_s=profile.weights.timeout_s,
            workers=plan.role(ROLLOUT).workers,
            takes_turns_on_gpu=plan.colocate and plan.device == "cuda",
            transport=profile.weights.transport,
            overlap=profile.weights.overlap,
            dual_buffer=profile.weights.dual_buffer,
            vllm=_vllm_options(profile, plan.device),
        )


def planned_vllm(profile: Profile, device: str) -> VllmSetup:
    """What vLLM will be started with, as far as it follows from the profile: for a plan, and to refuse arguments early."""
    return VllmSetup(
        model_dir=profile.model.path,
        slots=profile.rollout.slots,
        max_prompt_tokens=profile.rollout.max_prompt_tokens,
        max_response_tokens=profile.rollout.max_response_tokens,
        device=device,
        dtype=profile.model.dtype,
        sleeps=profile.placement.colocate and device == "cuda",
        options=_vllm_options(profile, device),
    )


def _vllm_options(profile: Profile, device: str) -> VllmOptions:
    rollout = profile.rollout
    return VllmOptions(
        tensor_parallel_size=tensor_parallel_size(profile, device),
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        max_model_len=rollout.max_model_len,
        enforce_eager=rollout.enforce_eager,
        engine_args=rollout.engine_args,
    )
