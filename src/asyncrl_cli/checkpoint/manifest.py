"""The manifest of a checkpoint: every file's size and checksum. A directory without one is no checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.checkpoint.files import fsync_directory, fsync_file, replace_text, sha256_of

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


def seal(directory: Path, *, step: int, version: int, run: str, profile: str, identity: Mapping[str, Any]) -> Manifest:
    """Flush and hash every file below `directory`, then write the manifest."""
    files: dict[str, tuple[int, str]] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            fsync_directory(path)
        else:
            fsync_file(path)
            files[path.relative_to(directory).as_posix()] = (path.stat().st_size, sha256_of(path))
    manifest = Manifest(step=step, version=version, run=run, profile=profile, identity=identity, files=files)
    replace_text(directory / MANIFEST, _to_text(manifest))
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest itself. Raises ManifestError."""
    try:
        content = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ManifestError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise ManifestError(f"{MANIFEST} cannot be read ({error})") from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ManifestError(f"{MANIFEST} is not that of an asyncrl checkpoint")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ManifestError(f"{MANIFEST} has schema_version {content.get('schema_version')}, not {SCHEMA_VERSION}")
    if content.pop("self_sha256", None) != _digest(content):
        raise ManifestError(f"{MANIFEST} was altered: its own checksum does not match")
    return Manifest(
        step=content["step"],
        version=content["version"],
        run=content["run"],
        profile=content["profile"],
        identity=content["identity"],
        files={name: (entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()},
    )


def damage(directory: Path, manifest: Manifest) -> list[str]:
    """Compare every file with the manifest; one sentence per file that is wrong."""
    wrong = []
    for name, (num_bytes, sha256) in manifest.files.items():
        path = directory / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != num_bytes:
            wrong.append(f"{name} has {path.stat().st_size} bytes, not {num_bytes}")
        elif sha256_of(path) != sha256:
            wrong.append(f"{name} was altered: its checksum does not match")
    return wrong


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


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
