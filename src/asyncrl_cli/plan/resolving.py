"""Fills in the defaults that follow from where a job runs, once that is known and before anything reads them.

The origin of such a value says what it follows from: `model.dtype = "bfloat16"  # default for cuda`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncrl_cli.models.shape import ModelShape
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.plan.time_limits import default_limits
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.loaded import DEFAULT, Loaded, is_default

DTYPE = "model.dtype"
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""On GPUs, float32 would mean no flash attention, no padding-free batches and twice the memory. Most CPUs
emulate bfloat16."""


def for_device(loaded: Loaded, device: str) -> Loaded:
    """With the default of `model.dtype` for the job's device. Raises ConfigError if other keys exclude it."""
    if loaded.origins.get(DTYPE) != DEFAULT:
        return loaded
    resolved = _with_values(loaded, {DTYPE: (DTYPES[device], f"{DEFAULT} for {device}")})
    check(resolved.profile)
    return resolved


def for_job(loaded: Loaded, plan: JobPlan, shape: ModelShape) -> Loaded:
    """With default time limits for this model and this number of ranks, also if an earlier attempt of the run
    had others."""
    limits = default_limits(loaded.profile, plan, shape)
    derived = {
        key: (s, f"{DEFAULT} for {why}")
        for key, (s, why) in limits.items()
        if is_default(loaded.origins.get(key, ""))
    }
    return _with_values(loaded, derived)


def _with_values(loaded: Loaded, values: Mapping[str, tuple[Any, str]]) -> Loaded:
    """With other values, and their origins, by dotted key."""
    profile = loaded.profile
    for key, (value, _) in values.items():
        section, _, name = key.partition(".")
        changed = getattr(profile, section).model_copy(update={name: value})
        profile = profile.model_copy(update={section: changed})
    return replace(
        loaded,
        profile=profile,
        origins={**loaded.origins, **{key: origin for key, (_, origin) in values.items()}},
    )
