"""TOML in and out: reading files and single values, with limits; writing keys and values; shortening long ones for an error."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import tomli

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.safe_files import MIB, decapitalized, read_text, reason

MAX_BYTES, MAX_DEPTH = MIB, 32
"""Of one file: bytes, and tables within tables."""
LONGEST_ECHO = 200


def read(path: Path) -> dict[str, Any]:
    """A TOML file, its floats as decimals. Raises ConfigError with file and line."""
    try:
        return parse_toml(read_text(path, max_bytes=MAX_BYTES))
    except tomli.TOMLDecodeError as error:
        where = f"{path}:{error.lineno}"
        raise ConfigError(f"{where}: {decapitalized(error.msg)} (column {error.colno})", hint=_syntax_hint(error)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}", hint="a profile is a TOML file in UTF-8") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Floats as decimals. Raises TOMLDecodeError, or ValueError for a number that is too long or tables that are too deep."""
    try:
        content = tomli.loads(text, parse_float=Decimal)
    except (RecursionError, ArithmeticError):
        raise ValueError(f"a number is too long, or its tables are more than {MAX_DEPTH} deep") from None
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [item for entry in level for item in (entry.values() if isinstance(entry, dict) else entry)]
        level = [item for item in level if isinstance(item, dict | list)]
    if level:
        raise ValueError(f"its tables are more than {MAX_DEPTH} deep")
    return content


def parse_value(text: str) -> Any:
    """A TOML value, or the text itself if it is none."""
    try:
        parsed = parse_toml(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    except ValueError as error:
        raise ConfigError(f"{shortened(text)} is no value: {error}", hint="a value is TOML, else a string") from None
    return parsed["value"] if len(parsed) == 1 else text


def toml_key(name: str) -> str:
    """A key as TOML writes it: without quotes where that is possible."""
    bare = name.isascii() and name.replace("-", "_").isidentifier()
    return name if bare else toml_value(name)


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_key(str(key))} = {toml_value(item)}' for key, item in value.items())}}}"
    return str(value)


def shortened(value: Any) -> str:
    """A value as an error shows it: only the beginning of a long one."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very long number"
    text = str(value)
    return text if len(text) <= LONGEST_ECHO else f"{text[:LONGEST_ECHO]}..."


def _syntax_hint(error: tomli.TOMLDecodeError) -> str:
    lines = error.doc.splitlines()
    line = lines[error.lineno - 1].strip() if error.lineno <= len(lines) else ""
    shown = f" (the line is `{line[:60]}`)" if line else ""
    return f"strings are quoted, booleans are true and false, sections are [run], [model], ...{shown}"
