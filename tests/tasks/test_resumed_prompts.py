"""What a resumed run rewards: the very items of the task, whatever values they hold, and not what JSON makes
of them."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tests.loop.proof.memory import resume_from
from tests.loop.worlds import run_world, settings

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.contracts.item import make_item
from asyncrl_cli.job.driver_prompts import PromptFeed
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from asyncrl_cli.tasks.task import load_task


@pytest.fixture
def requested(monkeypatch) -> list[Any]:
    """Items of all groups that workers were given, in order."""
    items: list[Any] = []
    submit = SimulatedWorker.submit

    def recording(self: SimulatedWorker, request: Any) -> None:
        items.append(request.item)
        submit(self, request)

    monkeypatch.setattr(SimulatedWorker, "submit", recording)
    return items


def parquet_items(directory: Path) -> tuple[Any, ...]:
    day = datetime.date(2026, 1, 2)
    row = {
        "at": datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
        "day": day,
        "price": Decimal("1.50"),
        "raw": b"\x00\xff",
    }
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), **row, "nested": [{"key": row}]} for i in range(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / "data.parquet")
    profile = Profile.model_validate(
        {"task": {"source": f"parquet:{directory}/data.parquet"}, "eval": {"prompts": 0}}
    )
    return tuple(load_task(profile).train)


def items_with_tuples(directory: Path) -> tuple[Any, ...]:
    """As `arc_agi` has: its verifier compares a right answer's tuples with them, and lists are not equal."""
    return tuple(
        make_item(str(i), "1", {"entry": {"metadata": {"output": ((i, 1), (2, 3))}}}) for i in range(100)
    )


@pytest.mark.parametrize("make_items", [parquet_items, items_with_tuples])
def test_a_resumed_run_gives_its_workers_the_items_of_the_task(tmp_path, requested, make_items):
    items = make_items(tmp_path)
    loop_settings = settings("partial-rollout", train_steps=14)
    first = run_world(loop_settings, feed=PromptFeed(items, seed=0))
    assert first.error is None
    frozen, state = next(
        snapshot for snapshot in first.checkpoints.snapshots if snapshot[1]["groups"]["running"]
    )
    requested.clear()
    resumed = resume_from(frozen, state)
    assert run_world(loop_settings, feed=PromptFeed(items, seed=0), resume_from=resumed).error is None
    assert requested
    assert {id(item) for item in requested} <= {id(item) for item in items}


def test_a_checkpoint_does_not_grow_with_its_items(tmp_path):
    small, large = (
        run_world(
            settings("partial-rollout"), feed=PromptFeed(padded_items(tmp_path, num), seed=0)
        ).checkpoints.snapshots[1][1]
        for num in (10, 10_000)
    )
    assert abs(len(json.dumps(large)) - len(json.dumps(small))) < 1000


def padded_items(directory: Path, num_chars: int) -> tuple[Any, ...]:
    path = directory / f"{num_chars}.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": str(i), "answer": "1", "text": "x" * num_chars}) + "\n" for i in range(100)
        )
    )
    return tuple(
        load_task(Profile.model_validate({"task": {"source": f"jsonl:{path}"}, "eval": {"prompts": 0}})).train
    )


def test_a_checkpoint_that_holds_items_is_refused_with_the_way_out():
    ran = run_world(settings("partial-rollout"))
    frozen, state = ran.checkpoints.snapshots[1]
    with pytest.raises(RefusedError, match="schema_version 1; this asyncrl reads 2") as refused:
        run_world(
            settings("partial-rollout"), resume_from=resume_from(frozen, {**state, "schema_version": 1})
        )
    assert "the version of asyncrl that started the run" in refused.value.hint
