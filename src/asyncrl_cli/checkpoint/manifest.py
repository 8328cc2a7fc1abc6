"""The manifest of a checkpoint: every file's size and checksum. A directory without one is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from annotated_types import Len
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.checkpoint.files import fsync_directory, fsync_file, replace_text
from asyncrl_cli.safe_files import MAX_JSON_BYTES, Count, open_regular, parse_json, read_bytes, reason

SCHEMA_VERSION = 1
KIND = "asyncrl-checkpoint"
MANIFEST = "manifest.json"


class ManifestError(ValueError):
    """The manifest is missing, unreadable, altered, or of another kind: its text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`identity`: profile keys that a resume must agree with. `files`: relative path to (bytes, sha256)."""

    step: int
    version: int
    run: str
    profile: str
    identity: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]


class _File(TypedDict):
    bytes: Count
    sha256: Annotated[str, Len(64, 64)]


class _ManifestFile(TypedDict):
    """`manifest.json` without its own checksum."""

    schema_version: Literal[1]
    kind: Literal["asyncrl-checkpoint"]
    step: Count
    version: Count
    run: str
    profile: str
    identity: dict[str, Any]
    files: dict[str, _File]


def seal(directory: Path, *, step: int, version: int, run: str, profile: str, identity: Mapping[str, Any]) -> Manifest:
    """Flush and hash every file below `directory`, then write the manifest."""
    files: dict[str, tuple[int, str]] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            fsync_directory(path)
        else:
            fsync_file(path)
            with open_regular(path) as file:
                files[path.relative_to(directory).as_posix()] = (path.stat().st_size, _sha256(file))
    manifest = Manifest(step=step, version=version, run=run, profile=profile, identity=identity, files=files)
    replace_text(directory / MANIFEST, _to_text(manifest))
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest itself. Raises ManifestError."""
    try:
        text = read_bytes(directory / MANIFEST, max_bytes=MAX_JSON_BYTES)
        content = parse_json(text, dict[str, Any])
    except FileNotFoundError:
        raise ManifestError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise ManifestError(f"{MANIFEST} cannot be read ({reason(error)})") from None
    if content.get("kind") != KIND:
        raise ManifestError(f"{MANIFEST} is not that of an asyncrl checkpoint")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ManifestError(f"{MANIFEST} has schema_version {content.get('schema_version')}, not {SCHEMA_VERSION}")
    if content.pop("self_sha256", None) != _digest(content):
        raise ManifestError(f"{MANIFEST} was altered: its own checksum does not match")
    try:
        known = parse_json(text, _ManifestFile)
        files = {_inside(name): (entry["bytes"], entry["sha256"]) for name, entry in known["files"].items()}
    except ValueError as error:
        raise ManifestError(f"{MANIFEST} is malformed: {error}") from None
    return Manifest(
        step=known["step"],
        version=known["version"],
        run=known["run"],
        profile=known["profile"],
        identity=known["identity"],
        files=files,
    )


def damage(directory: Path, manifest: Manifest) -> list[str]:
    """Compare every file with the manifest; one sentence per file that is wrong."""
    wrong = []
    for name, (num_bytes, sha256) in manifest.files.items():
        try:
            with open_regular(directory / name) as file:
                found_bytes = os.fstat(file.fileno()).st_size
                if found_bytes != num_bytes:
                    wrong.append(f"{name} has {found_bytes} bytes, not {num_bytes}")
                elif _sha256(file) != sha256:
                    wrong.append(f"{name} was altered: its checksum does not match")
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except (OSError, ValueError) as error:
            wrong.append(f"{name} cannot be read: {reason(error)}")
    return wrong


def _inside(name: str) -> str:
    """Raises ValueError unless it is the path of a file below the checkpoint's directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"files: {name!r:.80} is not a path below the checkpoint")
    return name


def _to_text(manifest: Manifest) -> str:
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "step": manifest.step,
        "version": manifest.version,
        "run": manifest.run,
        "profile": manifest.profile,
        "identity": dict(manifest.identity),
        "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in manifest.files.items()},
    }
    content["self_sha256"] = _digest(content)
    return json.dumps(content, indent=1) + "\n"


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
