"""Finds the prompt and the answer in one row of a file, and refuses values that cannot be used as either.

A prompt is text, or a list of messages as in verl's and SkyRL's files. Every error names the file and the
line or row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal

from asyncrl_cli.base.errors import ConfigError, first_names, nearest
from asyncrl_cli.contracts.item import ChatPrompt

Row = Mapping[str, object]
PROMPT_KEY, ANSWER_KEY = "task.prompt_key", "task.answer_key"
KEYS = f"{PROMPT_KEY} or {ANSWER_KEY}"
ROLES = ("system", "developer", "user", "assistant", "tool")
DEFAULT_ANSWER = "answer"
GROUND_TRUTHS = ("reward_model.ground_truth", "reward_spec.ground_truth")
"""Where verl's and SkyRL's files have the answer."""
MAX_EXACT_FLOAT = 2.0**53
MAX_COLUMNS_NAMED = 20


def prompt_and_answer(
    row: Row, prompt: str, answer: str, place: str, *, needs_answer: bool
) -> tuple[ChatPrompt, str | None]:
    """`prompt` and `answer` name a column, or a field in one (`column.field`). Raises a ConfigError that
    begins with `place`."""
    if answer == DEFAULT_ANSWER and answer not in row:  # verl's or SkyRL's column, if there is one
        answer = next((name for name in GROUND_TRUTHS if find(row, name) is not None), answer)
    return _prompt(row, prompt, place), _answer(row, answer, place, needs_answer)


def _prompt(row: Row, column: str, place: str) -> ChatPrompt:
    value = _column(row, column, place, PROMPT_KEY)
    if isinstance(value, str):
        return _whole_text(value, column, place)
    if not isinstance(value, list):
        raise _unfit(value, "text nor a list of messages", column, place, PROMPT_KEY)
    messages = tuple(_message(entry, f"{column}[{index}]", place) for index, entry in enumerate(value))
    if not messages or messages[-1]["role"] == "assistant":
        end = "ends with the assistant's message" if messages else "holds no messages"
        hint = "a prompt ends where the model is to answer"
        raise ConfigError(f'{place}: column "{column}" {end}', hint=hint)
    return messages


def _message(value: object, where: str, place: str) -> Mapping[str, str]:
    """Fields that are null or empty count as absent: in Parquet every message of a column has the same
    fields."""
    given = {name: field for name, field in value.items() if field} if isinstance(value, Mapping) else {}
    role, content = given.get("role"), given.get("content")
    if role not in ROLES or not isinstance(content, str) or len(given) > 2:
        fields = first_names([f"{name:.80}" for name in given], MAX_COLUMNS_NAMED) or _kind(value)
        known = f", role {role:.40}" if isinstance(role, str) and role not in ROLES else ""
        raise ConfigError(
            f"{place}: {where} is not a message (a role and a content, both text, nothing else); it has: "
            f"{fields}{known}",
            hint=f"role is one of {', '.join(ROLES)}",
        )
    return {"role": role, "content": _whole_text(content, f"{where}.content", place)}


def _answer(row: Row, column: str, place: str, needs_answer: bool) -> str | None:
    if not needs_answer and find(row, column) is None:
        return None
    value = _column(row, column, place, ANSWER_KEY)
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return _number(value, column, place)
    if not isinstance(value, str) and column in GROUND_TRUTHS and not needs_answer:
        return None  # a user's own function reads it from the column
    if not isinstance(value, str):
        raise _unfit(value, "text nor a number", column, place, ANSWER_KEY)
    return _whole_text(value, column, place) if needs_answer else value


def _number(value: int | float | Decimal, column: str, place: str) -> str:
    """A number as text. Whole numbers have no decimals: pandas makes a column of integers with one missing
    value doubles."""
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        what = f'{place}: column "{column}" is {value}, which cannot be an answer'
        raise ConfigError(what, hint=f"remove the row, or name another column: {ANSWER_KEY}")
    is_whole = abs(float(value)) <= MAX_EXACT_FLOAT and value == int(value)
    return str(int(value)) if is_whole else str(value)


def _unfit(value: object, expected: str, column: str, place: str, key: str) -> ConfigError:
    hint = f"{key} names the column"
    return ConfigError(f'{place}: column "{column}" is neither {expected} but {_kind(value)}', hint=hint)


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _whole_text(value: str, column: str, place: str) -> str:
    if not value.strip():
        hint = f"remove the row, or name another column: {KEYS}"
        raise ConfigError(f'{place}: column "{column}" is empty', hint=hint)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(value[error.start]):04X}"
        why = f'{place}: column "{column}" holds the lone surrogate {half} at {error.start}'
        raise ConfigError(why, hint="write the file again as UTF-8") from error
    return value


def _column(row: Row, name: str, place: str, key: str) -> object:
    """The value that `find` finds. Raises a ConfigError with a suggestion if the row has no such column or
    field."""
    value = find(row, name)
    if value is not None or name in (names := list(_names(row))):
        return value
    listed = first_names([f"{column:.80}" for column in row], MAX_COLUMNS_NAMED) or "none"
    truth = (found for found in GROUND_TRUTHS if key == ANSWER_KEY and found in names)
    guess = next(truth, None) or nearest(name, names)
    hint = f'set {key} = "{guess}"' if guess else f"set {key} to one of them"
    raise ConfigError(f'{place}: no column "{name}"; it has: {listed}', hint=hint)


def find(row: Row, name: str) -> object:
    """The value of a column, or of a field at any depth in it: `column.field`. None if there is none."""
    column, _, rest = name.partition(".")
    inner = row.get(column)
    return find(inner, rest) if rest and name not in row and isinstance(inner, Mapping) else row.get(name)


def _names(row: Row) -> Iterator[str]:
    """Every name that `find` finds."""
    for column, value in row.items():
        yield column
        if isinstance(value, Mapping):
            yield from (f"{column}.{field}" for field in _names(value))
