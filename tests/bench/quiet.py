"""A comparison's progress that shows nothing."""

from __future__ import annotations

from typing import Any


class Quiet:
    def run(self, name: str, groups: int, total: int, **status: Any) -> None: ...

    def say(self, text: str) -> None: ...
