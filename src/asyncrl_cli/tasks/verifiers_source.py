"""`task.source = "verifiers:<environment>"`: prompts of an environment made with the package `verifiers`, and
what plays them.

The environment is loaded in child processes only (players.py): here to read its datasets, in rollout
workers to play it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence

from asyncrl_cli.base.child_process import ChildFailed, call_once
from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.paths import expand
from asyncrl_cli.contracts.item import Item, content_uid, make_item
from asyncrl_cli.contracts.reward_spec import RewardSpec
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.players import read_rows
from asyncrl_cli.tasks.rows import Row, prompt_and_answer
from asyncrl_cli.tasks.splits import Splits, hold_out

LOAD_LIMIT_S = 600.0
"""For the import of the package, which takes seconds, and of the environment, which may download its
dataset."""


def verifiers_spec(profile: Profile, name: str) -> RewardSpec:
    """The spec of the environment's player. Raises ConfigError if `task.python` is not a program."""
    python = profile.task.python
    if python is not None and (found := shutil.which(expand(python))) is None:
        raise ConfigError(
            f'task.python = "{python}" is not a program',
            hint="give the path of a virtual environment's bin/python",
        )
    return RewardSpec(
        kind="verifiers",
        dataset=name,
        params=profile.task.params,
        python="" if python is None else str(found),
    )


def verifiers_items(profile: Profile, spec: RewardSpec) -> Splits:
    """The environment's items; eval items come from its own eval dataset, or are held out. Raises
    ConfigError."""
    source, num_eval, wanted = profile.task.source, profile.eval.prompts, profile.task.train_prompts
    rows, eval_rows = _read(spec, None if wanted is None else wanted + num_eval, num_eval)
    items, own = (
        _distinct(rows, source),
        None if eval_rows is None else _distinct(eval_rows, f"{source} (eval)"),
    )
    train, held_out = hold_out(
        items, num_eval, f"{source} has {len(items)} distinct rows", "lower eval.prompts", own
    )
    notes = (
        [f"{source}: left out {len(rows) - len(items):,} rows that repeat an earlier one"]
        if len(items) < len(rows)
        else []
    )
    if len(held_out) < num_eval:
        notes.append(
            f"{source}: has {len(held_out)} distinct rows for eval, fewer than eval.prompts = {num_eval}"
        )
    return train[:wanted], held_out, notes


def _read(spec: RewardSpec, most_train: int | None, most_eval: int) -> tuple[list[Row], list[Row] | None]:
    try:
        return call_once(
            read_rows,
            spec.dataset,
            spec.params,
            most_train,
            most_eval,
            timeout_s=LOAD_LIMIT_S,
            python=spec.python,
            HF_DATASETS_DISABLE_PROGRESS_BARS="1",
        )
    except ChildFailed as failure:
        python = spec.python or sys.executable
        raise ConfigError(
            f'task.source = "verifiers:{spec.dataset}" cannot be loaded: {failure}',
            hint=f"install the environment's package for {python}; task.params are the arguments of its "
            "load_environment",
        ) from failure


def _distinct(rows: Sequence[Row], source: str) -> list[Item]:
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
