"""Read and write TOML within limits, find profile files, and follow their chain of `extends`.

A profile is given by NAME (one that asyncrl ships) or by FILE (a path, or anything that ends in `.toml`). A
path in `extends` is relative to the file that contains it. `A+B` lays profile B over profile A.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from asyncrl_cli.base.errors import ConfigError, did_you_mean, nearest
from asyncrl_cli.base.paths import expand, missing_hint
from asyncrl_cli.base.safe_files import MIB, decapitalized, nesting, read_text, reason

Value = Any
"""A TOML value of any type. The schema checks it, not the type checker."""
Table = dict[str, Value]
Values = Mapping[str, Value]
MAX_BYTES, MAX_DEPTH = MIB, 32
"""Limits for one file: its size, and the depth of its tables."""
LONGEST_ECHO = 200
KEY_LINE = re.compile(r"^[ \t]*([^\s=#\[]{1,200})[ \t]*=", re.MULTILINE)
SECTION_LINE = re.compile(r"^[ \t]*\[([\w.-]{1,200})\][ \t]*(?:#.*)?$", re.MULTILINE)


def read(path: Path) -> Table:
    """Read a TOML file. Raises ConfigError that names file and line."""
    try:
        return parse_toml(read_text(path, max_bytes=MAX_BYTES))
    except tomli.TOMLDecodeError as error:
        why, hint = _explained(error)
        raise ConfigError(f"{path}:{error.lineno}: {why}", hint=hint) from None
    except (OSError, ValueError) as error:
        hint = "a profile is a TOML file in UTF-8"
        raise ConfigError(f"{path} cannot be read: {reason(error)}", hint=hint) from None


def _explained(error: tomli.TOMLDecodeError) -> tuple[str, str]:
    """What is wrong with a file that is not TOML, and what to do about it."""
    lines, before = error.doc.splitlines(), error.doc[: error.pos]
    line = lines[error.lineno - 1].strip() if error.lineno <= len(lines) else ""
    if error.msg == "Cannot overwrite a value" and (keys := KEY_LINE.findall(before)):
        key = ".".join([*SECTION_LINE.findall(before)[-1:], keys[-1]])
        return f"{key} is given twice", "keep one of them"
    if error.msg.startswith("Cannot declare"):
        return f"{shortened(line)} is there twice", "put the keys of both into one"
    if "declaration" in error.msg:
        return f"{shortened(line)} lacks its closing bracket", "a section is a line of its own: [run]"
    hint = "strings are quoted, booleans are true and false, sections are [run], [model], ..."
    hint += f" (the line is `{line[:60]}`)" if line else ""
    return f"{decapitalized(error.msg)} (column {error.colno})", hint


def parse_toml(text: str) -> Table:
    """Parse TOML. Raises TOMLDecodeError, or ValueError for a number that Python cannot hold or for tables
    that are too deep."""
    try:
        content = tomli.loads(text, parse_float=_float)
        is_deep = nesting(content) > MAX_DEPTH + 1  # of which the last may be numbers and text
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"its tables are more than {MAX_DEPTH} deep")
    return content


def _float(text: str) -> float:
    value = float(text)
    if not value and text.lower().partition("e")[0].strip("+-0._"):
        raise ValueError(f"{shortened(text)} is too small: it would become 0")
    return value


def parse_value(text: str) -> Value:
    """Parse `text` as a TOML value. Text that is not TOML is returned unchanged. Raises ConfigError if it
    exceeds a limit, or begins like an array, a table or a quoted string and is none."""
    try:
        parsed = parse_toml(f"value = {text}")
    except tomli.TOMLDecodeError as error:
        if not text.startswith(("[", "{", '"', "'")):
            return text
        hint = """text within it is quoted, and in a shell all of it: '["a", "b"]' or '{a = "b"}'"""
        why = f"{decapitalized(error.msg)} at character {error.colno - len('value = ')}"
        raise ConfigError(f"{shortened(text)} is not a valid value: {why}", hint=hint) from None
    except ValueError as error:
        hint = "a value is read as TOML, otherwise as a string"
        raise ConfigError(f"{shortened(text)} is not a valid value: {error}", hint=hint) from None
    return parsed["value"] if len(parsed) == 1 else text


def toml_key(name: str) -> str:
    """A key as TOML, without quotes where possible."""
    bare = name.isascii() and name.replace("-", "_").isidentifier()
    return name if bare else toml_value(name)


def toml_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_key(str(key))} = {toml_value(item)}' for key, item in value.items())}}}"
    return str(value)


def shortened(value: Value) -> str:
    """A value as an error message shows it: a long one is cut."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very long number"
    text = str(value)
    return text if len(text) <= LONGEST_ECHO else f"{text[:LONGEST_ECHO]}..."


MAX_CHAIN = 16
"""Files in one chain of `extends`."""
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFile:
    """One file of a chain, as read: nested tables, `extends` included."""

    name: str
    path: Path
    content: Table

    @property
    def origin(self) -> str:
        return f"profile {self.name} ({self.path})"


def shipped_directory(kind: str) -> Path:
    """The directory `profiles`, `templates` or `docs`: inside the wheel (which has one page of docs), or in a
    source checkout."""
    assert kind in ("profiles", "templates", "docs")
    for directory in (_PACKAGE / f"_{kind}", _PACKAGE.parents[1] / kind):
        if directory.is_dir():
            return directory
    raise ConfigError(f"this installation of asyncrl has no {kind}", hint="reinstall asyncrl-cli")


def shipped_profiles() -> dict[str, Path]:
    """Profiles that come with asyncrl, by name."""
    return {path.stem: path for path in sorted(shipped_directory("profiles").glob("*.toml"))}


def shipped_workloads() -> dict[str, Path]:
    """Workloads that come with asyncrl, by name."""
    files = (shipped_directory("profiles") / "workloads").glob("*.toml")
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def shipped_templates() -> dict[str, Path]:
    """The directories that `asyncrl init` copies, by name."""
    return {path.name: path for path in sorted(shipped_directory("templates").iterdir()) if path.is_dir()}


def is_file_reference(reference: str) -> bool:
    return reference.endswith(".toml") or "/" in reference or "\\" in reference


def locate(reference: str, *, relative_to: Path, asked_by: str = "") -> Path:
    """The path of the profile NAME or FILE. Errors begin with `asked_by`: the file that gives the
    reference."""
    path = relative_to / expand(reference)
    if os.path.isdir(path) and reference not in (*shipped_profiles(), *shipped_templates()):
        inside = sorted(file.name for file in path.glob("*.toml"))
        hint = "a profile is a TOML file" + (f", such as {path / inside[0]}" if inside else "")
        raise ConfigError(f"{asked_by}{shortened(reference)} is a directory", hint=hint)
    if is_file_reference(reference):
        if os.path.isfile(path):
            return path.resolve()
        wrong = "is not a file" if os.path.exists(path) else "does not exist"
        otherwise = "`asyncrl profiles` lists the profiles by name"
        if shipped := nearest(path.stem, shipped_profiles()):
            otherwise = f"asyncrl has a profile `{shipped}`"
        raise ConfigError(f"{asked_by}{shortened(path)} {wrong}", hint=missing_hint(path, otherwise))
    known = shipped_profiles()
    if reference in known:
        return known[reference].resolve()
    if reference in shipped_templates():
        hint = f"it is a template: `asyncrl init {reference} DIR`, and then --profile DIR/profile.toml"
        raise ConfigError(f"{asked_by}there is no profile '{reference}'", hint=hint)
    if os.path.isfile(path):
        why = f"{asked_by}{shortened(reference)} is not a profile: the name of a TOML file ends in .toml"
        raise ConfigError(why, hint="docs/coming-from.md says which keys of other trainers are which here")
    hint = did_you_mean(reference, known, f"known profiles: {', '.join(known)}.", "`{}`".format)
    hint = f"{hint} A file is given with its path or .toml"
    if os.path.isfile(f"{path}.toml"):
        hint = f"did you mean {reference}.toml?"
    raise ConfigError(f"{asked_by}there is no profile '{shortened(reference)}'", hint=hint)


def chain(reference: str) -> list[ProfileFile]:
    """The profile and all profiles that it extends, the lowest first. `A+B`: A's chain, then the files that
    only B's chain has."""
    if "+" not in reference or os.path.isfile(expand(reference)):
        return _chain(reference)
    chains = [_chain(part) for part in reference.split("+")]
    files = list({file.path: file for files in chains for file in files}.values())
    tops = [files[-1] for files in chains]
    purpose = " ".join(filter(None, (top.content.get("purpose") for top in tops)))
    name = "+".join(str(top.content.get("name", top.name)) for top in tops)
    return [*files, ProfileFile(name=name, path=Path(reference), content={"purpose": purpose})]


def _chain(reference: str) -> list[ProfileFile]:
    files: list[ProfileFile] = []
    path = locate(reference, relative_to=Path.cwd())
    while True:
        paths = [file.path for file in files]
        if path in paths:
            circle = " -> ".join(map(str, [*paths, path]))
            hint = 'end the chain at `extends = "base"`'
            raise ConfigError(f"{paths[-1]}: `extends` forms a cycle: {circle}", hint=hint)
        if len(files) == MAX_CHAIN:
            hint = 'end it at `extends = "base"`'
            raise ConfigError(f"{paths[0]}: `extends` chains more than {MAX_CHAIN} files", hint=hint)
        content = read(path)
        files.append(ProfileFile(name=path.stem, path=path, content=content))
        if "extends" not in content:
            return files[::-1]
        above = content["extends"]
        if not isinstance(above, str):
            why = f"{path}: extends = {shortened(above)}: expected one profile's name or file"
            raise ConfigError(why, hint='extends = "base"')
        path = locate(above, relative_to=path.parent, asked_by=f'{path}: extends = "{shortened(above)}": ')
