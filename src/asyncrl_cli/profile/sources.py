"""Profile files: where they lie, how they are read, and the chain that `extends` makes of them.

A profile is asked for by NAME (one that asyncrl ships) or by FILE (a path, or anything that ends in `.toml`); a path in
`extends` is relative to the file that says so. pydantic-settings would merge several files shallowly and ignore missing
ones in silence, so both are done here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import tomli

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.profile.keys import nearest
from asyncrl_cli.safe_files import MIB, expand, read_text, reason

MAX_BYTES, MAX_DEPTH, MAX_CHAIN = MIB, 32, 16
"""Of one file: bytes, and tables within tables; of `extends`: files."""
LONGEST_ECHO = 200
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFile:
    """One file of a chain, as read: nested tables, `extends` included."""

    name: str
    path: Path
    content: dict[str, Any]


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
    """The file of NAME or FILE. `asked_by` says in the error who wanted it."""
    if is_file_reference(reference):
        path = relative_to / expand(reference)
        if os.path.isfile(path):
            return path.resolve()
        wrong = "is no file" if os.path.exists(path) else "does not exist"
        raise ConfigError(f"{asked_by}: {shortened(path)} {wrong}", hint="`asyncrl profiles` lists the profiles by name")
    known = shipped_profiles()
    if reference in known:
        return known[reference].resolve()
    guess = nearest(reference, known)
    hint = f"did you mean `{guess}`?" if guess else f"known profiles: {', '.join(known)}."
    raise ConfigError(
        f"{asked_by}: there is no profile '{shortened(reference)}'", hint=f"{hint} A file is given with its path or .toml"
    )


def read(path: Path) -> dict[str, Any]:
    """A TOML file, its floats as decimals. Raises ConfigError with file and line."""
    try:
        content = parse_toml(read_text(path, max_bytes=MAX_BYTES))
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: {_lower(error.msg)} (column {error.colno})", hint=_syntax_hint(error)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}", hint="a profile is a TOML file in UTF-8") from None
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """Floats as decimals. Raises TOMLDecodeError, or ValueError for a number that is too long or tables that are too deep."""
    try:
        content = tomli.loads(text, parse_float=Decimal)
    except (RecursionError, ArithmeticError):
        raise ValueError(f"a number is too long, or its tables are more than {MAX_DEPTH} deep") from None
    _check_depth(content)
    return content


def _check_depth(content: dict[str, Any]) -> None:
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [item for entry in level for item in (entry.values() if isinstance(entry, dict) else entry)]
        level = [item for item in level if isinstance(item, dict | list)]
    if level:
        raise ValueError(f"its tables are more than {MAX_DEPTH} deep")


def shortened(value: Any) -> str:
    """A value as an error echoes it: the beginning says enough."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very long number"
    text = str(value)
    return text if len(text) <= LONGEST_ECHO else f"{text[:LONGEST_ECHO]}..."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _syntax_hint(error: tomli.TOMLDecodeError) -> str:
    line = error.doc.splitlines()[error.lineno - 1].strip() if error.lineno <= len(error.doc.splitlines()) else ""
    shown = f" (the line is `{line[:60]}`)" if line else ""
    return f"strings are quoted, booleans are true and false, sections are [run], [model], ...{shown}"


def chain(reference: str) -> list[ProfileFile]:
    """The profile and all that it extends, the most basic one first."""
    files: list[ProfileFile] = []
    path = locate(reference, relative_to=Path.cwd(), asked_by="--profile")
    while True:
        if any(file.path == path for file in files):
            circle = " -> ".join([*(str(file.path) for file in files), str(path)])
            raise ConfigError(f"{files[-1].path}: extends goes in a circle: {circle}", hint='end the chain at `extends = "base"`')
        if len(files) == MAX_CHAIN:
            raise ConfigError(
                f"{files[0].path}: extends goes on for more than {MAX_CHAIN} files", hint='end it at `extends = "base"`'
            )
        content = read(path)
        files.append(ProfileFile(name=path.stem, path=path, content=content))
        if "extends" not in content:
            return files[::-1]
        above = content["extends"]
        if not isinstance(above, str):
            raise ConfigError(f"{path}: extends = {shortened(above)}: expected one profile's name or file", hint='extends = "base"')
        path = locate(above, relative_to=path.parent, asked_by=f'{path}: extends = "{shortened(above)}"')
