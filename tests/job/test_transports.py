"""The end of versions on disk: nothing is left when the workers have ended."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from asyncrl_cli.job import driver_crew


def test_what_is_renamed_while_the_directory_is_removed_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights_dir = tmp_path / "weights"
    weights_dir.mkdir()
    rmtree, calls = shutil.rmtree, []

    def remove(path: Path, ignore_errors: bool) -> None:
        rmtree(path, ignore_errors=ignore_errors)
        if not calls:
            (path / ".version-000001.removing").mkdir(parents=True)
        calls.append(path)

    monkeypatch.setattr(driver_crew.shutil, "rmtree", remove)
    driver_crew.clear(weights_dir)
    assert calls == [weights_dir, weights_dir]
    assert not weights_dir.exists()
