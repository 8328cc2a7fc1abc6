"""A simulated engine: continuous batching as lock-step decoding, with one timer for all of its sequences.

    submit -> waiting (in order of arrival) --a slot--> prefill -> running -> on_end
                 ^ gate closed (drain)                     ^ frozen (load), slowed (a shared machine)

All running sequences advance together, one token per decode step of

    (step_s + step_s_per_sequence * running) * speed * slowdown   seconds

so the engine needs no event per token: it counts the steps that have passed (a real number), and a sequence of T tokens that
begins at step count s ends at s + T. A heap holds those ends. Steps pass at a constant rate until a sequence begins or ends,
the engine freezes, or its slowdown changes. A sequence may begin in the middle of a step of the others: its first token still takes
a whole step. A prefill occupies the whole engine: decoding waits for it. Loads, too, are placed by step count: token j of a
sequence that begins at s belongs to the last load before s + j. A token that is half done at a load is finished with the new
weights and counts as theirs.

Worked example: steps of 1 s, one sequence of 5 tokens from time 0; version 3 is loaded from 2.5 to 4.0 s. At step count 2.5, tokens
1 and 2 are done and have the old version; tokens 3 to 5 have version 3, and the sequence ends at 5 + 1.5 s.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asyncrl_cli.simulate.workload import Decoding

SAME_STEP = 1e-9
"""Step counts closer than this are equal: far above rounding errors, far below a token."""
_NEVER = float("inf")


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """A response being generated. `tokens`: its final length, lowered by an abort. `on_end` is called when it is complete. `luck`
    (uniform) decides its reward, which takes `reward_s` to compute and is there at `rewarded_s`. The engine sets the rest."""

    prompt_tokens: int
    tokens: int
    on_end: Callable[[SimulatedSequence], None]
    reward_s: float = 0.0
    luck: float = 1.0
    rewarded_s: float = _NEVER
    begin_steps: float = -1.0
    first_load: int = 0
    is_aborted: bool = False
    has_ended: bool = False


class SimulatedEngine:
    """Call it from the event loop. `on_running(running)` is called whenever the number of running sequences changes.

    `speed` scales all times: 1.1 is an engine that is 10% slower.
    """

    def __init__(
        self,
        slots: int,
        times: Decoding,
        *,
        speed: float = 1.0,
        version: int = -1,
        on_running: Callable[[int], None] = lambda running: None,
    ) -> None:
        self.slots = slots
        self.version = version
        self.running = 0
        self._times = times
        self._speed = speed
        self._slowdown = 1.0
        self._on_running = on_running
        self._loop = asyncio.get_running_loop()
        self._loads = [(0.0, version)]  # (step count, version); `first_load` of a sequence is an index into this list
        self._ends: list[tuple[float, int, SimulatedSequence]] = []
        self._num_begun = 0
        self._waiting: deque[SimulatedSequence] = deque()
        self._is_closed = False
        self._is_frozen = False
        self._drained: asyncio.Future[None] | None = None
        self._steps = 0.0
        self._sum_begin_steps = 0.0
        self._sampled_tokens = 0.0
        self._prefill_s = 0.0
        self._since_s = self._loop.time()
        self._target_s = _NEVER
        self._timer: asyncio.TimerHandle | None = None

    def counters(self) -> tuple[float, float, float]:
        """(sampled tokens, decode steps, tokens of running sequences); fractions of a token or step count."""
        self._advance()
        return self._sampled_tokens, self._steps, self.running * self._steps - self._sum_begin_steps

    def submit(self, sequences: Iterable[SimulatedSequence]) -> None:
        """Queue sequences; each begins when it gets a slot."""
        self._advance()
        self._waiting.extend(sequences)
        self._let_in()
        self._retime()

    def abort(self, sequences: Iterable[SimulatedSequence]) -> None:
        """Remove sequences that have not ended. They keep their whole tokens, and their `on_end` is not called."""
        self._advance()
        left = 0
        for sequence in (sequence for sequence in sequences if not (sequence.has_ended or sequence.is_aborted)):
            sequence.is_aborted = True
            has_begun = sequence.begin_steps >= 0
            sequence.tokens = self._whole_tokens(sequence) if has_begun else 0
            if has_begun:
                self._sum_begin_steps -= sequence.begin_steps
                left += 1
        self._leave(left)
        self._retime()

    def version_tokens(self, sequence: SimulatedSequence) -> tuple[tuple[int, int], ...]:
        """Tokens per version of an ended or aborted sequence, ascending: ((3, 17), (4, 5))."""
        done, spans = 0, []
        next_loads = [*(steps for steps, _ in self._loads[sequence.first_load + 1 :]), _NEVER]
        for (_, version), until_steps in zip(self._loads[sequence.first_load :], next_loads, strict=True):
            upto = min(sequence.tokens, until_steps - sequence.begin_steps + SAME_STEP)
            if int(upto) > done:
                spans.append((version, int(upto) - done))
                done = int(upto)
        return tuple(spans)

    def drained(self) -> asyncio.Future[None]:
        """Begin no further sequence until `thaw`. The returned future is done once no sequence runs."""
        self._is_closed = True
        self._drained = self._loop.create_future()
        if self.running == 0:
            self._drained.set_result(None)
        return self._drained

    def freeze(self) -> None:
        """Stop decoding; running sequences keep their slots."""
        self._advance()
        self._is_frozen = True
        self._retime()

    def thaw(self, version: int, *, recompute: bool = False) -> None:
        """Go on with the weights of `version`; with `recompute`, after a new prefill of all tokens of the running sequences."""
        self._advance()
        self.version = version
        self._loads.append((self._steps, version))
        if recompute:
            running = [sequence for _, _, sequence in self._ends if not sequence.is_aborted]
            tokens = sum(sequence.prompt_tokens + self._whole_tokens(sequence) for sequence in running)
            self._prefill_s = tokens * self._times.prefill_s_per_token
        self._is_frozen = self._is_closed = False
        self._let_in()
        self._retime()

    def slow_down(self, slowdown: float) -> None:
        """From now on everything takes `slowdown` times as long as on a machine of its own."""
        self._advance()
        self._slowdown = slowdown
        self._retime()

    def _advance(self) -> None:
        """Count the steps since the last call; the rate has been constant since then."""
        now_s = self._loop.time()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        if elapsed_s <= 0 or self.running == 0 or self._is_frozen:
            return
        work_s = elapsed_s / (self._speed * self._slowdown)
        prefill_s = min(work_s, self._prefill_s)
        self._prefill_s -= prefill_s
        self._step_on((work_s - prefill_s) / self._step_s())

    def _step_on(self, steps: float) -> None:
        self._steps += steps
        self._sampled_tokens += steps * self.running

    def _whole_tokens(self, sequence: SimulatedSequence) -> int:
        return int(self._steps - sequence.begin_steps + SAME_STEP)

    def _step_s(self) -> float:
        return self._times.step_s + self._times.step_s_per_sequence * self.running

    def _let_in(self) -> None:
        before, waiting = self.running, self._waiting
        while waiting and self.running < self.slots and not self._is_closed:
            sequence = waiting.popleft()
            if sequence.is_aborted:
                continue
            sequence.begin_steps = self._steps
            sequence.first_load = len(self._loads) - 1
            self._num_begun += 1
            heapq.heappush(self._ends, (self._steps + sequence.tokens, self._num_begun, sequence))
            self._prefill_s += sequence.prompt_tokens * self._times.prefill_s_per_token
            self._sum_begin_steps += self._steps
            self.running += 1
        if self.running > before:
            self._on_running(self.running)

    def _leave(self, left: int) -> None:
        """`left` running sequences have ended; the next ones begin."""
        if not left:
            return
        self.running -= left
        if self.running == 0:
            self._prefill_s = 0.0
        before = self.running
        self._let_in()
        if self.running == before:
            self._on_running(self.running)
        if self.running == 0 and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _retime(self) -> None:
        """Set the timer for the next end of a sequence. A timer that is too early is kept: when it fires, it is set again."""
        ends = self._ends
        while ends and ends[0][2].is_aborted:
            heapq.heappop(ends)
        self._target_s = _NEVER
        if ends and not self._is_frozen:
            work_s = self._prefill_s + (ends[0][0] - self._steps) * self._step_s()
            self._target_s = self._since_s + max(0.0, work_s) * self._speed * self._slowdown
        if self._timer is not None and not self._timer.when() <= self._target_s < _NEVER:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and self._target_s < _NEVER:
            self._timer = self._loop.call_at(self._target_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._advance()
        if self._since_s >= self._target_s:
            self._end_first()
        self._retime()

    def _end_first(self) -> None:
        """End the sequences that are due; the step count is set to exactly their end, free of rounding errors."""
        ends, ended = self._ends, []
        self._prefill_s = 0.0
        self._step_on(ends[0][0] - self._steps)
        while ends and ends[0][0] <= self._steps + SAME_STEP:
            sequence = heapq.heappop(ends)[2]
            if not sequence.is_aborted:
                sequence.has_ended = True
                self._sum_begin_steps -= sequence.begin_steps
                ended.append(sequence)
        self._leave(len(ended))
        for sequence in ended:
            sequence.on_end(sequence)
