"""The prompts of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl_cli.loop.attempts import Prompt


class NumberedFeed:
    """Implements `loop.ports.Feed`: prompts p0, p1, ...; which one comes next is all its state."""

    def __init__(self) -> None:
        self._given = 0

    def next(self) -> Prompt:
        self._given += 1
        return self.find(f"p{self._given - 1}", 0)

    def find(self, uid: str, epoch: int) -> Prompt:
        return Prompt(uid=uid, epoch=epoch, item={"prompt": uid[1:]})

    def state(self) -> dict[str, Any]:
        return {"given": self._given}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._given = state["given"]
