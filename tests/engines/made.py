"""What an engine is made of, for tests, and what it is asked: a profile and a place, prompts, sampling."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.engines.port import Sampling
from asyncrl_cli.profile.schema import (
    LoraSection,
    ModelSection,
    PlacementSection,
    ProcessPlace,
    Profile,
    RolloutSection,
    RunSection,
    TrainerSection,
    WeightsSection,
)

if TYPE_CHECKING:
    from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine


def made_for(
    model_dir: Path | str,
    *,
    device: str = "cpu",
    dtype: Any = "float32",
    transport: Any = "object-store",
    colocate: bool = False,
    version: int = 0,
    timeout_s: float = 300.0,
    deterministic: bool = False,
    lora: LoraSection | None = None,
    router_replay: bool = False,
    **rollout: Any,
) -> tuple[Profile, ProcessPlace]:
    """`rollout`: its keys."""
    profile = Profile(
        run=RunSection(deterministic=deterministic),
        model=ModelSection(dtype=dtype),
        lora=lora or LoraSection(),
        trainer=TrainerSection(router_replay=router_replay),
        rollout=RolloutSection(**rollout),
        placement=PlacementSection(colocate=colocate),
        weights=WeightsSection(transport=transport, timeout_s=timeout_s, load_bucket_size_mb=1),
    )
    return profile, ProcessPlace(model_dir=str(model_dir), device=device, version=version)


@asynccontextmanager
async def transformers_engine(
    model_dir: Path, *, slots: int = 8, max_response_tokens: int = 128, **settings: Any
) -> AsyncIterator[TransformersEngine]:
    """Started; closed at the end of the block."""
    from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine

    lengths = {"max_prompt_tokens": 64, "max_response_tokens": max_response_tokens}
    engine = TransformersEngine(*made_for(model_dir, slots=slots, **lengths, **settings))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def prompts(count: int) -> list[list[int]]:
    generator = random.Random(3)
    return [[generator.randrange(2, 64) for _ in range(generator.randrange(5, 40))] for _ in range(count)]


def sampling(max_response_tokens: int = 64, **changes: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "max_response_tokens": max_response_tokens, **changes})
