"""Ranks that meet, and ranks that do not come: by file, as in a local session, and by TCP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.job.rank_host import naming_nodes
from asyncrl_cli.train.ranks import RanksMissing, first_collective, meet
from tests.free_port import free_port


def place(kind: str, tmp_path: Path) -> str:
    if kind == "file":
        return f"file://{tmp_path}/ranks"
    return f"tcp://127.0.0.1:{free_port()}"


def come(ranks: tuple[int, ...], world_size: int, point: str, timeout_s: float) -> list[BaseException | None]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        stores = [
            pool.submit(meet, point, rank=rank, world_size=world_size, timeout_s=timeout_s) for rank in ranks
        ]
        return [store.exception() for store in stores]


def wait_shortly(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Each rank waits for a tenth of a second, which begins once so many ranks have come: so none misses one
    that has."""
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
def test_all_ranks_meet_or_those_that_came_name_the_others(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(("others", "named"), [((), "none of them"), ((0, 2), "not rank 1 of 3")])
def test_a_first_sum_that_blocks_within_the_call_ends_in_time_and_names_who_did_not_finish(
    others: tuple[int, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's does, which makes its communicator there."""
    never, store = threading.Event(), dist.FileStore(str(tmp_path / "ranks"), 3)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: never.wait())
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    for other in others:
        store.set(f"summed/{other}", "")
    with pytest.raises(
        ExecutorFailed, match=rf"but {named} finished the first sum over nccl within .* = 0.05 s"
    ):
        first_collective(torch.device("cpu"), store, rank=1, world_size=3, timeout_s=0.05)
    never.set()


def test_an_error_of_the_first_sum_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensor: torch.Tensor) -> None:
        raise dist.DistBackendError("no socket")

    monkeypatch.setattr(dist, "all_reduce", fails)
    with pytest.raises(dist.DistBackendError, match="no socket"):
        first_collective(
            torch.device("cpu"),
            dist.FileStore(str(tmp_path / "ranks"), 1),
            rank=0,
            world_size=1,
            timeout_s=60,
        )


def test_missing_ranks_are_named_with_their_nodes() -> None:
    with pytest.raises(ExecutorFailed) as failed, naming_nodes(["10.0.0.1", "10.0.0.1", "10.0.0.7"]):
        raise RanksMissing([2], 3, 120.0)
    assert failed.value.message == (
        "rank 2 of 3 did not join the process group within trainer.meeting_timeout_s = 120 s: rank 2 on "
        "10.0.0.7"
    )
