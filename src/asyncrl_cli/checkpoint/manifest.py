"""The manifest of a checkpoint: every file's size and checksum. A directory without one is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from annotated_types import Len
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.safe_files import MAX_JSON_BYTES, Count, open_regular, parse_json, read_bytes, reason
from asyncrl_cli.storage import fsync, replace_text

MANIFEST = "manifest.json"


class Damaged(Exception):
    """A checkpoint is not whole, or is no checkpoint. `wrong`: why, one sentence each."""

    def __init__(self, *wrong: str) -> None:
        super().__init__("; ".join(wrong))
        self.wrong = wrong


class FileEntry(TypedDict):
    bytes: Count
    sha256: Annotated[str, Len(64, 64)]


class Manifest(TypedDict):
    """`manifest.json`, without its own checksum. `files`: by their paths below the checkpoint's directory."""

    schema_version: Literal[1]
    kind: Literal["asyncrl-checkpoint"]
    step: Count
    version: Count
    run: str
    profile: str
    files: dict[str, FileEntry]


def seal(directory: Path, *, step: int, version: int, run: str, profile: str) -> None:
    """Flush and hash every file below `directory`, then write the manifest."""
    files: dict[str, FileEntry] = {}
    for path in sorted(directory.rglob("*")):
        fsync(path)
        if not path.is_dir():
            with open_regular(path) as file:
                files[path.relative_to(directory).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(file)}
    manifest: Manifest = {
        "schema_version": 1,
        "kind": "asyncrl-checkpoint",
        "step": step,
        "version": version,
        "run": run,
        "profile": profile,
        "files": files,
    }
    replace_text(directory / MANIFEST, json.dumps({**manifest, "self_sha256": _digest(manifest)}, indent=1) + "\n")


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest itself. Raises Damaged."""
    try:
        text = read_bytes(directory / MANIFEST, max_bytes=MAX_JSON_BYTES)
        content = parse_json(text, dict[str, Any])
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({reason(error)})") from None
    if content.get("kind") != "asyncrl-checkpoint":
        raise Damaged(f"{MANIFEST} is not that of an asyncrl checkpoint")
    if content.get("schema_version") != 1:
        raise Damaged(f"{MANIFEST} has schema_version {content.get('schema_version')}, not 1")
    if content.pop("self_sha256", None) != _digest(content):
        raise Damaged(f"{MANIFEST} was altered: its own checksum does not match")
    try:
        manifest = parse_json(text, Manifest)
    except ValueError as error:
        raise Damaged(f"{MANIFEST} is malformed: {error}") from None
    for name in manifest["files"]:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise Damaged(f"{MANIFEST} is malformed: {name!r:.80} is not a path below the checkpoint")
    return manifest


def damage(directory: Path, manifest: Manifest) -> list[str]:
    """Compare every file with the manifest; one sentence per file that is wrong."""
    wrong = []
    for name, expected in manifest["files"].items():
        try:
            with open_regular(directory / name) as file:
                found_bytes = os.fstat(file.fileno()).st_size
                if found_bytes != expected["bytes"]:
                    wrong.append(f"{name} has {found_bytes} bytes, not {expected['bytes']}")
                elif _sha256(file) != expected["sha256"]:
                    wrong.append(f"{name} was altered: its checksum does not match")
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except (OSError, ValueError) as error:
            wrong.append(f"{name} cannot be read: {reason(error)}")
    return wrong


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
