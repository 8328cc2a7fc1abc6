"""A start that fails: its name is free again, and what a resume needs stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.local_store import LocalStore

from asyncrl_cli.base.errors import ExecutorFailed, PreflightError
from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.job import driver_crew, driver_run
from asyncrl_cli.job.driver_ranks import RayTrainer
from asyncrl_cli.job.driver_run import Run

from .crew import small_profile


def test_a_start_that_fails_gives_the_runs_name_free_and_keeps_its_logs(tmp_path, monkeypatch):
    seen: list[list[str]] = []

    async def prepare(*args: Any) -> Any:
        task = SimpleNamespace(reward=None, tool_class=None, scorers={}, user_code={}, train=(), notes=())
        return task, tmp_path, {}

    @contextlib.contextmanager
    def ray_session(*args: Any, **kwargs: Any) -> Iterator[Any]:
        yield SimpleNamespace(device="cpu", warnings=())

    @contextlib.asynccontextmanager
    async def started_crew(*args: Any, **kwargs: Any) -> AsyncIterator[None]:
        seen.append(sorted(path.name for path in (tmp_path / "runs").iterdir()))
        raise ExecutorFailed("rollout-0 failed: out of memory")
        yield

    monkeypatch.setattr(driver_run, "prepare", prepare)
    monkeypatch.setattr(driver_run, "ray_session", ray_session)
    monkeypatch.setattr(driver_crew, "started_crew", started_crew)
    for _ in range(2):
        run = Run(small_profile(), runs_dir=tmp_path / "runs", name="otter", ui="none")
        with pytest.raises(ExecutorFailed, match="out of memory") as failed:
            asyncio.run(run.run())
    assert seen == [["otter"], [".otter-failed-start", "otter"]]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".otter-failed-start"]
    assert str(tmp_path / "runs" / ".otter-failed-start") in failed.value.hint
    assert (tmp_path / "runs" / ".otter-failed-start" / "attempt-1" / "driver.log").exists()


def test_a_resume_that_is_refused_leaves_no_attempt(tmp_path, monkeypatch):
    async def prepare(*args: Any) -> Any:
        raise PreflightError("there is no such model")

    monkeypatch.setattr(driver_run, "prepare", prepare)
    directory = RunDirectory.create(tmp_path, "otter", profile_toml="", resolved={})
    directory.start_attempt()
    directory.status.write_text("{}")
    directory.close()
    before = sorted(tmp_path.rglob("*"))
    checkpoint: Any = SimpleNamespace(directory=tmp_path / "otter" / "checkpoints" / "step-000001")
    for _ in range(2):
        with pytest.raises(PreflightError, match="no such model"):
            asyncio.run(Run(small_profile(), ui="none", checkpoint=checkpoint).run())
    assert sorted(tmp_path.rglob("*")) == before
    assert os.readlink(directory.logs / "latest") == "attempt-1"


def test_a_stop_does_not_wait_for_a_dump_that_hangs(caplog, tmp_path):
    async def hang() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        trainer = RayTrainer(list, small_profile(), LocalStore(), samples_dir=tmp_path)
        await trainer.begin_dump(1, hang)
        await trainer.stop(0.01)

    asyncio.run(main())
    assert "dump of samples was still being written" in caplog.text
