"""A response in the making, and which versions its tokens are of.

Loads have a step count like everything in an engine: token j of a sequence that begins at s belongs to the last load before s + j.
A token that is half done at a load is finished by the new weights and counts as theirs.
"""

from __future__ import annotations

from collections.abc import Callable

SAME_STEP = 1e-9
"""Step counts closer than this are one: far above rounding, far below a token."""


class SimulatedSequence:
    """One response in the making. `tokens` are those it will have; fewer once it was aborted. `index` is its owner's."""

    __slots__ = ("aborted", "begin_steps", "ended", "first_load", "index", "on_end", "prompt_tokens", "tokens")

    def __init__(self, index: int, prompt_tokens: int, tokens: int, on_end: Callable[[SimulatedSequence], None]) -> None:
        assert tokens >= 1
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.tokens = tokens
        self.on_end = on_end
        self.begin_steps = -1.0
        self.first_load = 0
        self.aborted = False
        self.ended = False


class Loads:
    """The loads of an engine, by its step count. `last` is the place of the newest one, which a sequence notes when it begins."""

    def __init__(self, version: int) -> None:
        self._at: list[tuple[float, int]] = [(0.0, version)]

    @property
    def last(self) -> int:
        return len(self._at) - 1

    def add(self, steps: float, version: int) -> None:
        self._at.append((steps, version))

    def version_tokens(self, sequence: SimulatedSequence) -> tuple[tuple[int, int], ...]:
        """Tokens per version of an ended or aborted sequence, ascending: ((3, 17), (4, 5))."""
        done, spans = 0, []
        for place in range(sequence.first_load, len(self._at)):
            upto = sequence.tokens
            if place < self.last:
                upto = min(upto, int(self._at[place + 1][0] - sequence.begin_steps + SAME_STEP))
            if upto > done:
                spans.append((self._at[place][1], upto - done))
                done = upto
        return tuple(spans)
