"""Where the module of a run's reward function lies: written down when the run begins, and the only place that a resume imports
it from. A resume may be typed anywhere, and what lies there by that name is not the run's."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.safe_files import UnsafeFile, load_json, open_regular, reason

RECORD = "reward.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModule:
    """`file` is absolute; "" for a module that has none, which Python brings along. `sha256` is "" for one in an archive."""

    schema_version: int
    function: str
    file: str
    sha256: str


def keep_reward_module(run_dir: Path, function: str, file: str) -> None:
    """Write the record of a new run's reward function; that of a resumed one stays."""
    path = run_dir / RECORD
    if function and not path.exists():
        sha256 = _sha256(file) if os.path.isfile(file) else ""
        module = RewardModule(schema_version=SCHEMA_VERSION, function=function, file=file, sha256=sha256)
        path.write_text(json.dumps(asdict(module), indent=2) + "\n", encoding="utf-8")


def recorded_module(run_dir: Path, function: str) -> tuple[str, str]:
    """The file of the run's reward function, and a note for the user. RefusedError if there is no record, or no such file."""
    path = run_dir / RECORD
    if not path.exists():
        raise RefusedError(
            f'{path} is missing: where the run has imported task.reward = "{function}" from is not known',
            hint="a module is imported from where the run's record says, and from nowhere else: bring the record back from a copy",
        )
    module = load_json(path, RewardModule, hint="it was written when the run began; bring it back from a copy")
    if module.schema_version != SCHEMA_VERSION or module.function != function:
        raise RefusedError(f"{path} is not of this run: it is the record of {module.function} (schema {module.schema_version})")
    if module.file == "":
        return "", ""
    changed = False
    if module.sha256:
        try:
            changed = _sha256(module.file) != module.sha256
        except (OSError, UnsafeFile) as error:
            raise RefusedError(
                f"the run's reward module {module.file} cannot be read: {reason(error)}",
                hint=f"bring it back, or write its new place into {path}: it is imported from there, and from nowhere else",
            ) from error
    note = f"rewards are imported from {module.file}, as {path} says"
    return module.file, f"{note}; the file has changed since the run began" if changed else note


def import_root(function: str, file: str) -> str:
    """The directory that the function's module is found in by its name."""
    if file == "":
        return ""
    num_parts = function.partition(":")[0].count(".") + (Path(file).stem == "__init__")
    parents = Path(file).parents
    return str(parents[min(num_parts, len(parents) - 1)])


def _sha256(file: str) -> str:
    with open_regular(Path(file)) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
