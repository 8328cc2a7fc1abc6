"""Profile files: where they are, and the chain that `extends` makes of them.

A profile is asked for by NAME (one that asyncrl ships) or by FILE (a path, or anything that ends in `.toml`); a path in
`extends` is relative to the file that says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.errors import ConfigError, did_you_mean
from asyncrl_cli.profile.toml import read, shortened
from asyncrl_cli.safe_files import expand

MAX_CHAIN = 16
"""Files in one chain of `extends`."""
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFile:
    """One file of a chain, as read: nested tables, `extends` included."""

    name: str
    path: Path
    content: dict[str, Any]

    @property
    def origin(self) -> str:
        return f"profile {self.name} ({self.path})"


def shipped_directory(kind: str) -> Path:
    """`profiles` or `templates`: inside the wheel, or at the top of a source checkout."""
    assert kind in ("profiles", "templates")
    for directory in (_PACKAGE / f"_{kind}", _PACKAGE.parents[1] / kind):
        if directory.is_dir():
            return directory
    raise ConfigError(f"this installation of asyncrl has no {kind}", hint="install asyncrl-cli again")


def shipped_profiles() -> dict[str, Path]:
    """Profiles that come with asyncrl, by name."""
    return {path.stem: path for path in sorted(shipped_directory("profiles").glob("*.toml"))}


def is_file_reference(reference: str) -> bool:
    return reference.endswith(".toml") or "/" in reference or "\\" in reference


def locate(reference: str, *, relative_to: Path, asked_by: str) -> Path:
    """The file of NAME or FILE. `asked_by` begins the error: who named it."""
    if is_file_reference(reference):
        path = relative_to / expand(reference)
        if os.path.isfile(path):
            return path.resolve()
        wrong = "is no file" if os.path.exists(path) else "does not exist"
        raise ConfigError(f"{asked_by}: {shortened(path)} {wrong}", hint="`asyncrl profiles` lists the profiles by name")
    known = shipped_profiles()
    if reference in known:
        return known[reference].resolve()
    hint = did_you_mean(reference, known, f"known profiles: {', '.join(known)}.", "`{}`".format)
    raise ConfigError(
        f"{asked_by}: there is no profile '{shortened(reference)}'", hint=f"{hint} A file is given with its path or .toml"
    )


def chain(reference: str) -> list[ProfileFile]:
    """The profile and all that it extends, the most basic one first."""
    files: list[ProfileFile] = []
    path = locate(reference, relative_to=Path.cwd(), asked_by="--profile")
    while True:
        paths = [file.path for file in files]
        if path in paths:
            circle = " -> ".join(map(str, [*paths, path]))
            raise ConfigError(f"{paths[-1]}: extends goes in a circle: {circle}", hint='end the chain at `extends = "base"`')
        if len(files) == MAX_CHAIN:
            raise ConfigError(f"{paths[0]}: extends goes on for more than {MAX_CHAIN} files", hint='end it at `extends = "base"`')
        content = read(path)
        files.append(ProfileFile(name=path.stem, path=path, content=content))
        if "extends" not in content:
            return files[::-1]
        above = content["extends"]
        if not isinstance(above, str):
            raise ConfigError(f"{path}: extends = {shortened(above)}: expected one profile's name or file", hint='extends = "base"')
        path = locate(above, relative_to=path.parent, asked_by=f'{path}: extends = "{shortened(above)}"')
