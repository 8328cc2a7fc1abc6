"""The sequences of a simulated engine, located by step count, and the KV cache that holds them.

A running sequence with j whole tokens holds the cache of its prompt and of these j tokens, in blocks of
`block_tokens`:

    prefix   the full blocks of its prompt without the prompt's last token, shared by the running sequences
             of the same prompt
    own      ceil((prompt tokens beyond the prefix + j) / block_tokens) blocks for the rest

A prefix is computed by the first of its sequences and dropped with the last one that runs. (A real engine
also computes the last token of a prompt for each response, to sample from it. It may find a prefix that no
sequence holds, if its blocks were not reused.)

A sequence at a tool is parked: its blocks are free, and those that were not taken need not be computed again.
The blocks of the sequence that has been parked for longest are taken first, all of them.

All running sequences advance together, so each takes one block in every `block_tokens` steps. With F blocks
free and R sequences running, F // R times `block_tokens` steps pass safely. Then the sequences take F mod R
more blocks, in the order in which they fill theirs, and the next one finds none. An exact count visits every
sequence. So it is made only if a bound from two running sums (`_most_blocks`) does not decide: each sequence
holds less than one block more than its tokens fill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from asyncrl_cli.contracts.prompt_group import TrajectoryFailure, VersionPlan

SAME_STEP = 1e-9
"""Step counts closer than this count as equal: far above rounding errors, far below a token."""
NEVER = float("inf")

VersionTokens = tuple[tuple[int, int], ...]
"""Tokens per version, ascending: ((3, 17), (4, 5))."""


class ToolWait(NamedTuple):
    """What follows a turn: a wait of `seconds`, `result_tokens` that the model then sees, and a turn of
    `turn_tokens`. With a `failure` (its kind), the trajectory ends after the wait instead. `version`: which
    one samples the turn, in a deterministic run. `is_hold`: no tool, the turn goes on with another
    version."""

    seconds: float
    result_tokens: int
    turn_tokens: int
    failure: str = ""
    version: int = -1
    is_hold: bool = False


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """A trajectory being generated. `tokens`: how many it has sampled at the end of its turn; an abort lowers
    this. `calls`: its tool calls, each followed by another turn. `on_turn` is called when a turn before a
    call is complete, `on_end` after the last turn. `luck` (uniform) decides its reward, which takes
    `reward_s` to compute and is known at `rewarded_s`. Sequences with the same `prompt` share its cache
    (None: no sharing). `index`: among the responses to the prompt. The engine sets the rest.

    `order`: its place in the order in which sequences began, 0 while it does not run. `kept`: its tokens when
    it last stopped, by a preemption or for a tool. When it begins again with k of them, `begin_steps` is k
    steps earlier, as if it had never stopped. `result_tokens`: those of all tools so far.
    """

    prompt_tokens: int
    tokens: int
    on_end: Callable[[SimulatedSequence], None] = lambda sequence: None
    reward_s: float = 0.0
    luck: float = 1.0
    prompt: object = None
    name: str = ""
    index: int = 0
    calls: Sequence[ToolWait] = ()
    on_turn: Callable[[SimulatedSequence], None] = lambda sequence: None
    num_calls: int = 0
    is_at_tool: bool = False
    is_holding: bool = False
    result_tokens: int = 0
    failure: TrajectoryFailure | None = None
    rewarded_s: float = NEVER
    begin_steps: float = 0.0
    first_load: int = 0
    order: int = 0
    kept: VersionTokens = ()
    kept_tokens: int = 0
    requeues: int = 0
    has_begun: bool = False
    is_aborted: bool = False
    has_ended: bool = False

    @property
    def begin_tokens(self) -> int:
        """All tokens when it begins: those of the prompt, of tools, and those that it sampled before."""
        return self.prompt_tokens + self.result_tokens + self.kept_tokens

    def whole_tokens(self, steps: float) -> int:
        """Tokens that are done at this step count. The sequence must be running."""
        return int(steps - self.begin_steps + SAME_STEP)

    def tokens_per_version(self, tokens: int, loads: Sequence[tuple[float, int]]) -> VersionTokens:
        """Versions of its first `tokens` tokens. `loads`: (step count, version) of all loads; those from
        `first_load` on came after it last began."""
        done, counts = self.kept_tokens, dict(self.kept)
        next_loads = [*(steps for steps, _ in loads[self.first_load + 1 :]), NEVER]
        for (_, version), until_steps in zip(loads[self.first_load :], next_loads, strict=True):
            upto = int(min(tokens, until_steps - self.begin_steps + SAME_STEP))
            if upto > done:
                counts[version] = counts.get(version, 0) + upto - done
                done = upto
        return tuple(counts.items())


class CacheSize(NamedTuple):
    """Blocks of one engine's cache; by default without a limit."""

    blocks: float = NEVER
    block_tokens: int = 16

    def holds(self, tokens: int) -> bool:
        """Whether there is room for one sequence of `tokens` tokens."""
        return self.blocks * self.block_tokens >= tokens


UNLIMITED = CacheSize()


def cut(sequence: SimulatedSequence, versions: VersionPlan, kept_tokens: int) -> None:
    """In a deterministic run: end the sequence's turns where the next version begins. `kept_tokens`: whole
    stretches that it has already."""
    pieces, position = list[ToolWait](), 0
    for call in (ToolWait(0.0, 0, sequence.tokens), *sequence.calls):
        left, wait = call.turn_tokens, call
        while left or wait is call:
            stretch = versions.left(position)
            tokens = left if stretch is None else min(left, stretch)
            pieces.append(wait._replace(turn_tokens=tokens, version=versions.at(position)))
            wait, left, position = ToolWait(0.0, 0, 0, is_hold=True), left - tokens, position + tokens
    ends = [*accumulate(piece.turn_tokens for piece in pieces)]
    sequence.calls = pieces[1:]
    sequence.num_calls = next(number for number, end in enumerate(ends) if end > kept_tokens)
    sequence.tokens = ends[sequence.num_calls]


def prefix_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Tokens of a prompt that its responses share."""
    return max(prompt_tokens - 1, 0) // block_tokens * block_tokens


class KvCache:
    """Call `hold` when a sequence begins (its `begin_steps` is set) and `release` when it no longer runs."""

    def __init__(self, size: CacheSize) -> None:
        self._size = size
        self._first: dict[SimulatedSequence, int] = {}
        """The running sequences in the order in which they began: each one's own tokens (without prefix and
        sampled ones)."""
        self._sharers: Counter[object] = Counter()
        self._prefix_blocks = 0
        self._sum_first = 0.0
        self._sum_begin_steps = 0.0
        self._parked: dict[SimulatedSequence, int] = {}
        """The tokens of each sequence at a tool whose blocks have not been taken, in the order in which they
        were parked."""
        self._parked_blocks = 0

    @property
    def newest(self) -> SimulatedSequence:
        """The running sequence that began last."""
        return next(reversed(self._first))

    def sampled_tokens(self, steps: float) -> float:
        """Sampled tokens of all running sequences, including fractions of unfinished ones."""
        return len(self._first) * steps - self._sum_begin_steps

    def fits(self, sequence: SimulatedSequence, steps: float) -> bool:
        """Whether there are blocks for all tokens of the sequence before its next one."""
        room = self._size.blocks - self._blocks(sequence.begin_tokens - self._shared(sequence))
        most = self._most_blocks(steps)
        return most <= room or (most - len(self._first) <= room and self._used(steps) <= room)

    def is_over(self, steps: float) -> bool:
        """Whether the running sequences need more blocks than there are."""
        return self._most_blocks(steps) > self._size.blocks and self._used(steps) > self._size.blocks

    def full_at(self, steps: float, until: float) -> float:
        """The step count at which a needed block will be missing, if all sequences run until `until`; NEVER
        if none will be."""
        if self._most_blocks(until) <= self._size.blocks:
            return NEVER
        free = self._size.blocks - self._used(steps)
        if free < 0:
            return steps
        rounds, further = divmod(int(free), len(self._first))
        wanted_at = sorted(
            sequence.begin_steps + self._blocks(own) * self._size.block_tokens + 1 - first
            for (sequence, first), own in zip(self._first.items(), self._own(steps), strict=True)
        )
        return wanted_at[further] + rounds * self._size.block_tokens

    def hold(self, sequence: SimulatedSequence, steps: float) -> int:
        """Returns how many tokens must be prefilled before this sequence can continue: those that the cache
        lacks."""
        self._take_parked(steps)
        tokens_to_prefill = sequence.begin_tokens - self._parked.get(sequence, self._shared(sequence))
        self._forget(sequence)
        if prefix := self._prefix(sequence):
            if sequence.prompt not in self._sharers:
                self._prefix_blocks += prefix // self._size.block_tokens
            self._sharers[sequence.prompt] += 1
        first = self._first[sequence] = sequence.prompt_tokens + sequence.result_tokens - prefix
        self._sum_first += first
        self._sum_begin_steps += sequence.begin_steps
        self._take_parked(steps)
        return tokens_to_prefill

    def release(self, sequence: SimulatedSequence, steps: float) -> None:
        self._take_parked(steps)
        if prefix := self._prefix(sequence):
            self._sharers[sequence.prompt] -= 1
            if not self._sharers[sequence.prompt]:
                del self._sharers[sequence.prompt]
                self._prefix_blocks -= prefix // self._size.block_tokens
        self._sum_first -= self._first.pop(sequence)
        self._sum_begin_steps -= sequence.begin_steps

    def park(self, sequence: SimulatedSequence) -> None:
        """Park a sequence that has just stopped for a tool."""
        self._parked[sequence] = tokens = sequence.begin_tokens
        self._parked_blocks += self._blocks(tokens)

    def drop(self, sequence: SimulatedSequence, steps: float) -> None:
        """Drop a sequence, parked or not, that will not begin again."""
        self._take_parked(steps)
        self._forget(sequence)

    def _forget(self, sequence: SimulatedSequence) -> None:
        self._parked_blocks -= self._blocks(self._parked.pop(sequence, 0))

    def outdate(self, steps: float) -> int:
        """Drop all parked blocks, because older weights computed them. Returns how many tokens of the running
        sequences must be computed again; a shared prefix counts once."""
        self._parked.clear()
        self._parked_blocks = 0
        return self._prefix_blocks * self._size.block_tokens + sum(self._own(steps))

    def _take_parked(self, steps: float) -> None:
        """Drop parked sequences whose blocks the running ones have taken. Call this whenever the number of
        running sequences changes; in between, they only take more blocks."""
        if self._most_blocks(steps) + self._parked_blocks <= self._size.blocks:
            return
        used = self._used(steps)
        while self._parked and used + self._parked_blocks > self._size.blocks:
            self._forget(next(iter(self._parked)))

    def _shared(self, sequence: SimulatedSequence) -> int:
        """Tokens of the sequence's prompt that running sequences hold."""
        return self._prefix(sequence) if sequence.prompt in self._sharers else 0

    def _prefix(self, sequence: SimulatedSequence) -> int:
        if sequence.prompt is None:
            return 0
        return prefix_tokens(sequence.prompt_tokens, self._size.block_tokens)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size.block_tokens)

    def _most_blocks(self, steps: float) -> float:
        """More than `_used(steps)` by at most the number of running sequences."""
        # each sequence's last block may hold a single token
        free_tokens = len(self._first) * (self._size.block_tokens - 1)
        tokens = self._sum_first + self.sampled_tokens(steps) + free_tokens
        return self._prefix_blocks + tokens / self._size.block_tokens

    def _used(self, steps: float) -> int:
        return self._prefix_blocks + sum(map(self._blocks, self._own(steps)))

    def _own(self, steps: float) -> list[int]:
        """The tokens of each running sequence, without its prefix."""
        return [first + sequence.whole_tokens(steps) for sequence, first in self._first.items()]
