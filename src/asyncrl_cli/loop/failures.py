"""Finding the error that a person should see inside what asyncio raises."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def first_error(error: BaseException, kind: type[E]) -> E | None:
    """The first exception of that kind that is no group: `error` itself, or one inside it. None if there is none."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, kind) else None
    found = (first_error(inner, kind) for inner in error.exceptions)
    return next((inner for inner in found if inner is not None), None)
