"""A task: the items of both splits and the reward, made from a profile's `task` and `eval` sections."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

from asyncrl_cli.base.child_process import ChildFailed, call_once
from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.base.paths import expand
from asyncrl_cli.builtin.builtin_tasks import builtin_task, drawn
from asyncrl_cli.builtin.tiny import Demonstration
from asyncrl_cli.contracts.environment import Adapter, RewardSpec
from asyncrl_cli.contracts.item import Item, content_uid, make_item
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.code_choice import has_tool_class, resolve_reward, resolve_tool_class
from asyncrl_cli.tasks.files import KINDS, file_of, hold_out, read_items, read_sets, splits_of
from asyncrl_cli.tasks.gym import WORKED, make_entries
from asyncrl_cli.tasks.players import read_rows
from asyncrl_cli.tasks.rows import Row, prompt_and_answer
from asyncrl_cli.tasks.tool_class import ToolClass

SOURCES = {
    "builtin": "<task>",
    "reasoning-gym": "<dataset>",
    "jsonl": "<path>",
    "parquet": "<path>",
    "verifiers": "<environment>",
}
MADE_PROMPTS, DRAWN_PROMPTS = 4096, 2048
"""Number of training prompts if `task.train_prompts` is not set: of a reasoning-gym dataset, and of a builtin
task."""
HELD_OUT_AT_LEAST = 512
"""Minimum of eval prompts made by a dataset in its worked form, even if `eval.prompts` is smaller.
builtin:tiny learns from the training prompts, which exclude these, so it is the same model for every smaller
`eval.prompts`."""

LOAD_LIMIT_S = 600.0
"""For the import of verifiers, which takes seconds, and of an environment, which may download its dataset."""
HUB_HINT = (
    'a dataset of the hub is written to a file first: datasets.load_dataset(...)["train"].to_parquet('
    '"train.parquet"), and task.source = "parquet:train.parquet"'
)
DATA_SOURCE = "data_source"
"""verl's column that chooses a row's reward."""
EXACT = (
    'task.reward = "exact-match" compares the whole response with the answer ("math-verify" judges '
    "mathematics)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Items and reward of a task. All prompts differ, also between `train` and `eval`.

    `eval` does not depend on the run's seed, so runs with different seeds can be compared. builtin:tiny
    learns from demonstrations, correct and flawed ones (None if the task has none): texts, or conversations
    if `words` is not None. `words`: texts so frequent that builtin:tiny has a token for each. `ceiling`: the
    mean reward of the best play, where it is known. `notes` tell the user what was left out of the source,
    and why. `num_overlong`: how many prompts were left out for their length, if that is allowed.
    """

    name: str
    train: Sequence[Item]
    eval: Sequence[Item]
    reward: RewardSpec
    demonstration: Demonstration = None
    flawed_demonstration: Demonstration = None
    words: tuple[str, ...] | None = None
    ceiling: float | None = None
    notes: tuple[str, ...] = ()
    tool_class: ToolClass | None = None
    eval_sets: Mapping[str, Sequence[Item]] = field(default_factory=dict)
    num_overlong: int | None = None
    scorers: Mapping[str, UserCode] = field(default_factory=dict)

    @property
    def user_code(self) -> Mapping[str, UserCode]:
        """The user's own code by the names of its records: `reward`, `reward-2`, ..., `environment`, `agent`,
        `scorers-<field>`."""
        scorers = {f"scorers-{name}": code for name, code in self.scorers.items()}
        if self.reward.kind == "agent" and self.reward.function:
            return {"agent": self.reward.function, **scorers}
        tools = self.tool_class
        parts = tools.rewards if tools else ()
        functions = [*self.reward.functions, *(code for part in parts for code in part.spec.functions)]
        names = ("reward", *(f"reward-{number}" for number in range(2, len(functions) + 1)))
        rewards = dict(zip(names, functions, strict=False))
        return {**rewards, **({"environment": tools.code} if tools else {}), **scorers}

    def expected(self, item: Item) -> str | None:
        """The text to compare a response with: the reference answer, in the worked form a correct response;
        None if there is none."""
        if self.reward.adapter == "worked" and self.demonstration:
            return str(self.demonstration(item, Random(0)))
        answer: str | None = item["answer"]
        return answer

    def shown_answer(self, item: Item) -> str | None:
        """`expected`, as samples show it: in a worked response that is matched, only the last list counts."""
        text, is_matched = self.expected(item), self.reward.kind == "exact-match"
        is_part = text is not None and self.reward.adapter == "worked" and is_matched and "," in text
        return f"the last list of {text}" if is_part else text


def load_task(profile: Profile, run_dir: Path | None = None) -> Task:
    """The task of a profile. Raises ConfigError for errors in the profile or in a file.

    `run_dir`: set for a resumed run, whose user code is imported from the recorded files; RefusedError if
    that is impossible.
    """
    source = profile.task.source
    kind, colon, name = source.partition(":")
    if kind not in SOURCES or not (colon and name):
        by_suffix = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(Path(source).suffix)
        as_file = f'task.source = "{by_suffix}:{source:.200}"'
        known = ", ".join(map(":".join, SOURCES.items()))
        hint = as_file if by_suffix and ":" not in source else HUB_HINT
        raise ConfigError(f'task.source = "{source}" is not one of {known}', hint=hint)
    if kind in KINDS:
        task = _file_task(profile, file_of(source, "task.source"), run_dir)
    else:
        if profile.eval.sets:
            why = f"eval.sets are files, and the reward of {source} judges its own prompts only"
            hint = "leave eval.sets out; eval.prompts says how many prompts are held out"
            raise ConfigError(why, hint=hint)
        if profile.task.eval_path is not None:
            why = f"for tasks that are read from a file; {source} makes its eval prompts itself"
            hint = "leave it out; eval.prompts says how many are made"
            raise ConfigError(f"task.eval_path is {why}", hint=hint)
        if kind == "verifiers":
            task = _verifiers_task(profile, name)
        else:
            task = (_builtin_task if kind == "builtin" else _gym_task)(profile, name, run_dir)
    if not has_tool_class(profile):
        return task
    tool_class, notes = resolve_tool_class(profile, run_dir)
    return replace(task, tool_class=tool_class, notes=(*task.notes, *notes))


def _builtin_task(profile: Profile, name: str, run_dir: Path | None) -> Task:
    form, num_eval = _adapter(profile, None), profile.eval.prompts
    task = builtin_task(name, profile.task.params)
    reward, notes = resolve_reward(profile, RewardSpec(kind="none"), run_dir)
    taken: set[str] = set()
    held_out = drawn(task, name, form, "eval", max(num_eval, HELD_OUT_AT_LEAST), taken)[:num_eval]
    stream, num_train = f"train/{profile.run.seed}", profile.task.train_prompts or DRAWN_PROMPTS
    train = drawn(task, name, form, stream, num_train, taken)
    return Task(
        name=profile.task.source,
        train=tuple(train),
        eval=tuple(held_out),
        reward=reward,
        demonstration=task.demonstration,
        flawed_demonstration=task.flawed_demonstration,
        words=task.words,
        ceiling=task.ceiling(held_out or train),
        notes=notes,
    )


def _verifiers_task(profile: Profile, name: str) -> Task:
    """Prompts of an environment made with the package `verifiers`, which a child process loads to read its
    datasets (players.py), and every rollout worker to play it. Eval items come from its own eval dataset, or
    are held out."""
    source, num_eval, wanted = profile.task.source, profile.eval.prompts, profile.task.train_prompts
    python = profile.task.python and shutil.which(expand(profile.task.python))
    if profile.task.python is not None and not python:
        hint = "give the path of a virtual environment's bin/python"
        raise ConfigError(f'task.python = "{profile.task.python}" is not a program', hint=hint)
    spec = RewardSpec(kind="verifiers", dataset=name, params=profile.task.params, python=python or "")
    try:
        rows, eval_rows = call_once(
            read_rows,
            name,
            spec.params,
            None if wanted is None else wanted + num_eval,
            num_eval,
            timeout_s=LOAD_LIMIT_S,
            python=spec.python,
            HF_DATASETS_DISABLE_PROGRESS_BARS="1",
        )
    except ChildFailed as failure:
        raise ConfigError(
            f'task.source = "{source}" cannot be loaded: {failure}',
            hint=f"install the environment's package for {spec.python or sys.executable}; task.params are "
            "the arguments of its load_environment",
        ) from failure
    items = _distinct_rows(rows, source)
    theirs = None if eval_rows is None else _distinct_rows(eval_rows, f"{source} (eval)")
    described = f"{source} has {len(items)} distinct rows"
    train, held_out = hold_out(items, num_eval, described, "lower eval.prompts", theirs)
    notes, num_left = list[str](), len(rows) - len(items)
    if num_left:
        notes.append(f"{source}: left out {num_left:,} rows that repeat an earlier one")
    if len(held_out) < num_eval:
        has = f"has {len(held_out)} distinct rows for eval, fewer than eval.prompts = {num_eval}"
        notes.append(f"{source}: {has}")
    return Task(name=source, train=train[:wanted], eval=held_out, reward=spec, notes=tuple(notes))


def _distinct_rows(rows: Sequence[Row], source: str) -> list[Item]:
    """One item per distinct row. Rows with the same prompt may differ in what only the environment knows: a
    game's secret word."""
    items: dict[str, Item] = {}
    for number, row in enumerate(rows, start=1):
        prompt, answer = prompt_and_answer(row, "prompt", "answer", f"{source}:{number}", needs_answer=False)
        content = {name: value for name, value in row.items() if name != "example_id"}
        item = make_item(prompt, answer, {"row": row})
        uid = content_uid(prompt, json.dumps([content]))
        items.setdefault(uid, {**item, "uid": uid})
    return list(items.values())


def _gym_task(profile: Profile, dataset: str, run_dir: Path | None) -> Task:
    adapter, params = _adapter(profile, dataset), dict(profile.task.params)
    worked = WORKED[dataset] if adapter == "worked" else None
    if worked is not None:
        params = {**worked.default_params, **params}
    spec = RewardSpec(kind="none", dataset=dataset, params=params, adapter=adapter)
    reward, notes = resolve_reward(profile, spec, run_dir)
    train = f"train/{profile.run.seed}"
    wanted = {"eval": profile.eval.prompts, train: profile.task.train_prompts or MADE_PROMPTS}
    made: dict[str, list[Item]] = {}
    if worked is not None and profile.eval.prompts < HELD_OUT_AT_LEAST:
        with suppress(ConfigError):  # the dataset does not have that many
            made = make_entries(reward, {**wanted, "eval": HELD_OUT_AT_LEAST})
    made = made or make_entries(reward, wanted)
    return Task(
        name=profile.task.source,
        train=tuple(made[train]),
        eval=tuple(made["eval"][: profile.eval.prompts]),
        reward=reward,
        demonstration=worked.demonstration if worked else None,
        flawed_demonstration=worked.flawed_demonstration if worked else None,
        notes=notes,
    )


def _adapter(profile: Profile, dataset: str | None) -> Adapter:
    """`dataset`: a reasoning-gym dataset, "" for a file, None for a builtin task. All builtin tasks have a
    worked form."""
    has_worked_form = dataset is None or dataset in WORKED
    if profile.task.adapter == "worked" and not has_worked_form:
        why = f"{profile.task.source} has no worked form; only {', '.join(WORKED)} has"
        raise ConfigError(f'task.adapter = "worked": {why}', hint='task.adapter = "plain"')
    if profile.task.adapter == "auto":
        return "worked" if has_worked_form and profile.model.path == "builtin:tiny" else "plain"
    return profile.task.adapter


def _file_task(profile: Profile, path: Path, run_dir: Path | None) -> Task:
    if profile.task.params:
        why = f"task.params is for reasoning-gym and builtin tasks, not for {profile.task.source}"
        raise ConfigError(why, hint="leave it out")
    spec = RewardSpec(kind="none", adapter=_adapter(profile, ""))
    reward, notes_of_reward = resolve_reward(profile, spec, run_dir)
    prompt, answer = profile.task.prompt_key, profile.task.answer_key
    read = partial(read_items, prompt=prompt, answer=answer, needs_answer=reward.needs_answer)
    train, held_out, notes = splits_of(profile, path, read)
    if reward.kind == "exact-match" and DATA_SOURCE in train[0]["metadata"]:
        notes.append(f"{path}: its column {DATA_SOURCE} does not choose the reward here: {EXACT}")
    train, sets, left_out = read_sets(profile, train, read)
    notes = [*notes_of_reward, *notes, *left_out]
    name = profile.task.source
    return Task(name=name, train=train, eval=held_out, reward=reward, notes=tuple(notes), eval_sets=sets)
