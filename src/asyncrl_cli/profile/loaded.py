"""Merge the layers of configuration into one validated `Profile`, in which every value keeps its origin.

    defaults  <  profile chain (`extends`)  <  ASYNCRL_SECTION__KEY  <  --set  <  flags

A layer is a flat table of dotted keys. A higher layer replaces the values of lower ones key by key. Some keys
also clear keys of lower layers that no longer apply (`CLEARS`): a run has one length, and a new task source
has its own parameters.

resolved.py writes the result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from pydantic import create_model

from asyncrl_cli.base.child_process import REMOTE_TOKEN
from asyncrl_cli.base.errors import MOST_PROBLEMS, ConfigError, combine, did_you_mean
from asyncrl_cli.base.paths import expand, has_module
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.keys import PARAMS, entries_of, flatten, foreign, keys, sections, unknown_key
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import (
    MAX_DEPTH,
    ProfileFile,
    Table,
    Value,
    Values,
    chain,
    parse_value,
    shortened,
)
from asyncrl_cli.profile.validation import validate

ENV_PREFIX = "ASYNCRL_"
DEFAULT = "default"
"""Origin of a value that no layer gives. If it follows from the machine or the model, the origin goes on:
"default for cuda"."""
MODELS = ("model.path", "ref.path", "teacher.path", "critic.path", "reward_model.path")
"""Each is a directory, or a name on the hub."""
IMPORT_PATH = "task.import_path"
CODE_KEYS = ("task.reward", "task.environment", "task.agent", "task.fields", "task.scorers")
ALIAS, ALIASED = "async_training.use_rollout_log_probs", "algorithm.old_logprobs"

CLEARS = {
    "run.train_steps": ("run.total_rollout_steps",),
    "run.total_rollout_steps": ("run.train_steps",),
    "task.source": (PARAMS,),
    ALIAS: (ALIASED,),
    ALIASED: (ALIAS,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Values by dotted key. They come from `origin`, unless `origins` names another origin for a key."""

    origin: str
    values: Values
    origins: Mapping[str, str] = field(default_factory=dict)


def is_default(origin: str) -> bool:
    return origin == DEFAULT or origin.startswith(f"{DEFAULT} for ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A validated profile, its warnings, and every value's origin by dotted key, including entries of
    `task.params`."""

    profile: Profile
    origins: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def load(
    reference: str,
    sets: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    layers: Sequence[Layer] = (),
) -> Loaded:
    """Read the profile NAME or FILE and apply environment, `--set a.b=c` and flags (dotted keys) on top of
    it.

    `layers` apply directly on top of the files, lowest first; a workload uses them to set its keys for all
    profiles.

    Raises ConfigError for any mistake in any layer.
    """
    files = chain(reference)
    stack = [
        *(file_layer(file) for file in files),
        *layers,
        environment_layer(os.environ if environ is None else environ),
        set_layer(sets),
        Layer(origin="flag", values=dict(flags or {})),
    ]
    values, origins = merge(stack)
    _place_code(values, origins, {file.origin: file.path.parent for file in files})
    file = files[-1]
    values |= {"name": file.content.get("name", file.name), "purpose": file.content.get("purpose", "")}
    origins |= {"name": file.origin, "purpose": file.origin if "purpose" in file.content else DEFAULT}
    profile = validate(values, origins)
    every = {key: origins.get(key, DEFAULT) for key in ("name", "purpose", *entries_of(profile))}
    return Loaded(profile=profile, origins=every, warnings=tuple(check(profile)))


def merge(layers: Sequence[Layer]) -> tuple[Table, dict[str, str]]:
    """Merge layers, lowest first. Returns values and origins by dotted key.

    verl's use_rollout_log_probs sets algorithm.old_logprobs, unless a layer sets the latter directly.
    """
    values: Table = {}
    origins: dict[str, str] = {}
    for layer in layers:
        cleared = [other for key in layer.values for other in CLEARS.get(key, ())]
        for key in list(values):
            if any(key == other or key.startswith(f"{other}.") for other in cleared):
                del values[key], origins[key]
        values |= layer.values
        origins |= {key: layer.origins.get(key, layer.origin) for key in layer.values}
    if isinstance(values.get(ALIAS), bool) and ALIASED not in values:
        values[ALIASED] = "rollout" if values[ALIAS] else "recompute"
        origins[ALIASED] = f"{ALIAS} ({origins[ALIAS]})"
    return values, origins


def file_layer(file: ProfileFile) -> Layer:
    content = {key: value for key, value in file.content.items() if key not in ("extends", "name", "purpose")}
    return Layer(origin=file.origin, values=_anchored(flatten(content, str(file.path)), file.path.parent))


def _place_code(values: Table, origins: dict[str, str], directories: Mapping[str, Path]) -> None:
    """Set task.import_path, unless a layer did, to the directory of the profile file that names a module next
    to it.

    `directories`: each file's directory, by its origin. In other layers a module is in the working directory.
    Raises ConfigError if the modules are in different directories.
    """
    if IMPORT_PATH in values:
        return
    modules, beside = [], dict[tuple[str, str], Path]()
    for key in CODE_KEYS:
        # task.reward may be a list or a table of names, also under `use`; task.scorers has them as values
        given = values.get(key)
        if key == "task.scorers" and isinstance(given, Mapping):
            given = [*given.values()]
        elif isinstance(given, Mapping):
            given = [one.get("use") if isinstance(one, Mapping) else name for name, one in given.items()]
        for name in given if isinstance(given, (list, tuple)) else [given]:
            module, colon, _ = str(name).partition(":")
            if not colon:
                continue
            modules.append((key, module))
            directory = directories.get(origins[key])
            if directory is not None and has_module(directory, module):
                beside[key, module] = directory
    fields = str(values.get("task.fields") or "").partition(":")[0]
    if not beside and fields and has_module(Path.cwd(), fields):
        # Every process imports them, and so does a run that is resumed from elsewhere.
        beside["task.fields", fields] = Path.cwd()
    if not beside:
        return
    (first, _), directory = next(iter(beside.items()))
    values[IMPORT_PATH], origins[IMPORT_PATH] = str(directory), origins[first]
    for key, module in modules:
        place = beside.get((key, module), Path.cwd())
        if place != directory and ((key, module) in beside or has_module(directory, module)):
            one, other = (f'{name} = "{shortened(values[name])}"' for name in (first, key))
            why = f"{one} names a module in {directory}, but {other} one in {place}"
            hint = "put the modules into one directory and name it: --set task.import_path=DIR"
            raise ConfigError(f"{why}: task.import_path is one directory", hint=hint)


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """The layer of ASYNCRL_SECTION__KEY variables. Any other name with the prefix is an error, so that no
    typo is ignored; except for the servers' token, which is in no profile."""
    ours = (name for name in environ if name.upper().startswith(ENV_PREFIX) and name != REMOTE_TOKEN)
    names = {name[len(ENV_PREFIX) :].lower().replace("__", "."): name for name in ours}
    problems = []
    otherwise = "names are ASYNCRL_SECTION__KEY, e.g. ASYNCRL_RUN__TRAIN_STEPS"
    unknown = (key for key in names if key not in keys() and not key.startswith(f"{PARAMS}."))
    for key in islice(unknown, MOST_PROBLEMS + 1):
        row = foreign(key)
        hint = row.hint if row else did_you_mean(key, keys(), otherwise, _env_name)
        problems.append(ConfigError(f"environment: unknown name {shortened(names[key])}", hint=hint))
    for key in names:
        above = next((names[other] for other in names if key.startswith(f"{other}.")), None)
        if above is not None:  # pydantic-settings would ignore the longer name
            beside = f"environment: {above} is given beside {names[key]}"
            problems.append(ConfigError(beside, hint="put both in one table"))
    if problems:
        raise combine(problems)
    if not names:
        return Layer(origin="environment", values={})
    from pydantic_settings import BaseSettings, EnvSettingsSource  # a tenth of a second, for few

    tables: Table = {section: (Table, {}) for section in sections()}
    source = EnvSettingsSource(
        create_model("Environment", __base__=BaseSettings, **tables),
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
    )
    source.env_vars = {name.lower(): environ[name] for name in names.values()}
    values = flatten(_parsed(source()), "environment")
    origins = {key: f"environment {names.get(key, _env_name(PARAMS))}" for key in values}
    return Layer(origin="environment", values=_anchored(values, Path.cwd()), origins=origins)


def _parsed(value: Value) -> Value:
    """Parse every string in nested tables as a TOML value."""
    if isinstance(value, dict):
        return {key: _parsed(item) for key, item in value.items()}
    return parse_value(value) if isinstance(value, str) else value


def _env_name(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")


def set_layer(sets: Sequence[str]) -> Layer:
    """The layer of `--set a.b=c`. If a key is set several times, the last one wins."""
    values: Table = {}
    problems: list[ConfigError] = []
    for text in sets:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or len(parts) > MAX_DEPTH:
            hint = "--set run.train_steps=20"
            raise ConfigError(f"--set {shortened(text)}: expected section.key=value", hint=hint)
        if len(parts) == 1 and parts[0] not in sections():
            raise unknown_key(parts[0], "--set", keys())
        try:
            nested: Value = parse_value(value.strip())
        except ConfigError as error:
            raise ConfigError(f"--set {key.strip()}: {error.message}", hint=error.hint) from None
        for part in reversed(parts):
            nested = {part: nested}
        try:
            values |= flatten(nested, "--set")
        except ConfigError as error:
            problems.append(error)
    if problems:
        raise combine(problems)
    return Layer(origin="--set", values=_anchored(values, Path.cwd()))


def _anchored(values: Values, directory: Path) -> Table:
    """Make paths absolute, so that they survive a resume. A relative path is relative to the file (or the
    shell) that gives it."""
    plain = ("task.eval_path", IMPORT_PATH, "model.cache_dir", "rollout.token_file")
    paths = ("task.source", "model.chat_template", *plain, *MODELS)
    found = {key: values[key] for key in paths if isinstance(values.get(key), str) and values[key]}
    anchored: Table = {key: _anchor(key, value, directory) for key, value in found.items()}
    for key, kind in (("eval.sets", "task.source"), ("teacher.path", "teacher.path")):
        if isinstance(named := values.get(key), Mapping):
            anchored[key] = {
                name: _anchor(kind, path, directory) if isinstance(path, str) else path
                for name, path in named.items()
            }
    return {**values, **anchored}


def _anchor(key: str, value: str, directory: Path) -> str:
    scheme, colon, rest = value.partition(":")
    if key == "task.source":
        is_file = colon and rest and scheme in ("jsonl", "parquet")
        return f"{scheme}:{directory / expand(rest)}" if is_file else value
    path = directory / expand(value)
    if key == "model.chat_template" and scheme == "builtin":
        return value
    if key in MODELS and not os.path.exists(path) and not value.startswith((".", "~")):
        return value
    return str(path)
