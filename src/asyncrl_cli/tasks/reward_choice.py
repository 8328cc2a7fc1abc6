"""Turns `task.reward` into a RewardSpec, and tries a user's function out before the run begins.

A run records the file of its reward function's module, and a resume imports it only from there: a resume may be started in any
directory, where a module of the same name would be another one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.safe_files import UnsafeFile, load_json, open_regular, reason
from asyncrl_cli.tasks.child import ChildFailed, ChildTimedOut, call_once
from asyncrl_cli.tasks.reward_worker import describe
from asyncrl_cli.tasks.scoring import Adapter, RewardSpec, build_scorer, module_file

START_LIMIT_S = 10.0
BUILT_IN = ("auto", "dataset", "exact-match", "math-verify")
RECORD = "reward.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModule:
    """The record in reward.json. `file` is absolute, or "" for a built-in module of Python. `sha256` is "" for a module in an
    archive."""

    schema_version: int
    function: str
    file: str
    sha256: str


def resolve_reward(
    reward: str,
    *,
    dataset: str,
    params: Mapping[str, Any],
    adapter: Adapter,
    timeout_s: float = START_LIMIT_S,
    only_file: str | None = None,
) -> RewardSpec:
    """The spec of `task.reward`; `dataset` is "" for files. A `module:function` is tried out in a child process.

    `timeout_s`: the limit of one reward; the module's import may take as long, or START_LIMIT_S if that is more. `only_file`: the
    module must be imported from this file. Raises ConfigError.
    """
    if reward == "auto":
        reward = "dataset" if dataset and adapter == "plain" else "exact-match"
    if reward == "dataset" and not dataset:
        raise ConfigError(
            'task.reward = "dataset" is the verifier of a reasoning-gym dataset, and this source has none',
            hint='task.reward = "exact-match", "math-verify" or "module:function"',
        )
    if reward in BUILT_IN:
        return RewardSpec(kind=cast(Any, reward), dataset=dataset, params=params, adapter=adapter)
    module, colon, function = reward.partition(":")
    if not (colon and module and function):
        raise ConfigError(
            f'task.reward = "{reward}" is none of {", ".join(BUILT_IN)} and not of the form module:function',
            hint='for example task.reward = "my_rewards:score"',
        )
    spec = RewardSpec(
        kind="function",
        dataset=dataset,
        params=params,
        adapter=adapter,
        function=reward,
        import_path=os.getcwd() if only_file is None else _import_root(module, only_file),
        module_file=only_file or "",
        only_there=only_file is not None,
    )
    return replace(spec, module_file=_tried(spec, max(START_LIMIT_S, timeout_s)))


def _import_root(module: str, file: str) -> str:
    """The directory in which the module can be found by its name."""
    if file == "":
        return ""
    parents = Path(file).parents
    return str(parents[min(module.count(".") + (Path(file).stem == "__init__"), len(parents) - 1)])


def _tried(spec: RewardSpec, limit_s: float) -> str:
    """Try the function out in a child. Returns the file of its module. ConfigError if the function cannot be used."""
    try:
        return str(call_once(_try_out, spec, timeout_s=limit_s))
    except ChildTimedOut:
        why = f"its module was not imported within {limit_s:g} s"
        hint = "move what takes long into the function's first call, or raise task.reward_timeout_s: an import may take as long"
    except ChildFailed as failure:
        where = "only from there, as the run's record says" if spec.only_there else f"in {spec.import_path} first"
        why, hint = str(failure), f"the module is imported {where}; the function takes (item, response)"
    raise ConfigError(f'task.reward = "{spec.function}" cannot be used: {why}', hint=hint)


def _try_out(spec: RewardSpec) -> str:
    """Runs in the child."""
    try:
        build_scorer(spec)
        return module_file(spec)
    except (Exception, SystemExit) as error:
        raise ChildFailed(describe(error)) from None


def keep_reward_module(run_dir: Path, function: str, file: str) -> None:
    """Write the record of a new run's reward function; a resumed run keeps its record."""
    path = run_dir / RECORD
    if function and not path.exists():
        sha256 = _sha256(file) if os.path.isfile(file) else ""
        module = RewardModule(schema_version=SCHEMA_VERSION, function=function, file=file, sha256=sha256)
        path.write_text(json.dumps(asdict(module), indent=2) + "\n", encoding="utf-8")


def recorded_module(run_dir: Path, function: str) -> tuple[str, str]:
    """The recorded file of the run's reward function, and a note for the user. RefusedError if record or file is missing."""
    path = run_dir / RECORD
    if not path.exists():
        raise RefusedError(
            f'{path} is missing: it records where task.reward = "{function}" was imported from',
            hint="a module is imported from where the run's record says, and from nowhere else: bring the record back from a copy",
        )
    module = load_json(path, RewardModule, hint="it was written when the run began; bring it back from a copy")
    if module.schema_version != SCHEMA_VERSION or module.function != function:
        raise RefusedError(f"{path} is not of this run: it is the record of {module.function} (schema {module.schema_version})")
    if module.file == "":
        return "", ""
    try:
        has_changed = module.sha256 != "" and module.sha256 != _sha256(module.file)
    except (OSError, UnsafeFile) as error:
        raise RefusedError(
            f"the run's reward module {module.file} cannot be read: {reason(error)}",
            hint=f"bring it back, or write its new place into {path}: it is imported from there, and from nowhere else",
        ) from error
    note = f"rewards are imported from {module.file}, as {path} says"
    return module.file, f"{note}; the file has changed since the run began" if has_changed else note


def _sha256(file: str) -> str:
    with open_regular(Path(file)) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
