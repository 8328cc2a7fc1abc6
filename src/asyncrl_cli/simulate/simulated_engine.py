"""A simulated engine: continuous batching as lock-step decoding, with one timer for all of its sequences.

    submit -> waiting (in order of arrival) --a slot, blocks--> prefill -> running -> on_end
               ^ gate closed (drain)      |                     |  | ^ frozen (load), slowed (shared machine)
            going on, before all these ---+                     |  +--> on_turn -> a tool -+
               ^-- first of them, preempted: no blocks ---------+                          |
               ^-- last of them, its tool is done: continue_after_tool --------------------+

All running sequences advance together, one token per decode step of

    (step_s + step_s_per_sequence * running + step_s_per_context_token * context) * speed * slowdown   seconds

(and the time for a batch's experts), so the engine needs no event per token. It counts the steps that have
passed (a real number), and a sequence of T tokens that begins at step count s ends at s + T. A heap holds
those ends. Until a sequence begins or ends, the engine freezes, or its slowdown changes, steps pass at a
constant rate or, if contexts cost time, at one that falls as they grow: s steps of R sequences with C tokens
of context together take time in proportion to C s + R s^2 / 2. A sequence may begin in the
middle of a step of the others: its first token still takes a whole step. A prefill occupies the whole engine:
decoding waits for it. Loads are also placed by step count: token j of a sequence that begins at s belongs to
the last load before s + j. A token that is half done at a load is finished with the new weights and counts as
theirs.

Each running sequence holds blocks of the KV cache (`sequences.py`), as in vLLM. When a block is needed and
none is free, the sequence that began last is preempted: its blocks become free, its unfinished token is lost,
and it waits in front of all others. It begins again with a prefill of its prompt and of the tokens that it
has. No sequence begins before there are blocks for these, or before another that waits for blocks. At the
same step count, first sequences end, then others take blocks, then one begins.

A sequence that has completed a turn stops as if preempted. With `hold_slots` it keeps its slot; otherwise it
queues for a slot when it continues. Its cache content stays until others take the blocks; then it begins with
a prefill of everything. A drain waits for all sequences that have begun, including those at a tool.

Worked example: steps of 1 s, one sequence of 5 tokens from time 0; version 3 is loaded from 2.5 to 4.0 s. At
step count 2.5, tokens 1 and 2 are done and have the old version; tokens 3 to 5 have version 3, and the
sequence ends at 5 + 1.5 s.

Another: 3 blocks of 2 tokens, two sequences of 5 tokens without prompts. At step count 3 both need a second
block, and one is left. The first takes it and ends at 5; the second is preempted with 3 tokens, begins again
at 5 and ends at 7.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable

from asyncrl_cli.measure.meters import SlotIntervals
from asyncrl_cli.measure.states import SlotInterval
from asyncrl_cli.simulate.sequences import (
    NEVER,
    SAME_STEP,
    UNLIMITED,
    CacheSize,
    KvCache,
    SimulatedSequence,
    VersionTokens,
)
from asyncrl_cli.simulate.workload import Decoding


class SimulatedEngine:
    """Use it from the event loop only. `on_running(running)` is called whenever the number of running
    sequences changes.

    `speed` scales all times: an engine with 1.1 is 10% slower. The cache must hold the longest sequence.
    """

    def __init__(
        self,
        slots: int,
        times: Decoding,
        *,
        speed: float = 1.0,
        version: int = -1,
        cache: CacheSize = UNLIMITED,
        hold_slots: bool = True,
        trace_sequences: bool = False,
        on_running: Callable[[int], None] = lambda running: None,
    ) -> None:
        self.slots = slots
        self.version = version
        self.running = 0
        self.preemptions = 0
        self._times = times
        self._step_times_s = [times.batch_step_s(running) for running in range(slots + 1)]
        self._input_tokens = 0
        """Those of prompts and tools in the contexts of running sequences."""
        self._speed = speed
        self._slowdown = 1.0
        self._on_running = on_running
        self._loop = asyncio.get_running_loop()
        self._slot_intervals = SlotIntervals(self._loop.time) if trace_sequences else None
        # (step count, version); `first_load` of a sequence is an index into this list
        self._loads = [(0.0, version)]
        self._cache = KvCache(cache)
        # void if its `order` is not the sequence's
        self._ends: list[tuple[float, int, SimulatedSequence]] = []
        self._num_begun = 0
        self._holds_slots = hold_slots
        self._num_at_tools = 0
        self._continuing: deque[SimulatedSequence] = deque()
        self._waiting: deque[SimulatedSequence] = deque()
        self._holding: list[Callable[[], None]] = []
        self._is_closed = False
        self._is_frozen = False
        self._drained: asyncio.Future[None] | None = None
        self._steps = 0.0
        # of sequences that have tokens and do not run: the cache counts those of the running ones
        self._kept_tokens = 0
        self._sampled_tokens = 0.0
        self._prefill_s = 0.0
        self._since_s = self._loop.time()
        self._target_steps = NEVER
        self._target_s = NEVER
        self._timer: asyncio.TimerHandle | None = None

    def counters(self) -> tuple[float, float, float]:
        """(sampled tokens, decode steps, tokens of sequences that have begun and not ended); fractions of a
        token or step count."""
        self._advance()
        return self._sampled_tokens, self._steps, self._cache.sampled_tokens(self._steps) + self._kept_tokens

    def take_slot_intervals(self) -> tuple[SlotInterval, ...]:
        """The time of sequences in slots that ended since the last call, if it is recorded."""
        return self._slot_intervals.take() if self._slot_intervals is not None else ()

    def submit(self, sequences: Collection[SimulatedSequence]) -> None:
        """Queue sequences. When one gets a slot, it begins, or continues from its kept tokens."""
        self._advance()
        self._waiting.extend(sequences)
        self._kept_tokens += sum([sequence.kept_tokens for sequence in sequences])
        self._begin_next(self.running)
        self._retime()

    def continue_after_tool(self, sequence: SimulatedSequence) -> None:
        """The tool that the sequence called is done: queue its next turn."""
        self._advance()
        call = sequence.calls[sequence.num_calls]
        sequence.num_calls += 1
        sequence.result_tokens += call.result_tokens
        sequence.tokens += call.turn_tokens
        self._leave_tool(sequence)
        self._continuing.append(sequence)
        self._begin_next(self.running)
        self._retime()

    def hold(self, sequence: SimulatedSequence, go_on: Callable[[], None]) -> None:
        """The sequence needs a later version: it gives its slot up. `go_on` is called after every load."""
        self._advance()
        self._leave_tool(sequence)
        sequence.is_holding = True
        self._holding.append(go_on)
        self._begin_next(self.running)
        self._retime()

    def abort(self, sequences: Iterable[SimulatedSequence]) -> None:
        """Remove sequences that have not ended. They keep their whole tokens, and their `on_end` is not
        called."""
        self._advance()
        before = self.running
        for sequence in sequences:
            if sequence.has_ended or sequence.is_aborted:
                continue
            sequence.is_aborted = True
            if sequence.order:
                sequence.tokens = sequence.whole_tokens(self._steps)
                self._stop(sequence)
            else:
                # it waits in a queue, which passes over it, or is at a tool
                sequence.tokens = sequence.kept_tokens
                self._kept_tokens -= sequence.kept_tokens
                self._leave_tool(sequence)
                self._cache.drop(sequence, self._steps)
        self._begin_next(before)
        self._retime()

    def version_tokens(self, sequence: SimulatedSequence) -> VersionTokens:
        """The sequence's whole tokens per version: those so far, or all once it has ended or was aborted."""
        self._advance()
        is_over = sequence.has_ended or sequence.is_aborted
        so_far = sequence.whole_tokens(self._steps) if sequence.order else sequence.kept_tokens
        return sequence.tokens_per_version(sequence.tokens if is_over else so_far, self._loads)

    def drained(self) -> asyncio.Future[None]:
        """Begin no new sequence until `thaw`. The returned future is done once all sequences that have begun
        have ended."""
        self._is_closed = True
        self._drained = self._loop.create_future()
        self._notice_drained()
        return self._drained

    def _notice_drained(self) -> None:
        is_empty = self.running == 0 and not self._num_at_tools
        if is_empty and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def freeze(self) -> None:
        """Stop decoding; running sequences keep their slots."""
        self._advance()
        self._is_frozen = True
        self._retime()

    def thaw(self, version: int, *, recompute: bool = False) -> None:
        """Continue with the weights of `version`; with `recompute`, after a new prefill of all tokens of the
        running sequences."""
        self._advance()
        self.version = version
        self._loads.append((self._steps, version))
        if recompute:
            # what an unfinished prefill still lacks is in it, too
            self._prefill_s = self._cache.outdate(self._steps) * self._times.prefill_s_per_token
        self._is_frozen = self._is_closed = False
        self._begin_next(self.running)
        self._retime()
        holding, self._holding = self._holding, []
        for go_on in holding:
            go_on()

    def slow_down(self, slowdown: float) -> None:
        """From now on, everything takes `slowdown` times as long as it would with cores of its own."""
        self._advance()
        self._slowdown = slowdown
        self._retime()

    def _advance(self) -> None:
        """Count the steps since the last call; the rate has been constant since then."""
        now_s = self._loop.time()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        if elapsed_s <= 0 or self.running == 0 or self._is_frozen:
            return
        # prefills come first: no sequence decodes while one is left
        work_s = elapsed_s / (self._speed * self._slowdown)
        prefill_s = min(work_s, self._prefill_s)
        self._prefill_s -= prefill_s
        self._step_on(self._steps_within(work_s - prefill_s))

    def _step_on(self, steps: float) -> None:
        self._steps += steps
        self._sampled_tokens += steps * self.running

    def _next_steps(self) -> tuple[float, float]:
        """The seconds of a step that begins now, and by how much each further step is longer."""
        step_s, each_s = self._step_times_s[self.running], self._times.step_s_per_context_token
        if not each_s:
            return step_s, 0.0
        context_tokens = self._input_tokens + self._cache.sampled_tokens(self._steps)
        return step_s + each_s * context_tokens, each_s * self.running

    def _steps_within(self, work_s: float) -> float:
        step_s, growth_s = self._next_steps()
        if not growth_s:
            return work_s / step_s
        # the root of step_s * steps + growth_s * steps ** 2 / 2 = work_s, in a form without cancellation
        return 2 * work_s / (step_s + math.sqrt(step_s**2 + 2 * growth_s * work_s))

    def _steps_s(self, steps: float) -> float:
        step_s, growth_s = self._next_steps()
        return steps * (step_s + growth_s * steps / 2)

    def _begin(self, sequence: SimulatedSequence) -> None:
        """Begin the sequence, or continue it from its kept tokens."""
        # a new order voids the end that an earlier turn or a preemption has left in the heap
        self._num_begun += 1
        sequence.has_begun = True
        sequence.order = self._num_begun
        # as if it had begun so much earlier: its end is then where it would be without the stop
        sequence.begin_steps = self._steps - sequence.kept_tokens
        sequence.first_load = len(self._loads) - 1
        heapq.heappush(self._ends, (sequence.begin_steps + sequence.tokens, sequence.order, sequence))
        self._prefill_s += self._cache.hold(sequence, self._steps) * self._times.prefill_s_per_token
        self._kept_tokens -= sequence.kept_tokens
        self._input_tokens += sequence.prompt_tokens + sequence.result_tokens
        self.running += 1
        if self._slot_intervals is not None:
            self._slot_intervals.begin(sequence.name)

    def _stop(self, sequence: SimulatedSequence) -> None:
        sequence.order = 0
        self._cache.release(sequence, self._steps)
        self._input_tokens -= sequence.prompt_tokens + sequence.result_tokens
        self.running -= 1
        if self._slot_intervals is not None:
            self._slot_intervals.end(sequence.name)

    def _stop_with(self, sequence: SimulatedSequence, tokens: int) -> None:
        """Stop the sequence. It will begin again with these tokens."""
        self._stop(sequence)
        sequence.kept, sequence.kept_tokens = sequence.tokens_per_version(tokens, self._loads), tokens
        self._kept_tokens += tokens

    def _leave_tool(self, sequence: SimulatedSequence) -> None:
        self._num_at_tools -= sequence.is_at_tool
        sequence.is_at_tool = False

    def _begin_next(self, before: int) -> None:
        """Begin the next sequences after others ended, lost their blocks or arrived. `before`: how many were
        running until now."""
        if self.running == 0:
            self._prefill_s = 0.0  # that of sequences that are gone
        # from the head of the queues, until one has to wait
        while queue := self._continuing or self._waiting:
            sequence = queue[0]
            if not sequence.is_aborted:
                # a sequence that holds its slot at a tool finds it free when it goes on
                num_held = self._num_at_tools if self._holds_slots and not sequence.has_begun else 0
                is_let_through = sequence.has_begun or not self._is_closed
                has_slot = self.running + num_held < self.slots
                if not (is_let_through and has_slot and self._cache.fits(sequence, self._steps)):
                    break
                self._begin(sequence)
            queue.popleft()
        if self.running != before:
            self._on_running(self.running)
        self._notice_drained()

    def _retime(self) -> None:
        """Set the timer for the next end of a sequence, or for the next block that will be missing. A timer
        that is too early is kept and set again when it fires."""
        ends = self._ends
        while ends and ends[0][1] != ends[0][2].order:
            heapq.heappop(ends)
        self._target_s = NEVER
        if ends and not self._is_frozen:
            self._target_steps = min(ends[0][0], self._cache.full_at(self._steps, until=ends[0][0]))
            work_s = self._prefill_s + self._steps_s(self._target_steps - self._steps)
            self._target_s = self._since_s + max(0.0, work_s) * self._speed * self._slowdown
        if self._timer is not None and not self._timer.when() <= self._target_s < NEVER:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and self._target_s < NEVER:
            self._timer = self._loop.call_at(self._target_s, self._on_timer)

    def _on_timer(self) -> None:
        """End the turns that are due, then preempt sequences without blocks."""
        self._timer = None
        self._advance()
        if self._since_s < self._target_s:
            self._retime()
            return
        before, ends, callbacks = self.running, self._ends, []
        self._prefill_s = 0.0
        self._step_on(self._target_steps - self._steps)  # to exactly the target, free of rounding errors
        while ends and ends[0][0] <= self._steps + SAME_STEP:
            _, order, sequence = heapq.heappop(ends)
            if order != sequence.order:
                continue
            if sequence.num_calls == len(sequence.calls):
                sequence.has_ended = True
                self._stop(sequence)
                callbacks.append((sequence.on_end, sequence))
            else:  # it stops for a tool
                self._stop_with(sequence, sequence.tokens)
                self._cache.park(sequence)
                sequence.is_at_tool = True
                self._num_at_tools += 1
                callbacks.append((sequence.on_turn, sequence))
        while self._cache.is_over(self._steps):
            newest = self._cache.newest
            self._stop_with(newest, newest.whole_tokens(self._steps))
            self.preemptions += 1
            self._continuing.appendleft(newest)
        self._begin_next(before)
        # last, because a callback may submit or abort: it finds the engine as it is after this step
        for callback, sequence in callbacks:
            callback(sequence)
        self._retime()
