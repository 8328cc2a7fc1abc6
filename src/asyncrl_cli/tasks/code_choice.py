"""What gives rewards and plays episodes: resolves `task.reward` or `task.agent` to a RewardSpec,
`task.environment` to a ToolClass; the driver's side of user code.

User code is tried out before the run begins. A run records the file of each such module, and a resumed run
imports the module only from that file: it may be started in another directory, which may hold another module
of the same name. `run_dir` is set for a resumed run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from typing import Generic, TypeVar, cast

from asyncrl_cli.base.child_process import ChildFailed, ChildTimedOut, call_once
from asyncrl_cli.base.errors import ConfigError, RefusedError, did_you_mean
from asyncrl_cli.base.named_code import UserCode, describe, is_user_code
from asyncrl_cli.base.paths import has_module
from asyncrl_cli.base.safe_files import UnsafeFile, load_json, open_regular, reason
from asyncrl_cli.builtin.builtin_tasks import BUILTIN
from asyncrl_cli.contracts.environment import RewardKind, RewardPart, RewardSpec
from asyncrl_cli.profile.schema import Profile, TaskSection
from asyncrl_cli.tasks.players import load_agent
from asyncrl_cli.tasks.reward_functions import load_function
from asyncrl_cli.tasks.tool_class import ToolClass, check_reward, inspect_class

T = TypeVar("T")
Notes = tuple[str, ...]
BUILT_IN = ("auto", "dataset", "exact-match", "math-verify", "none")
EXPECTED = (
    "the function must take (item, response), or have the parameters of TRL's rewards or of verl's "
    "compute_score"
)
IMPORT_LIMIT_S = 30.0
"""Minimum time allowed for importing a class. It includes the import of transformers, which describes the
tools."""
SCORER_IMPORT_LIMIT_S = 120.0
"""The same for a scorer's class, whose module may import torch."""


def environment_of(task: TaskSection) -> str:
    """The name of the profile's environment. `auto` means a builtin task's own environment, or else
    one-turn."""
    if task.environment != "auto":
        return task.environment
    kind, _, name = task.source.partition(":")
    return BUILTIN[name].environment if kind == "builtin" and name in BUILTIN else "one-turn"


def resolve_reward(profile: Profile, spec: RewardSpec, run_dir: Path | None) -> tuple[RewardSpec, Notes]:
    """Return `spec` with the kind of the profile's rewards or agent, and notes for the user. Raises
    ConfigError.

    `spec` describes the items; its own `kind` is ignored.
    """
    agent, rewards = profile.task.agent, profile.task.rewards
    if agent:
        if not is_user_code(agent):
            hint = 'for example "my_agent:episode"'
            raise ConfigError(f'task.agent = "{agent}" is not of the form module:function', hint=hint)
        expects = "the agent must be an async function of (client, item)"
        tried = try_out(profile, run_dir, "agent", agent, load_agent, expects)
        return replace(spec, kind="agent", function=tried.code), tried.notes
    spec = replace(spec, answer_key=profile.task.answer_key)
    if has_tool_class(profile):  # it calls the user's functions itself, in TRL's signature
        rewards = tuple(one for one in rewards if one.use != "auto" and not is_user_code(one.use))
        if not rewards:
            return replace(spec, kind="episode"), ()
    if isinstance(profile.task.reward, str):
        return _resolved(profile, spec, profile.task.reward, run_dir)
    parts, notes = list[RewardPart](), Notes()
    for name, use, weight in rewards:
        one, more = _resolved(profile, spec, use, run_dir)
        parts.append(RewardPart(name=name, weight=weight, spec=one))
        notes = (*notes, *more)
    return replace(spec, kind="several", parts=tuple(parts)), notes


def _resolved(
    profile: Profile, spec: RewardSpec, reward: str, run_dir: Path | None
) -> tuple[RewardSpec, Notes]:
    """`spec` with the kind of one reward."""
    if reward == "auto":
        default = "dataset" if spec.dataset and spec.adapter == "plain" else "exact-match"
        reward = default if profile.reward_model.path is None else "none"
    if reward == "dataset" and not spec.dataset:
        what = "is for the verifier of a reasoning-gym dataset, and this task.source has none"
        hint = 'task.reward = "exact-match", "math-verify" or "module:function"'
        raise ConfigError(f'task.reward = "dataset" {what}', hint=hint)
    uses = (reward, *(one.use for one in profile.task.rewards))
    form, has_mathematics = profile.task.answer_format, "math-verify" in uses
    if form != "final" and not has_mathematics:
        what = f'is for task.reward = "math-verify", not for "{reward}"'
        raise ConfigError(f'task.answer_format = "{form}" {what}', hint="leave it out")
    if reward in BUILT_IN:
        return replace(spec, kind=cast(RewardKind, reward), answer_format=form), ()
    if not is_user_code(reward):
        raise ConfigError(
            f'task.reward = "{reward}" is not one of {", ".join(BUILT_IN)}, and not of the form '
            "module:function",
            hint=did_you_mean(reward, BUILT_IN, 'for example task.reward = "my_rewards:score"'),
        )
    limit_key, record = "task.reward_timeout_s", reward_record(profile, reward)
    tried = try_out(
        profile, run_dir, "reward", reward, load_function, EXPECTED, limit_key=limit_key, record=record
    )
    return replace(spec, kind="function", function=tried.code), tried.notes


def reward_record(profile: Profile, name: str) -> str:
    """The name of the record of a reward function: `reward`, and `reward-2` and so on for further ones."""
    number = [one.use for one in profile.task.rewards if is_user_code(one.use)].index(name) + 1
    return "reward" if number == 1 else f"reward-{number}"


def has_tool_class(profile: Profile) -> bool:
    """Whether a tool class plays the episodes: the user's, or a builtin task's own."""
    return not profile.task.agent and is_user_code(environment_of(profile.task))


def import_limit_s(profile: Profile) -> float:
    """How long the import of the class may take, when it is tried out and in every rollout worker."""
    return max(IMPORT_LIMIT_S, profile.env.tool_timeout_s)


def resolve_tool_class(profile: Profile, run_dir: Path | None) -> tuple[ToolClass, Notes]:
    """The class that plays the episodes, and notes for the user. Raises ConfigError if it or its reward
    cannot be used."""
    name, notes, rewards = environment_of(profile.task), Notes(), list[RewardPart]()
    if is_user_code(profile.task.environment):
        expects = (
            "it takes no arguments and has `reset`; its public methods are tools, with type hints and "
            "docstrings"
        )
        tried = try_out(profile, run_dir, "environment", name, inspect_class, expects, least_s=IMPORT_LIMIT_S)
        code, (tools, has_reward), notes = tried.code, tried.found, tried.notes
    else:  # a builtin task's own class
        code = UserCode(name=name)
        tools, has_reward = inspect_class(code)
    form = "the function must take TRL's arguments by name"
    for reward_name, reward, weight in profile.task.rewards:
        if is_user_code(reward):
            record = reward_record(profile, reward)
            checked = try_out(
                profile, run_dir, "reward", reward, check_reward, form, least_s=IMPORT_LIMIT_S, record=record
            )
            spec = RewardSpec(kind="function", function=checked.code)
            rewards.append(RewardPart(name=reward_name, weight=weight, spec=spec))
            notes = (*notes, *checked.notes)
    if profile.task.reward == "auto" and not has_reward:
        why = f'task.environment = "{name}" has no method get_reward, and task.reward = "auto"'
        hint = 'add `def get_reward(self) -> float`, or set task.reward = "module:function" (TRL\'s '
        hint += 'signature) or "exact-match"'
        raise ConfigError(f"{why}: nothing gives the reward", hint=hint)
    return ToolClass(code=code, tools=tuple(tools), rewards=tuple(rewards)), notes


def check_fields(profile: Profile, run_dir: Path | None = None) -> tuple[dict[str, UserCode], Notes]:
    """Check the fields that the profile and installed packages declare, and the classes of scorers, in child
    processes: the modules are the user's. Returns the classes by field, and notes for the user. Raises
    ConfigError."""
    name, scorers, notes = profile.task.fields, dict[str, UserCode](), Notes()
    if name is None and not profile.task.scorers and not entry_points(group="asyncrl.fields"):
        return scorers, notes
    limit_s = max(START_LIMIT_S, profile.env.tool_timeout_s)
    try:
        call_once(_declare, profile, timeout_s=limit_s)
    except ChildFailed as failure:
        is_late = isinstance(failure, ChildTimedOut)
        why = f"its module was not imported within {limit_s:g} s" if is_late else str(failure)
        hint = "the module should only declare fields"
        raise ConfigError(f'task.fields = "{name}" cannot be used: {why}', hint=hint) from None
    expects = "it must be a class with a method `score(self, groups, items)`"
    for field, scorer in profile.task.scorers.items():
        key, record, least_s = f"scorers.{field}", f"scorers-{field}", SCORER_IMPORT_LIMIT_S
        tried = try_out(profile, run_dir, key, scorer, _check_scorer, expects, least_s=least_s, record=record)
        scorers[field] = tried.code
        notes = (*notes, *tried.notes)
    return scorers, notes


def _declare(profile: Profile) -> None:
    from asyncrl_cli.data.sample_fields import schema_of  # imports numpy, which a plan does not need

    schema_of(profile)


def _check_scorer(code: UserCode) -> None:
    scorer = code.load()
    if not inspect.isclass(scorer):
        raise TypeError(f"{code.attribute} is not a class but {type(scorer).__name__}")
    if not callable(getattr(scorer, "score", None)):
        raise TypeError(f"{code.attribute} has no method `score`")


START_LIMIT_S = 10.0
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried(Generic[T]):
    """Code with its file, what its check found (None if that is a function), and notes for the user."""

    code: UserCode
    found: T
    notes: Notes


def try_out(
    profile: Profile,
    run_dir: Path | None,
    what: str,
    name: str,
    check: Callable[[UserCode], T],
    expects: str,
    *,
    limit_key: str = "env.tool_timeout_s",
    least_s: float = 0.0,
    record: str = "",
) -> Tried[T]:
    """Load the code that `task.<what> = name` names, with `check`, in a child process.

    `run_dir`: set for a resumed run, whose code is imported from the recorded files; raises RefusedError if
    that is impossible. `record`: the name of the code's record, if it is not `what`. `expects`: what the code
    has to be, for the hint. The import may take as long as `limit_key` says, but at least START_LIMIT_S and
    `least_s`. Raises ConfigError if the code cannot be used.
    """
    module, notes = name.partition(":")[0], Notes()
    if run_dir is None:
        directory = profile.task.import_path
        is_there = directory is not None and has_module(Path(directory), module)
        code = UserCode(name=name, import_path=directory if directory and is_there else os.getcwd())
    else:  # the module must be imported from the recorded file ("": from none, it is one of Python's own)
        file, notes = recorded_file(run_dir, what, name, record)
        parents, root = Path(file).parents, ""
        if file:  # its root is the directory in which the module can be found by its name
            depth = module.count(".") + (Path(file).stem == "__init__")
            root = str(parents[min(depth, len(parents) - 1)])
        code = UserCode(name=name, import_path=root, file=file, only_there=True)
    limit_s = max(START_LIMIT_S, least_s, attrgetter(limit_key)(profile))
    try:
        file, found = call_once(_checked, code, check, timeout_s=limit_s)
        return Tried(code=replace(code, file=file), found=cast(T, found), notes=notes)
    except ChildTimedOut:
        why = f"its module was not imported within {limit_s:g} s"
        hint = f"move slow work into the first call, or raise {limit_key}, which limits the import too"
    except ChildFailed as failure:
        only = f"only from {code.file or 'Python'}, as the record says"
        where = only if code.only_there else f"in {code.import_path} first"
        why, hint = str(failure), f"the module is imported {where}; {expects}"
    raise ConfigError(f'task.{what} = "{name}" cannot be used: {why}', hint=hint)


def _checked(code: UserCode, check: Callable[[UserCode], object]) -> tuple[str, object]:
    """Runs in the child. If `check` returns a function, the parent gets None instead."""
    try:
        found = check(code)
        return code.find(), None if callable(found) else found
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ChildFailed(describe(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record of a module. `function`: the name in the profile. `file` is absolute, or "" for a built-in
    module of Python. `sha256` is "" for a module in an archive."""

    schema_version: int
    function: str
    file: str
    sha256: str


def keep_record(run_dir: Path, record: str, code: UserCode | None) -> None:
    """Write the record of a new run's code as `<record>.json` ("reward.json", say). A resumed run keeps its
    record."""
    path = run_dir / f"{record}.json"
    if code is not None and not path.exists():
        sha256 = _sha256(code.file) if os.path.isfile(code.file) else ""
        content = Record(schema_version=SCHEMA_VERSION, function=code.name, file=code.file, sha256=sha256)
        path.write_text(json.dumps(asdict(content), indent=2) + "\n", encoding="utf-8")


def recorded_file(run_dir: Path, what: str, name: str, record: str = "") -> tuple[str, Notes]:
    """The recorded file of the run's code, and a note for the user if it has changed. Raises RefusedError if
    either is missing."""
    path = run_dir / f"{record or what}.json"
    if not path.exists():
        why = f'{path} is missing: it records where task.{what} = "{name}" was imported from'
        only = "a resumed run imports the module only from its recorded file"
        raise RefusedError(why, hint=f"{only}: restore the record from a copy")
    found = load_json(path, Record, hint="it was written when the run began; restore it from a copy")
    if found.schema_version != SCHEMA_VERSION or found.function != name:
        what = f"it is the record of {found.function} (schema {found.schema_version})"
        hint = "restore the record that was written when the run began"
        raise RefusedError(f"{path} is not of this run: {what}", hint=hint)
    if found.file == "":
        return "", ()
    try:
        has_changed = found.sha256 != "" and found.sha256 != _sha256(found.file)
    except (OSError, UnsafeFile) as error:
        why = f"the run's {what} module {found.file} cannot be read: {reason(error)}"
        hint = f"restore it, or write its new place into {path}: the module is imported only from there"
        raise RefusedError(why, hint=hint) from error
    return found.file, (f"task.{what}: {found.file} has changed since the run began",) if has_changed else ()


def origin(run_dir: Path, record: str, code: UserCode | None) -> str:
    """Says which file a resumed run's code is imported from; "" for a new run's code and for a built-in
    module."""
    if code is None or not (code.only_there and code.file):
        return ""
    key, path = record.partition("-")[0], run_dir / f"{record}.json"
    return f"task.{key} is imported from {code.file}, as {path} says"


def _sha256(file: str) -> str:
    with open_regular(Path(file)) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
