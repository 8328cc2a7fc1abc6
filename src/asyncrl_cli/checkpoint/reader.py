"""Reads checkpoints back after verifying every byte: a checkpoint's manifest has the size and checksum of
every file. A directory without a manifest is not a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from annotated_types import Len
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.safe_files import (
    MAX_JSON_BYTES,
    Count,
    load_json,
    open_regular,
    parse_json,
    read_bytes,
    reason,
)
from asyncrl_cli.base.storage import remove

MANIFEST, LOOP_STATE = "manifest.json", "loop_state.json"
STEP_NAME = re.compile(r"step-([0-9]{6,15})")


class Damaged(Exception):
    """A checkpoint is damaged, or is not a checkpoint. `wrong`: the reasons, one sentence each."""

    def __init__(self, *wrong: str) -> None:
        super().__init__("; ".join(wrong))
        self.wrong = wrong


class FileEntry(TypedDict):
    bytes: Count
    sha256: Annotated[str, Len(64, 64)]


class CheckpointManifest(TypedDict):
    """`manifest.json`, without its own checksum. `files` is keyed by paths relative to the checkpoint's
    directory."""

    schema_version: Literal[1]
    kind: Literal["asyncrl-checkpoint"]
    step: Count
    version: Count
    run: str
    profile: str
    files: dict[str, FileEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, read back. `directory` also holds what the trainer wrote."""

    directory: Path
    step: int
    version: int
    at_window_boundary: bool
    loop_state: dict[str, Any]
    run: str


class LoopStateFile(TypedDict):
    """`loop_state.json`. The content of `loop_state` is defined in loop/checkpointer.py."""

    schema_version: Literal[1]
    step: Count
    version: Count
    at_window_boundary: bool
    loop_state: dict[str, Any]


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(directory: Path) -> int:
    match = STEP_NAME.fullmatch(directory.name)
    assert match is not None, directory
    return int(match.group(1))


def checkpoints_in(directory: Path) -> list[Path]:
    """Directories named like checkpoints, newest step first, damaged ones included."""
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if STEP_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=step_of, reverse=True)


def load_checkpoint(directory: Path, command: str = "resume") -> Checkpoint:
    """Verify a checkpoint and read the loop's part of it.

    Raises RefusedError if it is damaged, has another schema or is no asyncrl checkpoint. The hint names the
    newest intact one as an argument of `asyncrl COMMAND`.
    """
    try:
        return _read(directory)
    except Damaged as error:
        listed = "; ".join(error.wrong[:5])
        if len(error.wrong) > 5:
            listed += f"; and {len(error.wrong) - 5} more"
    hint = "there is no intact checkpoint beside it"
    if intact := newest_intact(directory.parent):
        hint = f"the newest intact one: asyncrl {command} {intact}"
    raise RefusedError(f"checkpoint {directory} is refused: {listed}", hint=hint)


def newest_intact(directory: Path) -> Path | None:
    """The newest intact checkpoint in a `checkpoints/` directory, with every byte verified."""
    for path in checkpoints_in(directory):
        with contextlib.suppress(Damaged):
            return _read(path).directory
    return None


def sealed_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints with a valid manifest, newest first. Other directories with such names must be neither
    linked nor deleted."""
    sealed = []
    for path in checkpoints_in(directory):
        with contextlib.suppress(Damaged):
            read_manifest(path)
            sealed.append(path)
    return sealed


def _read(directory: Path) -> Checkpoint:
    """Verify and read a checkpoint. Raises Damaged with all reasons."""
    if not directory.is_dir():
        raise Damaged(f"{directory} is not a directory")
    manifest = read_manifest(directory)
    step, version = manifest["step"], manifest["version"]
    wrong = []
    for name, expected in manifest["files"].items():
        try:
            with open_regular(directory / name) as file:
                found_bytes = os.fstat(file.fileno()).st_size
                if found_bytes != expected["bytes"]:
                    wrong.append(f"{name} has {found_bytes} bytes, not {expected['bytes']}")
                elif sha256_of(file) != expected["sha256"]:
                    wrong.append(f"{name} was altered: its checksum does not match")
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except (OSError, ValueError) as error:
            wrong.append(f"{name} cannot be read: {reason(error)}")
    if STEP_NAME.fullmatch(directory.name) and step_of(directory) != step:
        wrong.append(f"the directory's name does not fit its step {step}")
    if LOOP_STATE not in manifest["files"]:
        wrong.append(f"{LOOP_STATE} is not part of it")
    if wrong:
        raise Damaged(*wrong)
    try:  # a matching checksum does not prove that asyncrl wrote the file
        state = load_json(directory / LOOP_STATE, LoopStateFile)
    except RefusedError as error:
        raise Damaged(error.message) from None
    if (state["step"], state["version"]) != (step, version):
        raise Damaged(f"{LOOP_STATE} is of step {state['step']}, the manifest of step {step}")
    return Checkpoint(
        directory=directory,
        step=step,
        version=version,
        at_window_boundary=state["at_window_boundary"],
        loop_state=state["loop_state"],
        run=manifest["run"],
    )


def read_manifest(directory: Path) -> CheckpointManifest:
    """Read and check the manifest itself. Raises Damaged."""
    try:
        text = read_bytes(directory / MANIFEST, max_bytes=MAX_JSON_BYTES)
        content = parse_json(text, dict[str, object])
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({reason(error)})") from None
    if content.get("kind") != "asyncrl-checkpoint":
        raise Damaged(f"{MANIFEST} is not the manifest of an asyncrl checkpoint")
    if content.get("schema_version") != 1:
        raise Damaged(f"{MANIFEST} has schema_version {content.get('schema_version')}, not 1")
    if content.pop("selfsha256_of", None) != digest_of(content):
        raise Damaged(f"{MANIFEST} was altered: its own checksum does not match")
    try:
        manifest = parse_json(text, CheckpointManifest)
    except ValueError as error:
        raise Damaged(f"{MANIFEST} is malformed: {error}") from None
    for name in manifest["files"]:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise Damaged(f"{MANIFEST} is malformed: {name!r:.80} is not a path below the checkpoint")
    return manifest


def sha256_of(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def finish_interrupted_replacements(directory: Path) -> None:
    """Clean up after a crash: restore a checkpoint that was set aside but not replaced; remove partial
    ones."""
    for aside in directory.glob(".replaced-step-*"):
        original = aside.with_name(aside.name.removeprefix(".replaced-"))
        if original.exists() or not STEP_NAME.fullmatch(original.name):
            remove(aside)
        else:
            aside.rename(original)
    for pattern in (".writing-step-*", ".deleting-*"):
        for leftover in directory.glob(pattern):
            remove(leftover)
