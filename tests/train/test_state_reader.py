"""A checkpoint is data: whatever its metadata ask for, nothing is run, and nothing outside of its directory is read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.train.trainer_state import METADATA, StateReader, read_tensors, saved_keys
from tests.trainers import trainer_parts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


class Payload:
    """Unpickled, it makes a file: what an attacker would put into a checkpoint."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (os.system, (f"touch {self.target}",))


def tensors() -> dict[str, torch.Tensor]:
    return {f"weight/{dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES} | {
        "empty": torch.zeros(0),
        "scalar": torch.ones(()),
    }


@pytest.fixture
def directory(tmp_path):
    """A state as torch writes it, of one process."""
    dcp.save(tensors(), checkpoint_id=tmp_path / "state", no_dist=True)
    return tmp_path / "state"


def load(directory):
    loaded = {name: torch.empty_like(tensor) for name, tensor in tensors().items()}
    read_tensors(loaded, directory)
    return loaded


def change(directory, edit):
    metadata = FileSystemReader(directory).read_metadata()
    edit(metadata)
    (directory / METADATA).write_bytes(pickle.dumps(metadata))


def test_tensors_of_every_dtype_are_read_back(directory):
    loaded = load(directory)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    assert saved_keys(directory) == {name: tuple(tensor.shape) for name, tensor in tensors().items()}


def test_metadata_say_what_torchs_own_reader_says(directory):
    ours, theirs = StateReader(directory).read_metadata(), FileSystemReader(directory).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


def test_metadata_that_would_run_code_are_refused_and_do_not(tmp_path, tiny_model_dir, make_trainer):
    trainer, directory, marker = (
        make_trainer(trainer_parts(tiny_model_dir)),
        tmp_path / "state",
        tmp_path / "marker",
    )
    trainer.snapshot(0)
    trainer.write(0, directory, with_published=False)
    trainer.load(directory)
    change(directory, lambda metadata: setattr(metadata, "planner_data", Payload(marker)))
    with pytest.raises(RefusedError, match=r"asks for posix\.system"):
        trainer.load(directory)
    assert not marker.exists()
    FileSystemReader(directory).read_metadata()  # torch's own reader runs it: the payload is a real one
    assert marker.exists()


@pytest.mark.parametrize("named", ["pathlib PosixPath", "torch.distributed.checkpoint.metadata Metadata", "torch Size"])
def test_metadata_that_would_change_a_class_are_refused_and_do_not(directory, named):
    found = b"c" + named.replace(" ", "\n").encode() + b"\n"
    slots = b"N}X\x06\0\0\0spoiltX\x01\0\0\0xs\x86"  # (None, {"spoilt": "x"}), as for an object with slots
    (directory / METADATA).write_bytes(b"\x80\x02" + found + slots + b"b.")
    with pytest.raises(RefusedError, match="the pickle tries to modify class"):
        StateReader(directory).read_metadata()
    assert not any(hasattr(kind, "spoilt") for kind in (PosixPath, Metadata, torch.Size))


def test_items_that_torch_would_unpickle_in_full_are_refused(tmp_path, directory):
    """A key that should be a tensor says that it is bytes, of a tensor's shape: torch would load these with everything allowed."""
    marker = tmp_path / "marker"

    def disguise(metadata):
        item = BytesStorageMetadata()
        item.size = metadata.state_dict_metadata["scalar"].size
        metadata.state_dict_metadata["scalar"] = item

    change(directory, disguise)
    torch.save(Payload(marker), directory / "__0_0.distcp")
    with pytest.raises(RefusedError, match="BytesStorageMetadata"):
        load(directory)
    assert not marker.exists()


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", ".", "", 3])
def test_files_outside_of_the_directory_are_not_read(directory, path):
    change(directory, lambda metadata: setattr(next(iter(metadata.storage_data.values())), "relative_path", path))
    with pytest.raises(RefusedError, match=r"\.metadata cannot be read"):
        load(directory)


GARBAGE = (b"", b"\x80\x04.", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(list), b"\x80\x05" + b"(" * 10**6)


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_what_is_no_metadata_is_refused(directory, content):
    (directory / METADATA).write_bytes(content)
    with pytest.raises(RefusedError, match=r"\.metadata cannot be read"):
        load(directory)


@pytest.mark.parametrize("field", ["state_dict_metadata", "storage_data"])
@pytest.mark.parametrize("value", [None, 3, [], {"a": 1}, {}], ids=str)
def test_metadata_of_another_structure_are_refused(directory, field, value):
    change(directory, lambda metadata: setattr(metadata, field, value))
    with pytest.raises(RefusedError, match="cannot be read"):
        load(directory)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(directory):
    (directory / "__0_0.distcp").unlink()
    os.mkfifo(directory / "__0_0.distcp")
    with pytest.raises(RefusedError, match="it is a pipe"):
        load(directory)


def test_damaged_tensors_are_refused(directory):
    part = directory / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:1000])
    with pytest.raises(RefusedError, match="cannot be read"):
        load(directory)
