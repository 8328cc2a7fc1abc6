"""Training and eval items of a task that is read from a file: eval items are held out, or come from further
files.

The task's reward judges all of them, and no eval prompt is trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.paths import expand
from asyncrl_cli.contracts.item import Item, prompt_key
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.files import Read

KINDS = ("jsonl", "parquet")
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")

ReadFile = Callable[..., Read]
"""`files.read_items` with the task's columns filled in; it still takes the path, `key` and `limit`."""
Splits = tuple[list[Item], list[Item], list[str]]
"""Training items, eval items, and notes for the user."""


def file_of(source: str, key: str) -> Path:
    """The path in `jsonl:<path>` or `parquet:<path>`, the value of `key`. Raises ConfigError."""
    kind, _, path = source.partition(":")
    if kind not in KINDS or not path:
        raise ConfigError(
            f'{key} = "{source}" is neither jsonl:<path> nor parquet:<path>',
            hint=f'{key} = "jsonl:data.jsonl"',
        )
    if (kind == "parquet") != (expand(path).suffix == ".parquet"):
        raise ConfigError(
            f'{key} = "{source}": the file does not look like {kind}',
            hint="only the names of parquet files end in .parquet",
        )
    return expand(path)


def hold_out(
    items: Sequence[Item], num_eval: int, described: str, hint: str, own: Sequence[Item] | None = None
) -> tuple[list[Item], list[Item]]:
    """Training items and eval items. Eval items are the first of `own` (the source's own eval items), or else
    those with the smallest uids: a random choice that depends neither on a seed nor on the order of `items`.
    Raises ConfigError if none are left to train on; `described`: how many items there are, for that error."""
    held_out = list(sorted(items, key=lambda item: item["uid"]) if own is None else own)[:num_eval]
    uids = {item["uid"] for item in held_out}
    train = [item for item in items if item["uid"] not in uids]
    if not train:
        raise ConfigError(
            f"task.source: {described}, and eval.prompts = {num_eval} of them are held out: none are left to "
            "train on",
            hint=hint,
        )
    return train, held_out


def splits_of(profile: Profile, path: Path, read_file: ReadFile) -> Splits:
    """The items of a file; eval items are held out from it, or read from `task.eval_path`. Raises
    ConfigError."""
    num_eval, wanted = profile.eval.prompts, profile.task.train_prompts
    if profile.task.eval_path is None:
        read = read_file(path, key="task.source", limit=None if wanted is None else wanted + num_eval)
        hint = "lower eval.prompts, or name a file of eval prompts in task.eval_path"
        described = f"{path} has {len(read.items)} distinct prompts"
        train, held_out = hold_out(read.items, num_eval, described, hint)
        limited_by = f"task.train_prompts = {wanted}, and eval.prompts = {num_eval}"
        return train, held_out, _left_out(path, read, limited_by)
    eval_path, notes, held_out = expand(profile.task.eval_path), list[str](), list[Item]()
    if num_eval:
        read = read_file(eval_path, key="task.eval_path", limit=num_eval)
        held_out = read.items
        notes += _left_out(eval_path, read, f"eval.prompts = {num_eval}")
    if len(held_out) < num_eval:
        found = f"has {len(held_out)} distinct prompts, fewer than eval.prompts = {num_eval}"
        notes.append(f"{eval_path}: {found}")
    # So many more than wanted as may be among the eval prompts.
    read = read_file(path, key="task.source", limit=None if wanted is None else wanted + len(held_out))
    train, repeated = _without(read.items, held_out, str(path), "among the eval prompts")
    if not train:
        what = f"task.source: every prompt of {path} is among the eval prompts of {eval_path}"
        raise ConfigError(what, hint="name another file in task.source or in task.eval_path")
    num_unused = 0 if wanted is None else max(0, len(train) - wanted)
    notes += [*repeated, *_left_out(path, read, f"task.train_prompts = {wanted}", num_unused)]
    return train[:wanted], held_out, notes


def _left_out(path: Path, read: Read, limited_by: str, num_more: int = 0) -> list[str]:
    """Notes about rows that were left out. `num_more`: rows that were read but are not used."""
    repeated, behind = read.num_repeated, read.num_behind + num_more
    notes = [f"{path}: left out {repeated:,} rows whose prompt repeats an earlier one"] if repeated else []
    return [*notes, f"{path}: left out its last {behind:,} rows: {limited_by}"] if behind else notes


def read_sets(
    profile: Profile, train: Sequence[Item], read_file: ReadFile
) -> tuple[list[Item], dict[str, Sequence[Item]], list[str]]:
    """The training items whose prompt is in none of the sets, the items of each set, and notes for the user.
    Raises ConfigError."""
    found: dict[str, Sequence[Item]] = {}
    for name, source in profile.eval.sets.items():
        if not NAME.fullmatch(name):
            raise ConfigError(
                f'eval.sets: "{name:.80}" cannot name a set: metrics are called eval/<name>/...',
                hint="a name has at most 40 characters: a to z, 0 to 9, - and _",
            )
        key = f"eval.sets.{name}"
        found[name] = tuple(read_file(file_of(source, key), key=key, limit=None).items)
    items = chain.from_iterable(found.values())
    kept, notes = _without(train, items, "task.source", "in one of eval.sets")
    if not kept:
        raise ConfigError(
            "task.source: every training prompt is in one of eval.sets", hint="train on another file"
        )
    return kept, found, notes


def _without(
    train: Sequence[Item], others: Iterable[Item], source: str, others_are: str
) -> tuple[list[Item], list[str]]:
    """The training items whose prompt is none of the others', and a note for the user if some are left
    out."""
    prompts = {prompt_key(item["prompt"]) for item in others}
    kept = [item for item in train if prompt_key(item["prompt"]) not in prompts]
    num_left = len(train) - len(kept)
    return kept, [f"{source}: left out {num_left:,} rows whose prompt is {others_are}"] if num_left else []
