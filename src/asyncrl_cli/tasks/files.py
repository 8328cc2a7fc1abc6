"""Items from a file: jsonl (one object per line) or parquet. Every complaint names the file and the line or row."""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.errors import ConfigError, PreflightError
from asyncrl_cli.tasks.item import Item, make_item

ROWS_PER_BATCH = 1024

Row = tuple[str, Mapping[str, Any]]
"""Where it is (`file:line`), and its columns."""


def read_items(
    path: Path, *, key: str, prompt_column: str, answer_column: str, needs_answer: bool, limit: int
) -> tuple[list[Item], int]:
    """The first `limit` items whose prompts differ, and how many rows were left out as repeating a prompt.

    `key` is the profile's key that names the file. All other columns become the item's metadata.
    """
    items: dict[str, Item] = {}
    num_repeated = 0
    for place, row in _rows(path, key):
        prompt = _text(row, prompt_column, place, "task.prompt_column")
        answer = _answer(row, answer_column, place, needs_answer)
        if prompt in items:
            num_repeated += 1
            continue
        others = {name: value for name, value in row.items() if name not in (prompt_column, answer_column)}
        items[prompt] = make_item(prompt, answer, others)
        if len(items) == limit:
            break
    if not items:
        raise ConfigError(f"{key}: {path} holds no rows")
    return list(items.values()), num_repeated


def _rows(path: Path, key: str) -> Iterator[Row]:
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ConfigError(f"{key}: {path} {what}", hint=f"paths are relative to {Path.cwd()}")
    try:
        yield from _parquet_rows(path, key) if path.suffix == ".parquet" else _jsonl_rows(path)
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not UTF-8 text: {error.reason}") from error


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        empty_at = ""
        for number, line in enumerate(lines, start=1):
            place = f"{path}:{number}"
            if not line.strip():
                empty_at = empty_at or place
                continue
            if empty_at:  # an empty line at the very end is none
                raise ConfigError(f"{empty_at}: the line is empty", hint="every line is one JSON object")
            yield place, _json_object(line, place)


def _json_object(line: str, place: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: not a JSON object but {type(row).__name__}", hint="every line is one JSON object")
    return row


def _parquet_rows(path: Path, key: str) -> Iterator[Row]:
    if importlib.util.find_spec("pyarrow") is None:
        raise PreflightError("parquet files need a package that is not installed", hint="pip install pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{key}: {path} is not a parquet file: {error}") from error


def _text(row: Mapping[str, Any], column: str, place: str, key: str) -> str:
    value = _column(row, column, place, key)
    if not isinstance(value, str):
        raise ConfigError(f'{place}: column "{column}" is not text but {type(value).__name__}')
    if not value.strip():
        raise ConfigError(f'{place}: column "{column}" is empty')
    return value


def _answer(row: Mapping[str, Any], column: str, place: str, needs_answer: bool) -> str | None:
    if not needs_answer and row.get(column) is None:
        return None
    value = _column(row, column, place, "task.answer_column")
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ConfigError(f'{place}: column "{column}" is neither text nor a number but {type(value).__name__}')
    if needs_answer and not value.strip():
        raise ConfigError(f'{place}: column "{column}" is empty')
    return value


def _column(row: Mapping[str, Any], column: str, place: str, key: str) -> Any:
    if column not in row:
        raise ConfigError(
            f'{place}: no column "{column}"; it has: {", ".join(row) or "none"}',
            hint=f"set {key}{_nearest(column, row)}",
        )
    return row[column]


def _nearest(column: str, columns: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(column, list(columns), n=1)
    return f' = "{nearest[0]}"' if nearest else " to one of them"
