"""What our engines have in common: slots, requests under way, and one failure that ends everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from asyncrl_cli.engines.port import Engine, Sampling
from asyncrl_cli.engines.slot_gate import SlotGate
from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import Profile

Track = TypeVar("Track")
"""An engine's record of one response in the making."""


class SlottedEngine(Engine, Generic[Track]):
    """Requests wait at a gate for one of `rollout.slots`; `_tracks` has all that wait or run, by id."""

    def __init__(self, profile: Profile, place: Place, on_running: Callable[[int], None]) -> None:
        self.slots = profile.rollout.slots
        self._profile = profile
        self._place = place
        self._gate = SlotGate(self.slots, on_running)
        self._tracks: dict[str, Track] = {}
        self._weights_lock = asyncio.Lock()
        self._failure = ""

    @property
    def running(self) -> int:
        return self._gate.running

    def _check(self, request_id: str, prompt_tokens: list[int], sampling: Sampling) -> None:
        self._raise_failure()
        if request_id in self._tracks:
            raise ValueError(f"request {request_id} is running already")
        rollout, asked = self._profile.rollout, sampling.max_response_tokens
        longest = rollout.max_prompt_tokens + rollout.max_response_tokens
        if not prompt_tokens or len(prompt_tokens) + asked > longest:
            why = f"{len(prompt_tokens)} tokens, and {asked} more are asked: the engine was made for {longest} together"
            raise ValueError(f"prompt of {request_id} has {why}")

    def _fail(self, why: str) -> None:
        """From now on, all that wait for a slot and all that come raise ExecutorFailed with the first `why`."""
        self._failure = self._failure or why
        self._gate.close()
        self._gate.give_up_all()

    def _raise_failure(self) -> None:
        if self._failure:
            raise ExecutorFailed(self._failure)
