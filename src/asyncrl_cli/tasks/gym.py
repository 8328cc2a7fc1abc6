"""reasoning-gym: datasets found by name, imported one at a time, made with checked parameters.

`import reasoning_gym` takes a second and a half (sympy, matplotlib, every dataset); one dataset's own module takes a
tenth of it. So the registry is read from the sources' text, and the packages around the wanted module are stood in for
by bare ones while it is imported. They are taken out again: a later `import reasoning_gym` gets the real package.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from asyncrl_cli.errors import ConfigError, PreflightError, did_you_mean

PACKAGE = "reasoning_gym"
SET_ELSEWHERE = {"seed": "run.seed", "size": "task.train_prompts"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A dataset's two classes, and its parameters with their types."""

    dataset_class: Callable[..., Any]
    config_class: Callable[..., Any]
    param_types: Mapping[str, Any]


def _root() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise PreflightError("reasoning-gym is not installed", hint="pip install reasoning-gym")
    return Path(spec.submodule_search_locations[0])


@cache
def dataset_modules() -> Mapping[str, str]:
    """Module of each dataset name, without importing any."""
    root = _root()
    modules: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "register_dataset(" not in text:
            continue
        named = re.findall(r"""(?:^DATASET_NAME\s*=|^register_dataset\()\s*["'](\w+)["']""", text, re.MULTILINE)
        modules.update(dict.fromkeys(named, ".".join([PACKAGE, *path.relative_to(root).with_suffix("").parts])))
    return modules


def dataset_module(name: str) -> str:
    """ConfigError with the nearest names if there is no such dataset."""
    modules = dataset_modules()
    if name not in modules:
        nearest = difflib.get_close_matches(name, modules, n=3, cutoff=0.4)
        raise ConfigError(
            f'task.source: reasoning-gym has no dataset "{name}"',
            hint=f"nearest: {', '.join(nearest)}" if nearest else f"one of: {', '.join(sorted(modules))}",
        )
    return modules[name]


@cache
def registered_dataset(name: str) -> Registered:
    module = dataset_module(name)
    try:
        with _bare_packages_around(module):
            return _registered(name, module)
    except ImportError:  # it needs more of its own package than its module
        return _registered(name, PACKAGE if module.count(".") > 1 else module)


def _registered(name: str, module: str) -> Registered:
    importlib.import_module(module)
    dataset_class, config_class = importlib.import_module(f"{PACKAGE}.factory").DATASETS[name]
    hints = typing.get_type_hints(config_class)
    params = {field.name: hints.get(field.name, Any) for field in dataclasses.fields(config_class) if field.init}
    return Registered(dataset_class=dataset_class, config_class=config_class, param_types=params)


@contextmanager
def _bare_packages_around(module: str) -> Iterator[None]:
    """While active, reasoning_gym and the category's package are empty modules that submodules can be imported from."""
    category, _, _ = module.removeprefix(f"{PACKAGE}.").partition(".")
    if PACKAGE in sys.modules or module.count(".") < 2:
        yield
        return
    root = _root()
    for name, path in ((PACKAGE, root), (f"{PACKAGE}.{category}", root / category)):
        bare = types.ModuleType(name)
        bare.__path__ = [str(path)]
        sys.modules[name] = bare
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]


def make_dataset(name: str, params: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """The dataset with these parameters: entries by index, and `score_answer(answer, entry)`.

    ConfigError names the parameter that is wrong, and why.
    """
    registered = registered_dataset(name)
    checked = {key: _checked_param(name, registered, key, value) for key, value in params.items()}
    own = {key: value for key, value in (("seed", seed), ("size", size)) if key in registered.param_types}
    try:
        with _bare_packages_around(dataset_module(name)):  # some read their data files by the package's name
            return registered.dataset_class(registered.config_class(**checked, **own))
    except Exception as error:
        raise refused_params(name, params, error) from error


def _checked_param(name: str, registered: Registered, key: str, value: Any) -> Any:
    if key in SET_ELSEWHERE:
        raise ConfigError(f"task.params.{key} cannot be set", hint=f"{SET_ELSEWHERE[key]} sets it")
    if key not in registered.param_types:
        known = sorted(set(registered.param_types) - set(SET_ELSEWHERE))
        hint = did_you_mean(key, known, f"it has: {', '.join(known)}")
        raise ConfigError(f'task.params.{key}: dataset "{name}" has no such parameter', hint=hint)
    kind = registered.param_types[key]
    try:
        # Plain numbers and texts must be what they claim to be; containers may come as TOML's lists and tables.
        return TypeAdapter(kind).validate_python(value, strict=kind in (int, float, str, bool))
    except ValidationError as error:
        reason = error.errors()[0]["msg"].lower()
        raise ConfigError(f'task.params.{key} = {value!r}: {reason} (dataset "{name}")') from error


def refused_params(name: str, params: Mapping[str, Any], error: Exception) -> ConfigError:
    """Names the parameters that the dataset's own complaint mentions; all that were given, if it mentions none."""
    reason = str(error) or type(error).__name__
    named = [key for key in params if key in reason] or list(params)
    given = ", ".join(f"task.params.{key} = {params[key]!r}" for key in named)
    return ConfigError(
        f'dataset "{name}" refuses {given or "its default parameters"}: {reason}',
        hint="change task.params; what is not given there has the dataset's default",
    )
