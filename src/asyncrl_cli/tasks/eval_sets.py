"""The sets of `eval.sets`: items from files, by name. The task's reward judges them, and none of their prompts is trained."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.paths import expand
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.files import Read
from asyncrl_cli.tasks.item import Item, prompt_key

KINDS = ("jsonl", "parquet")
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


def file_of(source: str, key: str) -> Path:
    """The path in `jsonl:<path>` or `parquet:<path>`, the value of `key`. Raises ConfigError."""
    kind, _, path = source.partition(":")
    if kind not in KINDS or not path:
        raise ConfigError(f'{key} = "{source}" is neither jsonl:<path> nor parquet:<path>', hint=f'{key} = "jsonl:data.jsonl"')
    if (kind == "parquet") != (expand(path).suffix == ".parquet"):
        raise ConfigError(
            f'{key} = "{source}": the file does not look like {kind}', hint="parquet files end in .parquet, and only they do"
        )
    return expand(path)


def read_sets(profile: Profile, read_file: Callable[..., Read]) -> dict[str, Sequence[Item]]:
    """The items of each set. `read_file`: as `files.read_items`, with the task's columns. Raises ConfigError."""
    found: dict[str, Sequence[Item]] = {}
    for name, source in profile.eval.sets.items():
        if not NAME.fullmatch(name):
            raise ConfigError(
                f'eval.sets: "{name:.80}" cannot name a set: metrics are called eval/<name>/...',
                hint="a name has a to z, 0 to 9, - and _, and at most 40 of them",
            )
        key = f"eval.sets.{name}"
        found[name] = tuple(read_file(file_of(source, key), key=key, limit=None).items)
    return found


def check_no_files(profile: Profile) -> None:
    """Raises ConfigError if a profile whose task is not read from a file names sets, or a file of eval prompts."""
    if profile.eval.sets:
        raise ConfigError(
            f"eval.sets are files, and the reward of {profile.task.source} judges its own prompts only",
            hint="leave eval.sets out; eval.prompts says how many prompts are held out",
        )
    if profile.task.eval_path is not None:
        raise ConfigError(
            f"task.eval_path is for files; {profile.task.source} makes its eval prompts itself",
            hint="leave it out; eval.prompts says how many are made",
        )


def without(train: Sequence[Item], sets: Mapping[str, Sequence[Item]]) -> tuple[Sequence[Item], list[str]]:
    """The training items whose prompt is in none of the sets, and notes for the user. Raises ConfigError if none is left."""
    prompts = {prompt_key(item["prompt"]) for items in sets.values() for item in items}
    kept = [item for item in train if prompt_key(item["prompt"]) not in prompts]
    if not kept:
        raise ConfigError("task.source: every training prompt is in one of eval.sets", hint="train on another file")
    num_left = len(train) - len(kept)
    return kept, [f"task.source: left out {num_left:,} rows whose prompt is in one of eval.sets"] if num_left else []
