"""A virtual-time asyncio event loop: it never blocks, and `time()` jumps to the next timer.

    ready callbacks --all done--> pop every timer that is due first --> time jumps there --> they are ready

Timers that only watch (`loop.signal.IN_BACKGROUND`: ticks, bounds on waits) fire in their turn like all others, but do not count
as scheduled work: when nothing is ready and nothing but such timers is left, everybody waits for somebody, and that is a
`DeadlockError`. With a `shuffle_seed` the ready callbacks run in a random order, which the seed repeats: what asyncio promises
of the order of callbacks is little, and code that relies on more is found so.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

from asyncrl_cli.loop.signal import IN_BACKGROUND

T = TypeVar("T")

_CLEANUP_TIMERS = 100_000
"""Timers that may fire while the tasks of an ended run clean up: more of them than any clean-up needs, and no endless loop."""


class DeadlockError(RuntimeError):
    """Nothing is ready, no timer but watchers' is left, and the work is not done."""


class _Ready(asyncio.Handle):
    """A handle made without asking the loop whether it debugs: a tenth of the loop's time."""

    __slots__ = ()

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], loop: VirtualTimeLoop, context: Context | None):
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """A watcher's timer calls back in the foreground: what a watcher sets going is work like any other."""

    __slots__ = ("in_background",)

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], loop: VirtualTimeLoop, context: Context | None
    ):
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = True
        self.in_background = IN_BACKGROUND.get()
        if self.in_background and context is None:
            self._context.run(IN_BACKGROUND.set, False)


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Single-threaded: no sockets, no executors, no `call_soon_threadsafe` from other threads.

    `explain()` says in a DeadlockError who is in which state and waits for what. `timer_events` counts the timers that fired.
    """

    def __init__(self, shuffle_seed: int | None = None) -> None:
        super().__init__()
        self.explain: Callable[[], str] = lambda: "nobody said what they wait for"
        self.timer_events = 0
        self._now_s = 0.0
        self._heap: list[tuple[float, int, _Timer]] = []
        self._num_made = 0
        self._num_cancelled = 0
        self._num_working = 0
        self._lottery = None if shuffle_seed is None else random.Random(shuffle_seed).random
        self._error: DeadlockError | None = None
        self._last_timer_event: int | None = None

    def time(self) -> float:
        return self._now_s

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = _Ready(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        self._num_made += 1
        heapq.heappush(self._heap, (when, self._num_made, timer))
        if not timer.in_background:
            self._num_working += 1
        return timer

    def begin_cleanup(self) -> None:
        """The work has ended, well or not: from here tasks only end. Watchers' timers count, a limited number of them."""
        self._last_timer_event = self.timer_events + _CLEANUP_TIMERS
        if self._error is not None:  # whatever ends badly now does so because of it
            self.set_exception_handler(lambda loop, context: None)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        assert isinstance(handle, _Timer)
        if not handle._scheduled:
            return
        self._num_cancelled += 1
        self._num_working -= not handle.in_background
        if self._num_cancelled > 100 and self._num_cancelled > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2]._cancelled]
            heapq.heapify(self._heap)
            self._num_cancelled = 0

    def _run_once(self) -> None:
        """Run until nothing is ready any more, or someone stops the loop."""
        if not self._ready:
            self._jump()
        if self._lottery is None:
            self._run_in_order()
        else:
            self._run_shuffled(self._lottery)

    def _run_in_order(self) -> None:
        ready = self._ready
        while ready and not self._stopping:
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _run_shuffled(self, lottery: Callable[[], float]) -> None:
        """Any ready callback, also one that has just become so."""
        ready, waiting = self._ready, list(self._ready)
        ready.clear()
        while waiting and not self._stopping:
            chosen = int(lottery() * len(waiting))
            waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
            handle = waiting.pop()
            if not handle._cancelled:
                handle._run()
            waiting.extend(ready)
            ready.clear()
        ready.extend(waiting)

    def _jump(self) -> None:
        """Move the time to the next timer, and make ready all that are due then."""
        heap, ready = self._heap, self._ready
        while heap and heap[0][2]._cancelled:
            heapq.heappop(heap)
            self._num_cancelled -= 1
        self._refuse_deadlock()
        when = heap[0][0]
        self._now_s = max(self._now_s, when)
        while heap and heap[0][0] <= when:
            timer = heapq.heappop(heap)[2]
            if timer._cancelled:
                self._num_cancelled -= 1
                continue
            timer._scheduled = False
            self._num_working -= not timer.in_background
            self.timer_events += 1
            ready.append(timer)

    def _refuse_deadlock(self) -> None:
        if self._last_timer_event is None and self._num_working == 0:
            self._error = DeadlockError(f"at {self._now_s:g} s nothing is scheduled and the work is not done: {self.explain()}")
            raise self._error
        if self._last_timer_event is not None and (not self._heap or self.timer_events >= self._last_timer_event):
            raise self._error or DeadlockError(f"some task does not end when it is cancelled: {self.explain()}")

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nothing sleeps that had to be woken."""


def run_virtual(work: Coroutine[Any, Any, T], *, shuffle_seed: int | None = None) -> T:
    """Run `work` to its end on a fresh virtual clock. Raises DeadlockError if it cannot end."""
    loops: list[VirtualTimeLoop] = []

    def make_loop() -> VirtualTimeLoop:
        loops.append(VirtualTimeLoop(shuffle_seed))
        return loops[0]

    with asyncio.Runner(loop_factory=make_loop) as runner:
        try:
            return runner.run(work)
        finally:
            loops[0].begin_cleanup()
