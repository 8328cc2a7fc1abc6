"""A small task with demonstrations, and a builtin:tiny taught by it for a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_cli.models.model_directory import resolve_model
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.task import Task, load_task


def tiny_profile(cache: Path | str, *, steps: int = 2, **fields) -> Profile:
    task = {"train_prompts": 40, **fields.pop("task", {})}
    model = {"warm_start_steps": steps, "cache_dir": str(cache), **fields.pop("model", {})}
    return Profile.model_validate({"task": task, "model": model, "eval": {"prompts": 10}, **fields})


@pytest.fixture(scope="session")
def task() -> Task:
    return load_task(tiny_profile("unused"))


@pytest.fixture(scope="session")
def built(task, tmp_path_factory) -> Path:
    return resolve_model(tiny_profile(tmp_path_factory.mktemp("models")), task)
