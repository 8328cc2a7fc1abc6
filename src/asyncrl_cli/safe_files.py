"""Reading files that anybody may have written: only regular files, only so many bytes, only UTF-8, and JSON only of the type that
its writer declares.

Opening a pipe waits until somebody writes into it, a device may never end, and a number or a nesting may be longer than
Python takes. Here all of that is an error with a reason.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Interval, IsFinite

from asyncrl_cli.errors import AsyncrlError, ConfigError, RefusedError

T = TypeVar("T")
MIB = 2**20
Count = Annotated[int, Interval(ge=0, le=2**53)]
"""Steps, versions, tokens: what JSON readers everywhere hold exactly."""
Finite = IsFinite[float]
"""Rewards and the like. Python writes and reads NaN and Infinity in JSON; here they are refused."""
MAX_JSON_BYTES = 256 * MIB
MAX_LINE_BYTES = 16 * MIB
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095
"""What Linux takes as the name of a file, and as a path."""
VALID_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_KINDS = {"d": "a directory", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}
"""By the first letter of their mode as `ls -l` writes it."""


class UnsafeFile(ValueError):
    """The file is of a kind or a size that is not read; the text says which, without the path."""


def expand(text: str | Path) -> Path:
    """`~` and `~user` written out. Where there is no such user they stay, unlike with `Path.expanduser`, which raises."""
    return Path(os.path.expanduser(text))


def is_path(text: str) -> bool:
    """Whether the file system takes `text` as a path at all."""
    encoded = text.encode("utf-8", "surrogatepass")
    is_short = len(encoded) <= MAX_PATH_BYTES and all(len(part) <= MAX_NAME_BYTES for part in encoded.split(b"/"))
    return is_short and b"\0" not in encoded


def check_name(name: str) -> None:
    """Raises ConfigError if `name` cannot name a run and its directory."""
    if not VALID_NAME.fullmatch(name):
        raise ConfigError(
            f"run.name '{name:.101}' cannot name a directory: letters, digits, '.', '_' and '-', at most 100",
            hint="give another --name",
        )


def open_regular(path: Path, *, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading, without waiting. Raises UnsafeFile for anything else and OSError as `open` does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL byte, or a name that no file system takes
        raise UnsafeFile(str(error)) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeFile(f"it is {_KINDS.get(stat.filemode(found.st_mode)[0], 'of another kind')}, not a file")
        if max_bytes is not None and found.st_size > max_bytes:
            raise UnsafeFile(f"it has {found.st_size:,} bytes; at most {max_bytes:,} are read")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """The whole file. Raises UnsafeFile or OSError."""
    with open_regular(path, max_bytes=max_bytes) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it grows while it is read, or is of a file system that gives no sizes
        raise UnsafeFile(f"it has more than {max_bytes:,} bytes")
    return content


def read_text(path: Path, *, max_bytes: int) -> str:
    """The whole file in UTF-8. Raises UnsafeFile, UnicodeDecodeError (both are ValueErrors) or OSError."""
    return read_bytes(path, max_bytes=max_bytes).decode("utf-8")


def read_lines(path: Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Line by line, without the line's end; the last one may lack it. Raises UnsafeFile or OSError."""
    with open_regular(path) as file:
        number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            if len(line) > max_line_bytes:
                raise UnsafeFile(f"line {number} has more than {max_line_bytes:,} bytes")
            yield line.rstrip(b"\r\n")


def parse_json(content: bytes | str, kind: type[T]) -> T:
    """JSON as the type that its writer declares: a dataclass, a TypedDict, `dict[str, Any]`, ... Raises ValueError whose text
    names the first key that is wrong, also for a nesting or a number that is too long and for half a surrogate pair."""
    from pydantic import ValidationError

    declared: Any = kind
    try:
        value: T = _adapter(declared).validate_json(content, strict=True)
    except ValidationError as error:
        raise ValueError(first_of(error)) from None
    return value


def load_json(path: Path, kind: type[T], *, error: type[AsyncrlError] = RefusedError, hint: str = "") -> T:
    """Read a JSON file as the type that its writer declares.

    Raises `error` with path, key and reason, whatever is wrong.
    """
    try:
        return parse_json(read_bytes(path, max_bytes=MAX_JSON_BYTES), kind)
    except (OSError, ValueError) as wrong:
        raise error(f"{path} cannot be read: {reason(wrong)}", hint=hint) from None


def decapitalized(text: str) -> str:
    return text[:1].lower() + text[1:]


def reason(error: Exception) -> str:
    """Why a file cannot be read, without the path that the message has already."""
    if isinstance(error, OSError) and error.strerror:
        return decapitalized(error.strerror)
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start})"
    return str(error)


def first_of(error: Any) -> str:
    """The first complaint of a pydantic ValidationError, with its key, and how many more there are."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    first, key = details[0], ".".join(str(part)[:80] for part in details[0]["loc"])
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{key}: {decapitalized(first['msg'])}{more}" if key else f"{decapitalized(first['msg'])}{more}"


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
