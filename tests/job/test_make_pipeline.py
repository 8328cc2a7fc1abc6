"""What the driver gives to the loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.local_store import LocalStore

from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.job import driver_loop
from asyncrl_cli.loop.run_state import World
from asyncrl_cli.profile.loaded import load

STOP = 'rollout.stop=["END"]'


@pytest.mark.parametrize(
    ("sets", "continues"),
    [(["rollout.engine=vllm"], True), ([STOP], True), (["rollout.engine=vllm", STOP], False)],
)
def test_kept_responses_start_again_if_the_engine_would_miss_a_stop_string_that_began_in_them(
    tmp_path, monkeypatch, sets, continues
):
    given: list[World] = []
    monkeypatch.setattr(driver_loop, "Pipeline", lambda settings, world: given.append(world))
    task = SimpleNamespace(train=[{"uid": "a", "metadata": {}}], eval=[], eval_sets={}, num_overlong=0)
    checkpoint = SimpleNamespace(step=2, version=1, loop_state={})
    crew: Any = SimpleNamespace(
        trainer=SimpleNamespace(write=None), workers=[], scorers=[], payloads=[], store=LocalStore()
    )
    observers = SimpleNamespace(live=SimpleNamespace(recall=lambda evals: None))
    profile: Any = load("base", sets, environ={}).profile
    driver_loop.make_pipeline(profile, RunDirectory(tmp_path), task, crew, observers, checkpoint)  # type: ignore[arg-type]
    assert given[0].resume_from is not None
    assert given[0].resume_from.continues is continues
