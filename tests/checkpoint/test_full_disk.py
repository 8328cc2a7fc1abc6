"""A disk that takes no more: one error with path, reason and free space; nothing half-written; older
checkpoints as they were."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import StorageError
from asyncrl_cli.base.storage import as_storage_errors, naming, replace_text, storage_error
from asyncrl_cli.checkpoint.reader import load_checkpoint
from asyncrl_cli.checkpoint.writer import CheckpointStore
from asyncrl_cli.cli.app import run
from asyncrl_cli.contracts.ports import LoopSnapshot
from asyncrl_cli.observe.sinks import LineFile

MIB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MiB of memory as a file system of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"this user may not mount a file system: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.parametrize(
    "number",
    [
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EIO,
        errno.EFBIG,
        errno.EPERM,
        errno.ENOENT,
    ],
)
def test_each_refusal_of_the_system_is_told_with_path_reason_and_way_out(number: int, tmp_path: Path) -> None:
    with pytest.raises(StorageError) as told, as_storage_errors(), naming(tmp_path / "metrics.jsonl"):
        raise OSError(number, os.strerror(number))
    assert str(tmp_path / "metrics.jsonl") in told.value.message
    assert os.strerror(number) in told.value.message
    assert ("MiB are free" in told.value.message) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert told.value.hint
    assert told.value.exit_code == 1


def test_what_safetensors_says_of_a_full_disk_is_understood(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    with pytest.raises(OSError, match="No space left") as found, naming(tmp_path / "x"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (found.value.errno, found.value.filename) == (errno.ENOSPC, str(tmp_path / "x"))
    with pytest.raises(SafetensorError, match="InvalidHeader"), naming(tmp_path / "x"):
        raise SafetensorError("InvalidHeader")


def test_a_text_that_does_not_fit_leaves_the_old_one_and_no_temporary(small_disk: Path) -> None:
    replace_text(small_disk / "status.json", "old")
    with pytest.raises(OSError, match="No space left") as full:
        replace_text(small_disk / "status.json", "x" * 4 * MIB)
    assert full.value.filename == str(small_disk / "status.json")
    assert re.search(r"[02]\.0 of 2 MiB are free", storage_error(full.value).message)
    assert [path.name for path in small_disk.iterdir()] == ["status.json"]
    assert (small_disk / "status.json").read_text() == "old"


def test_a_checkpoint_that_does_not_fit_is_gone_and_the_last_one_is_whole(small_disk: Path) -> None:
    for name in ("config.resolved.json", "profile.toml"):
        (small_disk / name).write_text("{}")
    sizes = {1: MIB // 2, 2: 4 * MIB}

    async def write_trainer(directory: Path, snapshot: LoopSnapshot) -> None:
        (directory / "weights").write_bytes(bytes(sizes[snapshot.step]))

    store = CheckpointStore(small_disk, keep=3, profile="base", write_trainer=write_trainer)
    first = asyncio.run(store.write(LoopSnapshot(step=1, version=1, at_window_boundary=True, loop_state={})))
    with pytest.raises(StorageError, match="No space left"):
        asyncio.run(store.write(LoopSnapshot(step=2, version=2, at_window_boundary=True, loop_state={})))
    assert sorted(path.name for path in store.directory.iterdir()) == ["latest", "step-000001"]
    assert load_checkpoint(first).step == 1


def test_lines_that_do_not_fit_name_their_file(small_disk: Path) -> None:
    lines = LineFile(small_disk / "metrics.jsonl")
    with pytest.raises(OSError, match="No space left") as full:
        lines.append({"text": "x" * 4 * MIB})
    with contextlib.suppress(OSError):  # of what it could not write
        lines.close({})
    assert full.value.filename == str(small_disk / "metrics.jsonl")


def test_any_command_tells_it_as_one_error(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small_disk / "filled").write_bytes(bytes(2 * MIB))
    assert run(["init", "jsonl", str(small_disk / "mine")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {small_disk}")
    assert "No space left on device (0.0 of 2 MiB are free)\nhint: " in said
    assert "bug" not in said


LOGGER = """
import logging, resource, signal, sys
from pathlib import Path
from asyncrl_cli.job.driver_process import logged_to
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
with logged_to(Path(sys.argv[1])):
    for _ in range(1000):
        logging.getLogger("asyncrl").warning("x" * 1000)
"""


def test_a_log_that_does_not_fit_prints_no_tracebacks(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LOGGER, str(tmp_path / "driver.log")]
    done = subprocess.run(words, capture_output=True, timeout=60, check=True)
    assert done.stderr == b""


@pytest.mark.parametrize("free_pages", [0, 2])
def test_a_run_that_finds_no_room_for_its_directory_leaves_none(
    free_pages: int, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_disk / "filled").write_bytes(bytes(2 * MIB - 4096 * free_pages))
    words = ["train", "-p", "base", "--name", "first", "--ui", "none"]
    assert run([*words, "--runs-dir", str(small_disk / "runs")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {small_disk / 'runs' / 'first'}/")
    assert "No space left on device" in said
    assert not (small_disk / "runs").exists()
