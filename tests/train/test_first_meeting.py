"""Ranks that meet, and ranks that do not come: by file, as in a local session, and by TCP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.job.rank_actors import naming_nodes
from asyncrl_cli.train.first_meeting import RanksMissing, met
from tests.free_port import free_port


def place(kind: str, tmp_path: Path) -> str:
    if kind == "file":
        return f"file://{tmp_path}/ranks"
    return f"tcp://127.0.0.1:{free_port()}"


def come(ranks: tuple[int, ...], world_size: int, point: str, timeout_s: float) -> list[BaseException | None]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        stores = [pool.submit(met, point, rank=rank, world_size=world_size, timeout_s=timeout_s) for rank in ranks]
        return [store.exception() for store in stores]


def wait_shortly(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Each rank waits for a tenth of a second, which begins once so many ranks have come: so none misses one that has."""
    came = threading.Barrier(ranks)

    def of(kind: Any) -> Any:
        class Store(kind):
            def wait(self, keys: list[str], timeout: timedelta) -> None:
                came.wait(timeout.total_seconds())
                super().wait(keys, timedelta(seconds=0.1))

        return Store

    for name in ("FileStore", "TCPStore"):
        monkeypatch.setattr(dist, name, of(getattr(dist, name)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_all_ranks_meet_or_those_that_came_name_the_others(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert come((1, 0, 2), 3, place(kind, tmp_path), 20.0) == [None] * 3
    (tmp_path / "ranks").unlink(missing_ok=True)
    wait_shortly(monkeypatch, ranks=2)
    errors = come((0, 2), 4, place(kind, tmp_path), 20.0)
    assert all(isinstance(error, RanksMissing) and error.ranks == (1, 3) for error in errors), errors


@pytest.mark.slow
def test_a_rank_that_cannot_reach_rank_0_says_so(tmp_path: Path) -> None:
    (error,) = come((1,), 2, point := place("tcp", tmp_path), 0.5)
    assert isinstance(error, ExecutorFailed)
    assert point.removeprefix("tcp://") in error.message
    assert "doctor --address" in error.hint


def test_missing_ranks_are_named_with_their_nodes() -> None:
    with pytest.raises(ExecutorFailed) as failed, naming_nodes(["10.0.0.1", "10.0.0.1", "10.0.0.7"]):
        raise RanksMissing([2], 3, 120.0)
    assert failed.value.message == (
        "rank 2 of 3 did not join the process group within trainer.meeting_timeout_s = 120 s: rank 2 on 10.0.0.7"
    )
