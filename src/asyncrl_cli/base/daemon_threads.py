"""Blocking work for whose end neither asyncio nor the process waits, unlike that of executors' threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_daemon(call: Callable[[], T], name: str, answer: Future[T] | None = None) -> Future[T]:
    """Run `call` in a thread of its own. Its result or error comes into `answer`, a new one by default."""
    made = Future[T]() if answer is None else answer

    def run() -> None:
        with suppress(InvalidStateError):  # cancelled: nobody waits for the answer
            try:
                made.set_result(call())
            except BaseException as error:
                made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return made
