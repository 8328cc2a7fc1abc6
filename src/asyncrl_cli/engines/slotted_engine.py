"""The base class of both engines. A request waits for one of `rollout.slots`, runs, and ends. If the engine
fails, all fail."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.engines.port import Completion, Engine, FinishReason, Sampling
from asyncrl_cli.measure.meters import SlotIntervals
from asyncrl_cli.measure.states import SlotInterval
from asyncrl_cli.profile.arithmetic import max_context_tokens
from asyncrl_cli.profile.schema import Interrupt, ProcessPlace, Profile


@dataclass(slots=True, eq=False, kw_only=True)
class Track:
    """A response while it is being generated."""

    request_id: str
    prompt_tokens: list[int]
    sampling: Sampling
    seed: int
    first_version: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Appended to after the other two lists. An aborted response may still grow: tokens without a version do
    not count yet."""
    finished: FinishReason | None = None
    """Set before the last token gets its version."""
    num_kept: int = 0
    """How many of the tokens were sampled by another engine."""
    fields: dict[str, list[Any]] = field(default_factory=dict)
    """A value per token; appended to before the versions."""
    prompt_fields: dict[str, Sequence[Any]] = field(default_factory=dict)

    def begin_with(self, so_far: Completion) -> None:
        self.tokens += so_far.tokens
        self.logprobs += so_far.logprobs
        self.versions += so_far.versions
        self.num_kept = len(self.tokens)
        self.fields = {name: [*values] for name, values in so_far.fields.items()}

    def so_far(self) -> Completion:
        """The tokens that have a version, which may be the whole response. Another thread may append
        meanwhile."""
        # in this order: no last token is seen before `finished`
        count, finished = len(self.versions), self.finished
        if finished is None or count < len(self.tokens):
            finished = "abort"
        return self.completion(finished, count)

    def completion(self, finish_reason: FinishReason, count: int | None = None) -> Completion:
        count = len(self.versions) if count is None else count
        return Completion(
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            versions=self.versions[:count],
            finish_reason=finish_reason,
            fields={name: values[:count] for name, values in [*self.fields.items()]},  # may get another one
            prompt_fields=dict(self.prompt_fields),
        )


AnyTrack = TypeVar("AnyTrack", bound=Track)


class SlotGate:
    """Decides which request may generate: first come, first served, at most `slots` at once, none while the
    gate is closed.

        entered(name) -> waiting (a pending future) -> True: running -> leave()
                                                    -> False: withdrawn by give_up(name)

    `on_change(running)` is called whenever the number of running sequences changes.
    """

    def __init__(self, slots: int, on_change: Callable[[int], None]) -> None:
        self.slots = slots
        self.running = 0
        self.is_open = True
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._on_change = on_change

    async def entered(self, name: str) -> bool:
        """Wait for a slot. True: the caller holds one and must call `leave`. False: `give_up` withdrew the
        request."""
        turn = self._waiting[name] = asyncio.get_running_loop().create_future()
        self._let_in()
        try:
            return bool(await turn)
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.leave()  # cancelled between getting the slot and returning it to the caller
            raise
        finally:
            self._waiting.pop(name, None)

    def give_up(self, name: str) -> None:
        """Withdraw a waiting request: its `entered` returns False. Does nothing if the request no longer
        waits."""
        turn = self._waiting.pop(name, None)
        if turn is not None and not turn.done():
            turn.set_result(False)

    def leave(self) -> None:
        assert self.running > 0
        self.running -= 1
        if self.running == 0:
            self._idle.set()
        self._let_in()
        self._on_change(self.running)

    def close(self) -> None:
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        self._let_in()

    async def idle(self) -> None:
        """Wait until no request runs. The gate must be closed."""
        assert not self.is_open
        await self._idle.wait()

    def _let_in(self) -> None:
        before = self.running
        while self.is_open and self._waiting and self.running < self.slots:
            turn = self._waiting.pop(next(iter(self._waiting)))
            if not turn.done():
                self.running += 1
                turn.set_result(True)
        if self.running > before:
            self._idle.clear()
            self._on_change(self.running)


class SlottedEngine(Engine, Generic[AnyTrack]):
    """An engine with a `SlotGate`. Subclasses add `_respond` and their own Track class.

    `_tracks` holds all waiting and running requests by id.
    """

    _make_track: type[AnyTrack]

    def __init__(
        self, profile: Profile, place: ProcessPlace, on_running: Callable[[int], None] = lambda running: None
    ) -> None:
        self.slots = profile.rollout.slots
        self._profile = profile
        self._place = place
        self.gate = SlotGate(self.slots, on_running)
        self._tracks: dict[str, AnyTrack] = {}
        self._weights_lock = asyncio.Lock()
        self.failure = ""
        self._slot_intervals = SlotIntervals(time.monotonic) if profile.logging.trace_sequences else None

    @property
    def running(self) -> int:  # type: ignore[override]
        return self.gate.running

    def take_slot_intervals(self) -> tuple[SlotInterval, ...]:
        return self._slot_intervals.take() if self._slot_intervals is not None else ()

    def tokens_of(self, request_id: str) -> int:
        track = self._tracks.get(request_id)
        return self._num_tokens(track) if track is not None else 0

    def so_far(self, request_id: str) -> Completion | None:
        track = self._tracks.get(request_id)
        return track.so_far() if track is not None else None

    async def generate(
        self,
        request_id: str,
        prompt_tokens: list[int],
        sampling: Sampling,
        seed: int,
        *,
        first_version: int | None = None,
        so_far: Completion | None = None,
    ) -> Completion:
        self._check(request_id, prompt_tokens, sampling)
        track = self._make_track(
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            sampling=sampling,
            seed=seed,
            first_version=first_version,
        )
        if so_far is not None:
            track.begin_with(so_far)
        self._tracks[request_id] = track
        reason: FinishReason = "abort"
        try:
            if await self.gate.entered(request_id):
                try:
                    with (
                        self._slot_intervals.of(request_id)
                        if self._slot_intervals is not None
                        else contextlib.nullcontext()
                    ):
                        reason = await self._respond(track)
                finally:
                    self.gate.leave()
            self._raise_failure()
            return track.completion(reason)
        finally:
            del self._tracks[request_id]

    async def _respond(self, track: AnyTrack) -> FinishReason:
        """Generate the response into `track`. The request holds a slot meanwhile."""
        raise NotImplementedError

    def _num_tokens(self, track: AnyTrack) -> int:
        return len(track.tokens)

    @contextlib.asynccontextmanager
    async def _closed(self, interrupt: Interrupt) -> AsyncIterator[None]:
        """Let no request start during the block; with `drain`, first wait for the running ones to finish."""
        self.gate.close()
        try:
            if interrupt == "drain":
                await self.gate.idle()
            yield
        finally:
            if not self.failure:
                self.gate.open()

    def _check(self, request_id: str, prompt_tokens: list[int], sampling: Sampling) -> None:
        self._raise_failure()
        if request_id in self._tracks:
            raise ValueError(f"request {request_id} is already running")
        asked, longest = sampling.max_response_tokens, max_context_tokens(self._profile)
        if not prompt_tokens or len(prompt_tokens) + asked > longest:
            why = f"asks for {asked} more, but the engine is configured for {longest} in total"
            raise ValueError(f"prompt of {request_id} has {len(prompt_tokens)} tokens and {why}")

    def _fail(self, why: str) -> None:
        """Make waiting and new requests raise ExecutorFailed from now on, with the first `why`."""
        self.failure = self.failure or why
        self.gate.close()
        for request_id in self._tracks:
            self.gate.give_up(request_id)

    def _raise_failure(self) -> None:
        if self.failure:
            raise ExecutorFailed(self.failure)
