"""Rows of a parquet file as plain Python values: times, dates, decimals, bytes, lists, dicts, whatever its columns hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl_cli.errors import ConfigError, first_line
from asyncrl_cli.safe_files import open_regular

ROWS_PER_BATCH = 1024


def parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(`path:row`, its columns). Times keep microseconds: Python has no finer ones. ConfigError for what cannot be read."""
    with _opened(path) as parquet:
        number = 0
        for batch in parquet.iter_batches(batch_size=ROWS_PER_BATCH):
            named = zip(batch.schema.names, batch.columns, strict=True)
            columns = {column: _values(values, f'{path}: column "{column}"') for column, values in named}
            for row in zip(*columns.values(), strict=True):
                number += 1
                yield f"{path}:{number}", dict(zip(columns, row, strict=True))


def num_parquet_rows(path: Path) -> int:
    with _opened(path) as parquet:
        return int(parquet.metadata.num_rows)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A ParquetFile. ConfigError if it is none, has a column twice, or turns out to be damaged while it is read."""
    import pyarrow
    import pyarrow.parquet

    with open_regular(path) as file:
        wrong = "is not a whole parquet file"
        try:
            with pyarrow.parquet.ParquetFile(file) as parquet:
                wrong = "is damaged"
                twice = [column for column, count in Counter(parquet.schema_arrow.names).items() if count > 1]
                if twice:
                    raise ConfigError(f'{path}: column "{twice[0]}" is there twice', hint="write the file anew with distinct names")
                yield parquet
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path} {wrong}: {first_line(error)}", hint="write or download it again") from error


def _values(column: Any, where: str) -> list[Any]:
    try:
        values: list[Any] = column.cast(_without_nanoseconds(column.type), safe=False).to_pylist()
    except (ValueError, TypeError, ArithmeticError, LookupError, NotImplementedError, RecursionError) as error:
        raise ConfigError(
            f"{where} of type {column.type!s:.80} holds what Python has no value for: {first_line(error)}",
            hint="leave the column out of the file, or write it as text",
        ) from error
    return values


def _without_nanoseconds(kind: Any) -> Any:
    """The type with microseconds in place of nanoseconds, however deep they are."""
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
        return map_(_without_nanoseconds(kind.key_type), kind.item_field.with_type(_without_nanoseconds(kind.item_type)))
    if types.is_fixed_size_list(kind):
        return list_(element(), kind.list_size)
    if types.is_large_list(kind):
        return large_list(element())
    return list_(element()) if types.is_list(kind) else kind
