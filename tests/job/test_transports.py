"""The end of versions on disk: removed when the driver lets go of them, and nothing is left when the workers have ended."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from asyncrl_cli.job import transports
from asyncrl_cli.weights import disk
from asyncrl_cli.weights.disk import BucketFile

WAIT_S = 30.0
"""A bound on what takes milliseconds."""


def removers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("remove version-")]


def test_clear_waits_for_a_version_that_is_just_being_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_dir = tmp_path / "weights"
    version = weights_dir / "version-000001"
    version.mkdir(parents=True)
    begun, goes_on = threading.Event(), threading.Event()

    def remove_slowly(directory: Path) -> None:
        begun.set()
        assert goes_on.wait(WAIT_S)
        directory.with_name(".version-000001.removing").mkdir(parents=True)  # what a rename after the clear would leave

    monkeypatch.setattr(disk, "remove_version", remove_slowly)
    monkeypatch.setattr(transports, "REMOVALS_TIMEOUT_S", WAIT_S)
    files = transports.held("disk", [BucketFile(directory=version, index=0)])
    del files
    assert begun.wait(WAIT_S)
    [remover] = removers()
    threading.Timer(0.1, goes_on.set).start()
    transports.clear(weights_dir)
    assert not remover.is_alive()
    assert not weights_dir.exists()


def test_a_removal_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_dir = tmp_path / "weights"
    weights_dir.mkdir()
    goes_on = threading.Event()
    monkeypatch.setattr(disk, "remove_version", lambda directory: goes_on.wait(WAIT_S))
    monkeypatch.setattr(transports, "REMOVALS_TIMEOUT_S", 0.05)
    files = transports.held("disk", [BucketFile(directory=weights_dir / "version-000001", index=0)])
    del files
    [remover] = removers()
    transports.clear(weights_dir)
    assert remover.is_alive()
    assert not weights_dir.exists()
    goes_on.set()
    remover.join(WAIT_S)


def test_what_is_renamed_while_the_directory_is_removed_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_dir = tmp_path / "weights"
    weights_dir.mkdir()
    rmtree, calls = shutil.rmtree, []

    def remove(path: Path, ignore_errors: bool) -> None:
        rmtree(path, ignore_errors=ignore_errors)
        if not calls:
            (path / ".version-000001.removing").mkdir(parents=True)
        calls.append(path)

    monkeypatch.setattr(transports.shutil, "rmtree", remove)
    transports.clear(weights_dir)
    assert calls == [weights_dir, weights_dir]
    assert not weights_dir.exists()
