"""Code that a profile names, and how every process imports it: implementations by name (built-in ones in a
table, others among the entry points of installed packages), and user code as `module:name`.

This module imports little: the processes that run user code do so, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pkgutil import resolve_name
from typing import Any

from asyncrl_cli.base.errors import ConfigError, first_line

ENGINES = {
    "transformers": "asyncrl_cli.engines.transformers:KIND",
    "remote": "asyncrl_cli.engines.remote:KIND",
    "vllm": "asyncrl_cli.engines.vllm.vllm_kind:KIND",
}
"""The built-in values of `rollout.engine`."""

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NOT_USERS = (PACKAGE, os.path.dirname(os.__file__), "importlib", "site-packages", "<")
"""What the names of files contain that are no user's."""
MAX_REASON_CHARS = 400
MOST_TRACEBACKS = 3
_PRINTED = set[str]()
"""The errors, as lines, whose tracebacks this process has printed."""


def engine_kind(name: str) -> Any:
    """The `engines.port.EngineKind` of an engine; see `find_plugin` for what it raises."""
    return find_plugin("rollout.engine", name, ENGINES, "asyncrl.engines")


def find_plugin(key: str, name: str, ours: Mapping[str, str], group: str, *, also: str = "") -> Any:
    """The object that `key = name` in a profile refers to. `ours`: built-in ones, "module:attribute" by name.
    `group`: entry point group of the others. `also`: other values of the key, for the hint.

    Raises ConfigError if the name is unknown or its package cannot be imported.
    """
    if name in ours:
        return resolve_name(ours[name])
    from importlib.metadata import entry_points  # takes longer than all of this module

    others = {point.name: point for point in entry_points(group=group)}
    if name not in others:
        known = ", ".join([*sorted({*ours, *others}), *([also] if also else [])])
        hint = f"known: {known}; packages add theirs as entry points of {group}"
        raise ConfigError(f'{key} = "{name}" is not known', hint=hint)
    try:
        return others[name].load()
    except Exception as error:  # a user's package may raise anything on import
        hint = f"see {others[name].value}"
        raise ConfigError(f'{key} = "{name}" cannot be imported: {first_line(error)}', hint=hint) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """`name`: "module:attribute". `import_path`: the directory in which the module is looked up first (the
    profile's directory if the module is there, else the working directory). `file`: where it was found.
    `only_there`: it must be imported from `file`."""

    name: str
    import_path: str = ""
    file: str = ""
    only_there: bool = False

    @property
    def attribute(self) -> str:
        return self.name.partition(":")[2]

    def load(self) -> Any:
        """Import the module and return the named attribute. Raises any error of the import."""
        if self.import_path and self.import_path not in sys.path:
            sys.path.insert(0, self.import_path)
        module = self.name.partition(":")[0]
        if self.only_there and (file := self.find()) != self.file:
            raise ImportError(
                f"{module} is {file or 'not a file'} here, but the run began with {self.file or 'no file'}"
            )
        return reduce(getattr, self.attribute.split("."), importlib.import_module(module))

    def find(self) -> str:
        """The module's file, absolute, without running the module; "" if it has none."""
        found = importlib.util.find_spec(self.name.partition(":")[0])
        return (
            os.path.abspath(found.origin) if found is not None and found.has_location and found.origin else ""
        )


def is_user_code(name: str) -> bool:
    module, _, attribute = name.partition(":")
    return bool(module and attribute)


def describe_with_traceback(error: BaseException) -> str:
    """Return `describe(error)`. Print its traceback too, if it is one of the first different errors of this
    process."""
    reason = describe(error)
    if reason not in _PRINTED and len(_PRINTED) < MOST_TRACEBACKS:
        _PRINTED.add(reason)
        traceback.print_exception(error)
    return reason


def describe(error: BaseException) -> str:
    """The error and where users' code raised it, as one line that any encoding can write."""
    message = str(getattr(error, "message", "") or error).encode("utf-8", "backslashreplace").decode()
    frames = traceback.extract_tb(error.__traceback__)
    users = [one for one in frames if not any(other in one.filename for other in NOT_USERS)]
    if frames and not any(ours in frames[-1].filename for ours in ("importlib", PACKAGE)):
        users = users or frames  # a user's package may be installed
    place = f" ({os.path.basename(users[-1].filename)}:{users[-1].lineno})" if users else ""
    return f"{type(error).__name__}: {message}"[:MAX_REASON_CHARS].replace("\n", " ") + place
