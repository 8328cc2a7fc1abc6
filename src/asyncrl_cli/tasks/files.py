"""Reads items from jsonl files (one object per line) or parquet files (whose columns may also hold times,
dates, decimals, bytes, lists and dicts). Every error names the file and the line or row.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from asyncrl_cli.base.errors import ConfigError, first_line
from asyncrl_cli.base.paths import missing_hint
from asyncrl_cli.base.safe_files import MAX_NESTING, UnsafeFile, nesting, open_regular, read_lines, reason
from asyncrl_cli.contracts.item import Item, make_item, prompt_key
from asyncrl_cli.tasks.rows import Row, prompt_and_answer

UTF8_SIGNATURE = b"\xef\xbb\xbf"
ROWS_PER_BATCH = 1024
PLAIN_JSON = "write each line with json.dumps(row, allow_nan=False), and very long numbers as text"
AS_TEXT = "write the inner value as text"
ONE_OBJECT = 'every line is one JSON object: `{"prompt": "1+1=", "answer": "2"}`'


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The items of files, and how many rows were left out: `num_repeated` repeat an earlier row's prompt,
    `num_behind` come after the last row that was wanted."""

    items: list[Item]
    num_repeated: int
    num_behind: int


def read_items(
    path: Path, *, key: str, prompt: str, answer: str, needs_answer: bool, limit: int | None
) -> Read:
    """The first `limit` items with distinct prompts, from one file or from all files that match a pattern
    like `train-*.parquet`, in the order of their names. `prompt` and `answer` name columns, or fields in them
    (`column.field`). All other columns become an item's metadata.

    `key`: the profile's key that names the file, for errors. Raises ConfigError.
    """
    is_parquet = path.suffix == ".parquet"

    def count(file: Path) -> int:
        if not is_parquet:
            return sum(1 for line in read_lines(file) if line.strip())
        with _opened(file) as parquet:
            return int(parquet.metadata.num_rows)

    items: dict[str, Item] = {}
    num_rows = num_behind = 0
    with _readable(path, key):
        files = sorted(path.parent.glob(path.name)) if "*" in path.name else [path]
        for place, row in chain.from_iterable(map(_parquet_rows if is_parquet else _jsonl_rows, files)):
            num_rows += 1
            asked, expected = prompt_and_answer(row, prompt, answer, place, needs_answer=needs_answer)
            if (name := prompt_key(asked)) in items:
                continue
            items[name] = make_item(
                asked, expected, {column: row[column] for column in row if column not in (prompt, answer)}
            )
            if len(items) == limit:
                num_behind = sum(map(count, files)) - num_rows
                break
    if not items:
        if not files:
            raise ConfigError(f"{key}: no file matches {path}", hint=missing_hint(path))
        raise ConfigError(
            f"{key}: {path} holds no rows",
            hint="write one JSON object per line into it, or name another file",
        )
    return Read(items=list(items.values()), num_repeated=num_rows - len(items), num_behind=num_behind)


@contextmanager
def _readable(path: Path, key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: {path} does not exist", hint=missing_hint(path)) from error
    except UnsafeFile as error:
        is_parquet = path.suffix == ".parquet"
        hint = "name a parquet file" if is_parquet else "write one JSON object per line into a file"
        raise ConfigError(f"{key}: {path!s:.300} cannot be read: {reason(error)}", hint=hint) from error
    except OSError as error:
        hint = f"check the path and its permissions: `ls -l {shlex.quote(f'{path!s:.300}')}`"
        raise ConfigError(f"{key}: {path!s:.300} cannot be read: {reason(error)}", hint=hint) from error


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(`path:line`, columns) of each row. Strict JSON: no NaN and no duplicate keys (readers disagree on
    both), and no nesting that is too deep to be pickled."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number, write null")

    empty_at = ""
    for number, line in enumerate(read_lines(path), start=1):
        place = f"{path}:{number}"
        line = line.removeprefix(UTF8_SIGNATURE) if number == 1 else line
        if not line.strip():
            empty_at = empty_at or place
            continue
        if empty_at:  # empty lines at the very end are allowed
            raise ConfigError(f"{empty_at}: the line is empty", hint=ONE_OBJECT)
        too_deep = f"{place}: nested more than {MAX_NESTING} deep"
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=refuse, object_pairs_hook=_distinct)
        except json.JSONDecodeError as error:
            why = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            raise ConfigError(f"{place}: not JSON: {why}", hint=ONE_OBJECT) from error
        except UnicodeDecodeError as error:
            what = f"{place}: not UTF-8 text (byte {error.start})"
            raise ConfigError(what, hint="save the file as UTF-8") from error
        except RecursionError:
            raise ConfigError(too_deep, hint=AS_TEXT) from None
        except ValueError as error:
            why = str(error).partition(";")[0]
            raise ConfigError(f"{place}: not JSON: {why}", hint=PLAIN_JSON) from error
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: not a JSON object but {type(row).__name__}", hint=ONE_OBJECT)
        if line.count(b"[") + line.count(b"{") > MAX_NESTING and nesting(row) > MAX_NESTING:
            raise ConfigError(too_deep, hint=AS_TEXT)
        yield place, row


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f'the key "{twice:.80}" appears twice')
    return found


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(`path:row`, columns) of each row. Times are cut to Python's microseconds. Raises ConfigError for
    unreadable values."""
    with _opened(path) as parquet:
        number = 0
        for batch in parquet.iter_batches(batch_size=ROWS_PER_BATCH):
            named = zip(batch.schema.names, batch.columns, strict=True)
            columns = {column: _values(values, f'{path}: column "{column}"') for column, values in named}
            for row in zip(*columns.values(), strict=True):
                number += 1
                yield f"{path}:{number}", dict(zip(columns, row, strict=True))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open ParquetFile. Raises ConfigError if it is not one, has a column twice, or turns out damaged
    while it is read."""
    import pyarrow
    import pyarrow.parquet

    with open_regular(path) as file:
        wrong = "is not a whole parquet file"
        try:
            with pyarrow.parquet.ParquetFile(file) as parquet:
                wrong = "is damaged"
                twice = [column for column, count in Counter(parquet.schema_arrow.names).items() if count > 1]
                if twice:
                    raise ConfigError(
                        f'{path}: column "{twice[0]}" appears twice',
                        hint="rewrite the file with distinct names",
                    )
                yield parquet
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(
                f"{path} {wrong}: {first_line(error)}", hint="write or download it again"
            ) from error


def _values(column: Any, where: str) -> list[object]:
    try:
        values: list[object] = column.cast(_without_nanoseconds(column.type), safe=False).to_pylist()
        return values
    except (
        ValueError,
        TypeError,
        ArithmeticError,
        LookupError,
        NotImplementedError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{where} of type {column.type!s:.80} holds a value that Python cannot represent: "
            f"{first_line(error)}",
            hint="leave the column out of the file, or write it as text",
        ) from error


def _without_nanoseconds(kind: Any) -> Any:
    """The type with microseconds in place of nanoseconds, at any depth of nesting."""
    from pyarrow import duration, large_list, list_, map_, struct, time64, timestamp, types

    def element() -> Any:
        return kind.value_field.with_type(_without_nanoseconds(kind.value_type))

    if types.is_timestamp(kind) and kind.unit == "ns":
        return timestamp("us", kind.tz)
    if types.is_duration(kind) and kind.unit == "ns":
        return duration("us")
    if types.is_time64(kind):
        return time64("us")
    if types.is_struct(kind):
        return struct([field.with_type(_without_nanoseconds(field.type)) for field in kind])
    if types.is_map(kind):
        return map_(
            _without_nanoseconds(kind.key_type),
            kind.item_field.with_type(_without_nanoseconds(kind.item_type)),
        )
    if types.is_fixed_size_list(kind):
        return list_(element(), kind.list_size)
    if types.is_large_list(kind):
        return large_list(element())
    return list_(element()) if types.is_list(kind) else kind
