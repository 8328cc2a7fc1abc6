"""Items of jsonl files (one object per line) or parquet files (whose columns may also hold times, dates,
decimals, bytes, lists and dicts). Every error names the file and the line or row.

Eval items are held out, or come from further files. The task's reward judges all of them, and no eval prompt
is trained on.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from asyncrl_cli.base.errors import ConfigError, first_line
from asyncrl_cli.base.paths import expand, missing_hint
from asyncrl_cli.base.safe_files import MAX_NESTING, UnsafeFile, nesting, open_regular, read_lines, reason
from asyncrl_cli.contracts.item import Item, make_item, prompt_key
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.rows import Row, prompt_and_answer

if TYPE_CHECKING:  # pyarrow is imported only where a file needs it
    from pyarrow import Array, DataType, Field
    from pyarrow.parquet import ParquetFile

KINDS = ("jsonl", "parquet")
SET_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
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


ReadFile = Callable[..., Read]
"""`read_items` with the task's columns filled in; it still takes the path, `key` and `limit`."""


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
            columns = {column: row[column] for column in row if column not in (prompt, answer)}
            items[name] = make_item(asked, expected, columns)
            if len(items) == limit:
                num_behind = sum(map(count, files)) - num_rows
                break
    if not items:
        if not files:
            raise ConfigError(f"{key}: no file matches {path}", hint=missing_hint(path))
        hint = "write one JSON object per line into it, or name another file"
        raise ConfigError(f"{key}: {path} holds no rows", hint=hint)
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
def _opened(path: Path) -> Iterator[ParquetFile]:
    """The open ParquetFile. Raises ConfigError if it is not one, has a column twice, or turns out damaged
    while it is read."""
    import pyarrow
    import pyarrow.parquet

    with open_regular(path) as file:
        wrong = "is not a whole parquet file"
        try:
            with pyarrow.parquet.ParquetFile(file) as parquet:
                wrong = "is damaged"
                counts = Counter(parquet.schema_arrow.names)
                if twice := [column for column, count in counts.items() if count > 1]:
                    hint = "rewrite the file with distinct names"
                    raise ConfigError(f'{path}: column "{twice[0]}" appears twice', hint=hint)
                yield parquet
        except (pyarrow.ArrowException, OSError) as error:
            why = f"{path} {wrong}: {first_line(error)}"
            raise ConfigError(why, hint="write or download it again") from error


def _values(column: Array, where: str) -> list[object]:
    try:
        values: list[object] = column.cast(_without_nanoseconds(column.type), safe=False).to_pylist()
        return values
    except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError) as error:
        what = f"{where} of type {column.type!s:.80} holds a value that Python cannot represent"
        hint = "leave the column out of the file, or write it as text"
        raise ConfigError(f"{what}: {first_line(error)}", hint=hint) from error


def _without_nanoseconds(kind: DataType) -> DataType:
    """The type with microseconds in place of nanoseconds, at any depth of nesting."""
    from pyarrow import duration, large_list, list_, map_, struct, time64, timestamp, types

    def element() -> Field:
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
        value = kind.item_field.with_type(_without_nanoseconds(kind.item_type))
        return map_(_without_nanoseconds(kind.key_type), value)
    if types.is_fixed_size_list(kind):
        return list_(element(), kind.list_size)
    if types.is_large_list(kind):
        return large_list(element())
    return list_(element()) if types.is_list(kind) else kind


def file_of(source: str, key: str) -> Path:
    """The path in `jsonl:<path>` or `parquet:<path>`, the value of `key`. Raises ConfigError."""
    kind, _, path = source.partition(":")
    if kind not in KINDS or not path:
        why = f'{key} = "{source}" is neither jsonl:<path> nor parquet:<path>'
        raise ConfigError(why, hint=f'{key} = "jsonl:data.jsonl"')
    if (kind == "parquet") != (expand(path).suffix == ".parquet"):
        hint = "only the names of parquet files end in .parquet"
        raise ConfigError(f'{key} = "{source}": the file does not look like {kind}', hint=hint)
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
        why = f"task.source: {described}, and eval.prompts = {num_eval} of them are held out"
        raise ConfigError(f"{why}: none are left to train on", hint=hint)
    return train, held_out


def splits_of(profile: Profile, path: Path, read_file: ReadFile) -> tuple[list[Item], list[Item], list[str]]:
    """Training items, eval items and notes for the user. Eval items are held out from the file, or read from
    `task.eval_path`. Raises ConfigError."""
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
        if not SET_NAME.fullmatch(name):
            why = f'eval.sets: "{name:.80}" cannot name a set: metrics are called eval/<name>/...'
            hint = "a name has at most 40 characters: a to z, 0 to 9, - and _"
            raise ConfigError(why, hint=hint)
        key = f"eval.sets.{name}"
        found[name] = tuple(read_file(file_of(source, key), key=key, limit=None).items)
    items = chain.from_iterable(found.values())
    kept, notes = _without(train, items, "task.source", "in one of eval.sets")
    if not kept:
        why = "task.source: every training prompt is in one of eval.sets"
        raise ConfigError(why, hint="train on another file")
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
