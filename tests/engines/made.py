"""What an engine is made of, for tests: a profile and a place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl_cli.profile.schema import (
    ModelSection,
    PlacementSection,
    ProcessPlace,
    Profile,
    RolloutSection,
    WeightsSection,
)


def made_for(
    model_dir: Path | str,
    *,
    device: str = "cpu",
    dtype: Any = "float32",
    transport: Any = "object-store",
    colocate: bool = False,
    version: int = 0,
    timeout_s: float = 300.0,
    **rollout: Any,
) -> tuple[Profile, ProcessPlace]:
    """`rollout`: its keys."""
    profile = Profile(
        model=ModelSection(dtype=dtype),
        rollout=RolloutSection(**rollout),
        placement=PlacementSection(colocate=colocate),
        weights=WeightsSection(transport=transport, timeout_s=timeout_s, load_bucket_size_mb=1),
    )
    return profile, ProcessPlace(model_dir=str(model_dir), device=device, version=version)
