"""Makes real runs for benchmarks: each as a user would start it, or many in one Ray session."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.run.commands import arguments

from asyncrl_cli.job import driver_run as run_module
from asyncrl_cli.job.driver_loop import RunResult
from asyncrl_cli.job.ray.session import ray_session
from asyncrl_cli.models.model_directory import resolve_model
from asyncrl_cli.plan.cluster import local_cluster
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.task import load_task

LIMIT_S = 3600.0


def train(profile: str, name: str, sets: Sequence[str], runs_dir: Path, **environment: str) -> Path:
    """`asyncrl train` in a child process, without a screen. Returns the run's directory. Raises
    subprocess.SubprocessError."""
    words = ("--profile", profile, "--name", name, "--runs-dir", str(runs_dir), "--ui", "none")
    asked = arguments("train", *words, sets=tuple(sets), verbose=False)
    subprocess.run(
        asked, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL, env=os.environ | environment
    )
    return runs_dir / name


@contextmanager
def shared_session(profile: Profile) -> Iterator[None]:
    """`train_here` in the block uses one Ray session, made for `profile`, the one that needs most."""
    own = run_module.ray_session

    @contextmanager
    def as_it_is(profile: Profile, **_: Any) -> Iterator[JobPlan]:
        yield compile_job(profile, local_cluster())

    with ray_session(profile, model_dir=resolve_model(profile, load_task(profile))):
        run_module.ray_session = as_it_is
        try:
            yield
        finally:
            run_module.ray_session = own


def train_here(profile: Profile, name: str, runs_dir: Path) -> RunResult:
    """A run in this process, in place of an older one of that name. Raises AsyncrlError as `Run.run`."""
    shutil.rmtree(runs_dir / name, ignore_errors=True)
    return asyncio.run(run_module.Run(profile, runs_dir=runs_dir, name=name, ui="none").run())
