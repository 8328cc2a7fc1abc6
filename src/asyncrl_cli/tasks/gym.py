"""Prompts from reasoning-gym: finds datasets by name, imports only the one wanted, checks its parameters,
makes its entries.

`import reasoning_gym` takes a second and a half (sympy, matplotlib, every dataset); one dataset's own module
takes a tenth of that. So dataset names are read from the text of the sources, and while the wanted module is
imported, empty packages stand in for the packages that contain it. They are removed afterwards: a later
`import reasoning_gym` gets the real package.

Prompts are made in a process of their own. Some datasets iterate over sets of strings or draw from the global
generator, so the same seed gives different entries in different processes. That process fixes the hash seed
and the global generator, because a resumed run must find the prompts that it began with.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import json
import random
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from asyncrl_cli.base.child_process import ChildFailed, call_once
from asyncrl_cli.base.errors import ConfigError, did_you_mean
from asyncrl_cli.builtin.number_sorting import WORKED
from asyncrl_cli.contracts.item import Item, make_item, take_new
from asyncrl_cli.contracts.reward_spec import RewardSpec

PACKAGE = "reasoning_gym"
SET_ELSEWHERE = {"seed": "run.seed", "size": "task.train_prompts"}
GENERATE_TIMEOUT_S = 600.0
MAX_TRIES_PER_PROMPT = 50
MIN_TRIES = 500

Registered = tuple[Callable[..., Any], Callable[..., Any], Mapping[str, Any]]
"""A dataset's class, its configuration's class, and the types of its parameters by name."""


def _root() -> Path:
    return Path(importlib.util.find_spec(PACKAGE).origin).parent


@cache
def dataset_modules() -> Mapping[str, str]:
    """Dataset name -> module, without importing any."""
    root = _root()
    modules: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "register_dataset(" not in text:
            continue
        named = re.findall(
            r"""(?:^DATASET_NAME\s*=|^register_dataset\()\s*["'](\w+)["']""", text, re.MULTILINE
        )
        modules.update(
            dict.fromkeys(named, ".".join([PACKAGE, *path.relative_to(root).with_suffix("").parts]))
        )
    return modules


def dataset_module(name: str) -> str:
    """The module of a dataset. ConfigError with the nearest names if there is no such dataset."""
    modules = dataset_modules()
    if name not in modules:
        nearest = difflib.get_close_matches(name, modules, n=3, cutoff=0.4)
        raise ConfigError(
            f'task.source: reasoning-gym has no dataset "{name}"',
            hint=f"nearest: {', '.join(nearest)}" if nearest else f"one of: {', '.join(sorted(modules))}",
        )
    return modules[name]


@cache
def _registered(name: str) -> Registered:
    module = dataset_module(name)
    try:
        with _bare_packages_around(module):
            return _imported(name, module)
    except ImportError:  # the module needs the rest of its package
        return _imported(name, PACKAGE if module.count(".") > 1 else module)


def _imported(name: str, module: str) -> Registered:
    importlib.import_module(module)
    dataset_class, config_class = importlib.import_module(f"{PACKAGE}.factory").DATASETS[name]
    hints = get_type_hints(config_class)
    return (
        dataset_class,
        config_class,
        {field.name: hints[field.name] for field in dataclasses.fields(config_class) if field.init},
    )


@contextmanager
def _bare_packages_around(module: str) -> Iterator[None]:
    """While active, reasoning_gym and the category's package are empty packages whose submodules can be
    imported."""
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

    Raises a ConfigError that names the wrong parameter and says why it is wrong.
    """
    dataset_class, config_class, kinds = _registered(name)
    checked = {key: _checked_param(name, kinds, key, value) for key, value in params.items()}
    own = {key: value for key, value in (("seed", seed), ("size", size)) if key in kinds}
    try:
        # some datasets read data files by the package's name
        with _bare_packages_around(dataset_module(name)):
            return dataset_class(config_class(**checked, **own))
    except Exception as error:
        raise _refused_params(name, params, error) from error


def _checked_param(name: str, kinds: Mapping[str, Any], key: str, value: Any) -> Any:
    if key in SET_ELSEWHERE:
        raise ConfigError(f"task.params.{key} cannot be set", hint=f"{SET_ELSEWHERE[key]} sets it")
    if key not in kinds:
        known = sorted(set(kinds) - set(SET_ELSEWHERE))
        hint = did_you_mean(key, known, f"it has: {', '.join(known)}")
        raise ConfigError(f'task.params.{key}: dataset "{name}" has no such parameter', hint=hint)
    kind = kinds[key]
    try:
        # Numbers and texts must have exactly the right type; containers may come as TOML's lists and tables.
        return TypeAdapter(kind).validate_python(value, strict=kind in (int, float, str, bool))
    except ValidationError as error:
        reason = error.errors()[0]["msg"].lower()
        raise ConfigError(f'task.params.{key} = {value!r}: {reason} (dataset "{name}")') from error


def _refused_params(name: str, params: Mapping[str, Any], error: Exception) -> ConfigError:
    """An error that names the parameters mentioned in the dataset's own error, or all that were given if it
    mentions none."""
    reason = str(error) or type(error).__name__
    named = [key for key in params if key in reason] or list(params)
    given = ", ".join(f"task.params.{key} = {params[key]!r}" for key in named)
    return ConfigError(
        f'dataset "{name}" refuses {given or "its default parameters"}: {reason}',
        hint="change task.params; parameters that are not given there have the dataset's defaults",
    )


def make_entries(spec: RewardSpec, num_prompts: Mapping[str, int]) -> dict[str, list[Item]]:
    """Items of the reward's dataset: `num_prompts[stream]` of them for each stream, with their entries as
    metadata.

    A stream is an independent, reproducible sequence; no prompt is in two of them. Raises ConfigError for
    wrong parameters, or if the dataset has too few prompts.
    """
    try:
        return call_once(_made, spec, num_prompts, timeout_s=GENERATE_TIMEOUT_S, PYTHONHASHSEED="0")
    except ChildFailed as failure:
        raise ConfigError(f'dataset "{spec.dataset}" cannot make its prompts: {failure}') from failure


def _made(spec: RewardSpec, num_prompts: Mapping[str, int]) -> dict[str, list[Item]]:
    """`make_entries`, in the child."""
    random.seed(0)  # some datasets draw from the global generator
    taken: set[str] = set()
    return {stream: _distinct(spec, stream, num, taken) for stream, num in num_prompts.items()}


def _distinct(spec: RewardSpec, stream: str, num: int, taken: set[str]) -> list[Item]:
    """`num` items whose prompts differ from each other and from `taken`; their prompts are added to `taken`.

    Raises ConfigError with the numbers if the dataset keeps repeating itself.
    """
    found, num_tries = list[Item](), 0
    for chunk in count():
        seed = stream_seed(spec.dataset, spec.params, f"{stream}/{chunk}")
        more, num_seen = take_new(_items(spec, seed, max(num, MIN_TRIES)), num - len(found), taken)
        found, num_tries = found + more, num_tries + num_seen
        if len(found) == num:
            break
        if not more or num_tries > MAX_TRIES_PER_PROMPT * num:
            raise _too_few(spec.dataset, stream, num, len(found), len(taken), num_tries)
    return found


def stream_seed(name: str, params: Mapping[str, Any], stream: str) -> int:
    """The seed of a stream. A dataset makes item i from seed + i, so seeds must lie far apart, or two streams
    share items."""
    content = json.dumps([name, params, stream], sort_keys=True, default=repr)
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little") % 2**31


def _items(spec: RewardSpec, seed: int, size: int) -> Iterator[Item]:
    dataset = make_dataset(spec.dataset, spec.params, seed=seed, size=size)
    for index in range(size):
        try:
            entry = dataset[index]
            prompt = str(entry["question"]) if spec.adapter == "plain" else WORKED[spec.dataset].prompt(entry)
        except IndexError:  # some datasets have a finite stock, smaller than `size`
            return
        except Exception as error:
            raise _refused_params(spec.dataset, spec.params, error) from error
        yield make_item(prompt, entry["answer"], {"entry": entry})


def _too_few(
    name: str, stream: str, num: int, num_found: int, num_distinct: int, num_tries: int
) -> ConfigError:
    key = "eval.prompts" if stream == "eval" else "task.train_prompts"
    return ConfigError(
        f'dataset "{name}" with these parameters made only {num_found} of {num} new prompts for {key} in '
        f"{num_tries} "
        f"tries ({num_distinct} distinct ones in all, train and eval together)",
        hint=f"lower {key}, or widen task.params",
    )
