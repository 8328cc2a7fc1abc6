"""Writes the checkpoints of one run during training, seals them, links the latest, and removes old ones.

    checkpoints/
      .writing-step-000040/   being written: trainer state, then loop state and profile, then the manifest
      step-000040/            renamed once it is complete on disk
      latest -> step-000040

The invariant: at every instant, even after a SIGKILL, the newest directory with a valid manifest is a
complete checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from asyncrl_cli.base.errors import StorageError
from asyncrl_cli.base.safe_files import open_regular
from asyncrl_cli.base.storage import as_storage_errors, fsync, remove, remove_tree, replace_link, replace_text
from asyncrl_cli.checkpoint.reader import (
    LOOP_STATE,
    MANIFEST,
    CheckpointManifest,
    FileEntry,
    LoopStateFile,
    digest_of,
    finish_interrupted_replacements,
    sealed_checkpoints,
    sha256_of,
    step_name,
)
from asyncrl_cli.contracts.ports import LoopSnapshot

PROFILE_FILES = ("config.resolved.json", "profile.toml")
LATEST, SAMPLES, VERSIONS = "latest", "samples", "versions"
NUMBERED = re.compile(r"[a-z]+-([0-9]{6,15})(\.jsonl|\.safetensors)?")


class CheckpointStore:
    """Implements `contracts.ports.CheckpointWriter` for the run in `run_dir`; keeps the newest `keep`
    checkpoints.

    `write_trainer(directory, snapshot)` writes the trainer's part: its state and the payloads.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        profile: str,
        write_trainer: Callable[[Path, LoopSnapshot], Awaitable[object]],
    ) -> None:
        self.directory = run_dir / "checkpoints"
        self._run_dir = run_dir
        self._keep = keep
        self._profile = profile
        self._write_trainer = write_trainer
        self.directory.mkdir(parents=True, exist_ok=True)
        finish_interrupted_replacements(self.directory)

    async def write(self, snapshot: LoopSnapshot) -> Path:
        """Write a checkpoint: the trainer's part first, the manifest last.

        A failed write raises, and leaves older checkpoints unchanged.
        """
        working = self.directory / f".writing-{step_name(snapshot.step)}"
        try:
            with as_storage_errors():
                await asyncio.to_thread(remove, working)
                working.mkdir(parents=True)
                await self._write_trainer(working, snapshot)
                return await asyncio.to_thread(self._finish, snapshot, working)
        except Exception as error:  # also of the trainer's processes, which write their part
            # On a full disk, leftover files would take the space that the run's last status needs.
            await asyncio.to_thread(shutil.rmtree, working, ignore_errors=True)
            if not isinstance(error, StorageError):
                raise
            why = f"the checkpoint of step {snapshot.step} cannot be written: {error.message}"
            raise StorageError(why, hint=error.hint) from error

    def abandon_newer(self, step: int, version: int) -> list[Path]:
        """Rename checkpoints and samples later than `step`, and kept versions later than `version`, to
        `abandoned-...`, before a resume from which the run may diverge.

        Otherwise they would pass for the newest ones: for the next resume, if this attempt crashes early, for
        `samples` and `export`."""
        places = (
            (self.directory, "step-*", step),
            (self._run_dir / SAMPLES, "step-*", step),
            (self._run_dir / VERSIONS, "version-*", version),
        )
        moved = []
        for place, pattern, newest in places:
            for path in sorted(place.glob(pattern)):
                match = NUMBERED.fullmatch(path.name)
                if match is not None and int(match[1]) > newest:
                    aside = path.with_name(f"abandoned-{path.name}")
                    remove(aside)
                    moved.append(path.rename(aside))
        if remaining := sealed_checkpoints(self.directory):
            replace_link(self.directory / LATEST, remaining[0].name)
        return moved

    def _finish(self, snapshot: LoopSnapshot, working: Path) -> Path:
        state: LoopStateFile = {
            "schema_version": 1,
            "step": snapshot.step,
            "version": snapshot.version,
            "at_window_boundary": snapshot.at_window_boundary,
            "loop_state": {**snapshot.loop_state},
        }
        replace_text(working / LOOP_STATE, json.dumps(state))
        for name in PROFILE_FILES:
            if (self._run_dir / name).exists():
                shutil.copyfile(self._run_dir / name, working / name)
        seal(
            working,
            step=snapshot.step,
            version=snapshot.version,
            run=self._run_dir.name,
            profile=self._profile,
        )
        final = self.directory / step_name(snapshot.step)
        aside = final.with_name(f".replaced-{final.name}")
        if final.exists():  # an older checkpoint of the same step is set aside until the new one is in place
            final.rename(aside)
        working.rename(final)
        fsync(self.directory)
        remove(aside)
        replace_link(self.directory / LATEST, final.name)
        fsync(self.directory)
        for directory in sealed_checkpoints(self.directory)[self._keep :]:
            remove_tree(directory)
        return final


def seal(directory: Path, *, step: int, version: int, run: str, profile: str) -> None:
    """Flush and hash every file below `directory`, then write the manifest."""
    files: dict[str, FileEntry] = {}
    for path in sorted(directory.rglob("*")):
        fsync(path)
        if not path.is_dir():
            with open_regular(path) as file:
                files[path.relative_to(directory).as_posix()] = {
                    "bytes": path.stat().st_size,
                    "sha256": sha256_of(file),
                }
    manifest: CheckpointManifest = {
        "schema_version": 1,
        "kind": "asyncrl-checkpoint",
        "step": step,
        "version": version,
        "run": run,
        "profile": profile,
        "files": files,
    }
    sealed = {**manifest, "selfsha256_of": digest_of(manifest)}
    replace_text(directory / MANIFEST, json.dumps(sealed, indent=1) + "\n")
