"""A checkpoint is data: whatever its files say, nothing is run, nothing else is read, and what does not fit
is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.train.trainer_state import COUNTERS_FILE, SavedState, rank_file
from tests.trainers import save, trainer_parts

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DTYPES += [torch.int64, torch.int32, torch.uint8, torch.bool]
Places = dict[str, tuple[int, int]]


class Payload:
    """Unpickled, it makes a file: what an attacker would put into a checkpoint."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (os.system, (f"touch {self.target}",))


def whole() -> dict[str, torch.Tensor]:
    return {f"weight/{dtype}": torch.arange(14).reshape(7, 2).to(dtype) for dtype in DTYPES} | {
        "empty": torch.zeros(0)
    }


def write_rank(directory: Path, rank: int, tensors: dict[str, torch.Tensor], places: object) -> None:
    save_file(tensors, rank_file(directory, rank), metadata={"rows": json.dumps(places)})


def write_counters(directory: Path, ranks: int, **changed: int) -> None:
    counters = {"schema_version": 2, "ranks": ranks, "step": 0, "optimizer_steps": 0, "has_window_first": 0}
    (directory / COUNTERS_FILE).write_text(json.dumps(counters | changed))


@pytest.fixture
def directory(tmp_path):
    """A state of three ranks, which have three, three and one rows."""
    for rank, (begin, end) in enumerate([(0, 3), (3, 6), (6, 7)]):
        rows = {name: tensor[begin:end].clone() for name, tensor in whole().items()}
        write_rank(tmp_path, rank, rows, {name: (begin, len(tensor)) for name, tensor in whole().items()})
    write_counters(tmp_path, 3)
    return tmp_path


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_rows_are_read_back_by_any_number_of_ranks(directory, parts):
    saved = SavedState(directory)
    assert saved.shapes == {name: tuple(tensor.shape) for name, tensor in whole().items()}
    for name, expected in whole().items():
        first = 0
        for part in expected.chunk(parts):
            found = torch.empty_like(part)
            saved.read(name, found, first)
            assert torch.equal(found, part)
            first += len(part)


def test_a_state_that_torch_pickled_is_refused_and_runs_nothing(tmp_path, directory):
    marker = tmp_path / "marker"
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save({"weight/w": torch.ones(2)}, checkpoint_id=directory, no_dist=True)
    metadata = dcp.FileSystemReader(directory).read_metadata()
    metadata.planner_data = Payload(marker)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    rank_file(directory, 0).write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(RefusedError, match="cannot be read"):
        SavedState(directory)
    write_counters(directory, 3, schema_version=1)
    with pytest.raises(RefusedError, match=r"trainer\.json cannot be read: schema_version"):
        SavedState(directory)
    assert not marker.exists()
    dcp.FileSystemReader(directory).read_metadata()  # torch's own reader runs it: the payload is a real one
    assert marker.exists()


GARBAGE = (b"", b"\x80\x04.", b"garbage", pickle.dumps(list), b"\xff" * 8, (2**62).to_bytes(8, "little"))


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_what_is_no_tensor_file_is_refused(directory, content):
    rank_file(directory, 1).write_bytes(content)
    with pytest.raises(RefusedError, match=r"rank-00001\.safetensors cannot be read"):
        SavedState(directory)


PLACES: list[object] = [None, 3, [], {}, {"b": [0, 2]}, {"a": [0, 2], "b": [0, 2]}]
PLACES += [{"a": 2}, {"a": [0]}, {"a": [-1, 2]}, {"a": ["0", 2]}]


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_headers_that_do_not_place_the_rows_are_refused(tmp_path, places):
    write_rank(tmp_path, 0, {"a": torch.ones(2)}, places)
    write_counters(tmp_path, 1)
    with pytest.raises(RefusedError, match=r"rank-00000\.safetensors cannot be read"):
        SavedState(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "places"),
    [
        ({"a": torch.ones(())}, {"a": (0, 1)}),
        ({"a": torch.ones(2, 3)}, {"a": (2, 4)}),
        ({"a": torch.ones(2)}, {"a": (2, 5)}),
    ],
    ids=["no rows", "longer rows", "another number of rows"],
)
def test_files_that_do_not_fit_together_are_refused(tmp_path, tensors, places):
    write_rank(tmp_path, 0, {"a": torch.ones(2)}, {"a": (0, 4)})
    write_rank(tmp_path, 1, tensors, places)
    write_counters(tmp_path, 2)
    with pytest.raises(RefusedError, match=r"rank-00001\.safetensors cannot be read"):
        SavedState(tmp_path)


@pytest.mark.parametrize("begin", [0, 1, 3])
def test_rows_that_no_file_has_or_that_two_have_are_refused(tmp_path, begin):
    write_rank(tmp_path, 0, {"a": torch.ones(2)}, {"a": (0, 4)})
    write_rank(tmp_path, 1, {"a": torch.ones(1)}, {"a": (begin, 4)})
    write_counters(tmp_path, 2)
    with pytest.raises(RefusedError, match="has 3 of 4 rows of a"):
        SavedState(tmp_path).read("a", torch.empty(4))


@pytest.mark.parametrize("ranks", [4, 2**53])
def test_a_missing_ranks_file_is_refused(directory, ranks):
    write_counters(directory, ranks)
    with pytest.raises(RefusedError, match=r"rank-00003\.safetensors cannot be read: no such file"):
        SavedState(directory)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(directory):
    rank_file(directory, 0).unlink()
    os.mkfifo(rank_file(directory, 0))
    with pytest.raises(RefusedError, match="it is a pipe"):
        SavedState(directory)


def test_damaged_tensors_are_refused_by_a_trainer(tmp_path, tiny_model_dir, make_trainer):
    trainer, directory = make_trainer(trainer_parts(tiny_model_dir)), tmp_path / "state"
    save(trainer, directory)
    trainer.load(directory)
    part = rank_file(directory, 0)
    part.write_bytes(part.read_bytes()[:-1000])
    with pytest.raises(RefusedError, match="cannot be read"):
        trainer.load(directory)


def test_tensors_have_the_dtypes_that_they_were_saved_with(directory):
    saved = SavedState(directory)
    assert {saved.dtype(f"weight/{dtype}") for dtype in DTYPES} == set(DTYPES)
