"""What a submitted run ships to its cluster: files from the working directory, and the profile as it was
resolved here.

    asyncrl-job.toml     every value that a file, the environment or an option has set; paths of shipped files
                         are relative
    my_rewards.py        the module of `task.reward = "my_rewards:score"`, if it is in the working directory,
                         or beside the profile's file in a directory within that
    my_package/...       likewise the whole package, for a module inside a package
    data/train.parquet   what a pattern of `run.ship` matches

The profile's chain of files is not shipped: the files may be anywhere, and they lack the environment's
values.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.named_code import is_user_code
from asyncrl_cli.base.paths import has_module
from asyncrl_cli.profile.loaded import Loaded
from asyncrl_cli.profile.resolved import to_toml

PROFILE = "asyncrl-job.toml"
PATH = re.compile(r'"((?:jsonl|parquet):)?(/[^"]+)"')
"""An absolute path in a profile's TOML: a directory, or a file with its kind as a prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """`files` are relative to `root`. `notes`: what the cluster must have, because it is not shipped."""

    root: Path
    files: tuple[Path, ...]
    profile_toml: str
    notes: tuple[str, ...]

    def write(self, directory: Path) -> None:
        """Copy everything to an empty directory."""
        for file in self.files:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.root / file, directory / file)
        (directory / PROFILE).write_text(self.profile_toml, encoding="utf-8")


def cargo_of(loaded: Loaded, root: Path) -> Cargo:
    """What a run of this profile needs from the directory `root`. Raises ConfigError if a pattern of
    `run.ship` matches nothing, or points outside `root`."""
    profile, notes, files = loaded.profile, [], _named_files(loaded.profile.run.ship, root)
    import_dir, not_shipped = Path(profile.task.import_path or root), set[Path]()
    if import_dir == root:  # the job works there
        profile = profile.model_copy(update={"task": profile.task.model_copy(update={"import_path": None})})
    task = profile.task
    rewards = (one.use for one in task.rewards)
    names = (*rewards, task.environment, task.agent or "", task.fields or "", *task.scorers.values())
    modules = {name.partition(":")[0].partition(".")[0] for name in names if is_user_code(name)}
    for module in sorted(modules):
        found = set()
        for directory in (import_dir, root):
            if directory.is_relative_to(root):
                path = directory.relative_to(root) / module
                is_file = (root / f"{path}.py").is_file()
                found |= set(_files(root, f"{path}.py" if is_file else f"{path}/**/*"))
        if not found and has_module(import_dir, module):
            not_shipped.add(import_dir)
            remedy = f"run `asyncrl submit` in {import_dir}"
            notes.append(f"the module {module} in {import_dir} is not shipped: {remedy}")
        elif not found:
            notes.append(f"the module {module} is not in {root}: it must be installed on the cluster")
        files |= found
    shipped = files | {parent for file in files for parent in file.parents}

    def on_cluster(match: re.Match[str]) -> str:
        """The path as the job there has it; notes one that the cluster must have itself."""
        kind, path = match[1] or "", Path(match[2])
        below = str(path.relative_to(root)) if path.is_relative_to(root) else ""
        named = list(root.glob(below)) if below not in ("", ".") else []  # it may be a pattern
        if named and all(one.relative_to(root) in shipped for one in named):
            return f'"{kind}./{below}"'
        if path in not_shipped:
            return match[0]
        if named or path.exists():
            notes.append(f"{path} is not shipped: the cluster must have it there, or run.ship must name it")
        else:
            notes.append(f"{path} is not on this machine: the cluster must have it there")
        return match[0]

    toml = PATH.sub(on_cluster, to_toml(profile, loaded.origins))
    return Cargo(root=root, files=tuple(sorted(files)), profile_toml=toml, notes=tuple(notes))


def _named_files(patterns: Sequence[str], root: Path) -> set[Path]:
    """The files that `run.ship` names. Raises ConfigError for a pattern that matches nothing, or points
    outside `root`."""
    files = set[Path]()
    for pattern in patterns:
        parts = PurePosixPath(pattern).parts
        if not parts or pattern.startswith("/") or ".." in parts:
            why = f'run.ship names "{pattern}", which is not within {root}'
            raise ConfigError(why, hint="submit from a parent directory")
        found = set(_files(root, f"{pattern}/**/*" if (root / pattern).is_dir() else pattern))
        if not found:
            why = f'run.ship names "{pattern}", but no file in {root} matches'
            raise ConfigError(why, hint='ship = ["data/*.parquet", "helpers.py"]')
        files |= found
    return files


def _files(root: Path, pattern: str) -> Iterator[Path]:
    """Regular files, without Python's caches."""
    for path in root.glob(pattern):
        if path.is_file() and "__pycache__" not in path.parts:
            yield Path(os.path.relpath(path, root))
