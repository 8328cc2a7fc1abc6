"""Claims about what a run has kept on disk: its checkpoints and versions are as they were sealed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from asyncrl_cli.audit.accounts import step_groups
from asyncrl_cli.audit.claims import Claim
from asyncrl_cli.audit.run_files import RunFiles


def seal_claims(files: RunFiles) -> Iterator[Claim]:
    seals = Claim(
        "checkpoints", "every byte of the checkpoints is as it was sealed, and their step is trained"
    )
    written = {event["path"]: event for event in files.named("checkpointed")}
    for path in sorted((files.path / "checkpoints").glob("step-*")):
        try:
            _check_checkpoint(seals, files, path, written.get(path.name, {}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            seals.check(False, f"{path.name} cannot be read: {error!r}")
    if not seals.cases:
        seals.unchecked = "there is none: checkpoint.every_steps writes them"
    versions = Claim("versions", "every byte of the kept versions is as it was sealed")
    for path in sorted((files.path / "versions").glob("version-*")):
        try:
            manifest = json.loads((path / "manifest.json").read_bytes())
            named = f"version-{manifest['version']:06d}" == path.name
            versions.check(named, f"{path.name} says that it is version {manifest['version']}")
            for name, seal in manifest["files"].items():
                versions.check(
                    _digest(path / name, xxhash.xxh3_64) == seal, f"{path.name}/{name} was altered"
                )
        except (OSError, ValueError, KeyError, TypeError) as error:
            versions.check(False, f"{path.name} cannot be read: {error!r}")
    if not versions.cases:
        versions.unchecked = 'none was kept: weights.keep_versions = "all" keeps them'
    yield from (seals, versions)


def _check_checkpoint(claim: Claim, files: RunFiles, path: Path, event: dict[str, object]) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    seal = manifest.pop("selfsha256_of")
    own = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    claim.check(seal == own, f"{path.name}/manifest.json was altered")
    for name, entry in manifest["files"].items():
        is_whole = _digest(path / name, hashlib.sha256) == entry["sha256"]
        claim.check(is_whole, f"{path.name}/{name} was altered")
    step, version = manifest["step"], manifest["version"]
    fits = event and (step, version) == (event["step"], event["version"])
    claim.check(fits, f"{path.name} is of step {step}, version {version}; the events say otherwise")
    state = json.loads((path / "loop_state.json").read_bytes())["loop_state"]["groups"]
    trained = state["ledger"]["ended"].get("trained", 0)
    claim.check(trained == step * step_groups(files), f"{path.name} counts {trained} trained groups")
    live = len(state["running"]) + len(state["finished"]) + sum(state["ledger"]["ended"].values())
    claim.check(live == state["ledger"]["admitted_total"], f"{path.name}: its ledger does not add up")


def _digest(path: Path, kind: Callable[[], Any]) -> str:
    with path.open("rb") as file:
        return str(hashlib.file_digest(file, kind).hexdigest())
