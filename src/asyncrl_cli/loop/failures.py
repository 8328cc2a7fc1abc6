"""Finding the error that a person should see inside what asyncio raises."""

from __future__ import annotations

from asyncrl_cli.errors import AsyncrlError


def first_error(error: BaseException) -> BaseException:
    """The first exception in a group of them that is none itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def own_error(error: BaseException) -> AsyncrlError | None:
    """The first `AsyncrlError` in an exception or in a group of them, None if there is none."""
    if isinstance(error, AsyncrlError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            if (found := own_error(inner)) is not None:
                return found
    return None
