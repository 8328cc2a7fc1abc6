"""Read untrusted files safely: only regular files up to a size limit, only UTF-8 text, and only JSON of a
declared type.

Opening a pipe blocks until somebody writes to it, a device may never end, and JSON may contain numbers or
nesting that Python cannot parse. Here, each of these raises an error with the reason.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Interval, IsFinite

from asyncrl_cli.base.errors import AsyncrlError, RefusedError

T = TypeVar("T")
MIB = 2**20
Count = Annotated[int, Interval(ge=0, le=2**53)]
"""A number of steps, versions or tokens. Every JSON reader represents integers up to 2**53 exactly."""
Finite = IsFinite[float]
"""A number such as a reward. Python accepts NaN and Infinity in JSON; here they are refused."""
MAX_JSON_BYTES = 256 * MIB
MAX_LINE_BYTES = 16 * MIB
LEAST_KEY = 16
"""Shortest key that a file may hold."""
MAX_NESTING = 64
"""Limit for untrusted JSON: deeper values cannot be pickled, compared or written again."""
_KINDS = {"d": "a directory", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}
"""Kinds of file by the first letter of the mode that `ls -l` shows."""


class UnsafeFile(ValueError):
    """The file is refused because of its name, kind or size. The message says why, without the path."""


def open_regular(path: Path, *, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading, without blocking. Raises UnsafeFile for anything else and OSError as
    `open` does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL byte, or a name that no file system takes
        raise UnsafeFile(str(error)) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.filemode(found.st_mode)[0], "of another kind")
            raise UnsafeFile(f"it is {kind}, not a file")
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
    if len(content) > max_bytes:  # the file grew while it was read, or its file system reports no sizes
        raise UnsafeFile(f"it has more than {max_bytes:,} bytes")
    return content


def read_text(path: Path, *, max_bytes: int) -> str:
    """The whole file, decoded as UTF-8. Raises UnsafeFile, UnicodeDecodeError (both are ValueErrors) or
    OSError."""
    return read_bytes(path, max_bytes=max_bytes).decode("utf-8")


def read_lines(path: Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """The file's lines without their line endings, which the last line may lack. Raises UnsafeFile or
    OSError."""
    with open_regular(path) as file:
        number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            if len(line) > max_line_bytes:
                raise UnsafeFile(f"line {number} has more than {max_line_bytes:,} bytes")
            yield line.rstrip(b"\r\n")


def key_in(path: Path) -> str:
    """The key in the file, which only its user may read; "" if there is no file. Raises RefusedError."""
    try:
        mode, text = path.stat().st_mode & 0o777, path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(f"{path} cannot be read: {error}", hint="name another token file") from None
    if mode & 0o077 or len(text) < LEAST_KEY:
        why = f"mode {mode:04o}" if mode & 0o077 else f"a key of {len(text)} characters"
        hint = f"chmod 600, {LEAST_KEY} characters or more; `asyncrl serve` makes one that is missing"
        raise RefusedError(f"{path} is refused: {why}", hint=hint)
    return text


def parse_json(content: bytes | str, kind: type[T]) -> T:
    """Parse JSON as `kind`: a dataclass, a TypedDict, `dict[str, Any]`, ... Raises ValueError that names the
    first wrong key, or reports too deep nesting, a too long number or a lone surrogate."""
    from pydantic import ValidationError

    declared: Any = kind
    try:
        value: T = _adapter(declared).validate_json(content, strict=True)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
    return value


def nesting(value: object) -> int:
    """The nesting depth of a JSON value. A number or text has depth 1."""
    depth, level = 0, [value]
    while level:
        depth += 1
        containers = [entry for entry in level if isinstance(entry, (dict, list))]
        level = [
            inner for entry in containers for inner in (entry.values() if isinstance(entry, dict) else entry)
        ]
    return depth


def load_json(path: Path, kind: type[T], *, error: type[AsyncrlError] = RefusedError, hint: str = "") -> T:
    """Read a JSON file as `kind` (see `parse_json`).

    Raises `error` with path, key and reason if the file cannot be read or parsed.
    """
    try:
        return parse_json(read_bytes(path, max_bytes=MAX_JSON_BYTES), kind)
    except (OSError, ValueError) as wrong:
        raise error(f"{path} cannot be read: {reason(wrong)}", hint=hint) from None


def decapitalized(text: str) -> str:
    return text[:1].lower() + text[1:]


def reason(error: Exception) -> str:
    """Why a file cannot be read, without the path, which the caller's message already contains."""
    if isinstance(error, OSError) and error.strerror:
        return decapitalized(error.strerror)
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start})"
    return str(error)


def first_problem(error: Any) -> str:
    """The first problem in a pydantic ValidationError, with its key, and the number of further ones."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    # pydantic puts this before our validators' messages
    text = decapitalized(details[0]["msg"].removeprefix("Value error, "))
    key = ".".join(str(part)[:80] for part in details[0]["loc"])
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{key}: {text}{more}" if key else f"{text}{more}"


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
