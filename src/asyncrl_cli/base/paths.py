"""Names and paths that users give: limits of Linux, valid names for a run, and the expansion of `~`."""

from __future__ import annotations

import os
import re
import shlex
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from asyncrl_cli.base.errors import LONGEST_NAME, ConfigError, first_names

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095
"""The longest file name and path that Linux accepts."""
MAX_LISTED = 1000
"""How many names in a directory are compared with that of a missing file."""
VALID_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RUNS_DIR = Path("runs")
ADDRESS_VARIABLE = "_ASYNCRL_ADDRESS"
"""Environment variable in a job's processes: the address of the job server that the job was submitted to."""


def expand(text: str | Path) -> Path:
    """Expand `~` and `~user`. An unknown user's name stays unchanged, where `Path.expanduser` would raise."""
    return Path(os.path.expanduser(text))


def is_path(text: str) -> bool:
    """Whether `text` is a possible path: within Linux's limits and without NUL bytes."""
    encoded = text.encode("utf-8", "surrogatepass")
    are_short = all(len(part) <= MAX_NAME_BYTES for part in encoded.split(b"/"))
    return are_short and len(encoded) <= MAX_PATH_BYTES and b"\0" not in encoded


def missing_hint(path: Path, otherwise: str = "") -> str:
    """A hint for a path that does not exist: the file in its directory that was probably meant, or
    `otherwise`. By default says what the directory holds (not for `/`), or that it is missing, too."""
    try:
        with os.scandir(path.parent) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_LISTED))
    except (OSError, ValueError):
        return otherwise or f"there is no directory {path.parent!s:.300}"
    stem = path.stem[:LONGEST_NAME]
    similar = [name for name in names if get_close_matches(stem, [Path(name).stem], cutoff=0.7)]
    if guesses := get_close_matches(path.name, similar, n=1, cutoff=0.0):
        return f"did you mean {path.parent / guesses[0]}?"
    held = first_names([f"{name:.80}" for name in names if name[0] != "."], 5) or "no files"
    is_root = str(path.parent) == "/"
    return otherwise or ("check the path" if is_root else f"{path.parent!s:.300} holds {held}")


def check_name(name: str) -> None:
    """Raises ConfigError if `name` cannot name a run and its directory."""
    if not VALID_NAME.fullmatch(name):
        valid = "at most 100 letters, digits, '.', '_' and '-', a letter or digit first"
        why = f"run.name '{name:.101}' is not a valid name: {valid}"
        raise ConfigError(why, hint="give another --name")


def where_runs_are(runs_dir: Path) -> str:
    """The option that makes a command find the runs of a directory; empty for the default directory. In a
    submitted job, the option is --address with its job server."""
    if address := os.environ.get(ADDRESS_VARIABLE):
        return f" --address {address}"
    return "" if runs_dir.resolve() == RUNS_DIR.resolve() else f" --runs-dir {shlex.quote(str(runs_dir))}"


def as_typed(run_dir: Path) -> str:
    """A run's name and the option that makes a command find it."""
    return run_dir.name + where_runs_are(run_dir.parent)


def has_module(directory: Path, module: str) -> bool:
    """Whether the directory contains the Python module or package."""
    place = os.path.join(directory, *module.split("."))
    return os.path.isfile(f"{place}.py") or os.path.isfile(os.path.join(place, "__init__.py"))
