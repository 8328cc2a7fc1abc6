"""One response in a simulated engine, placed by step count: when it began, and which of its tokens are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

SAME_STEP = 1e-9
"""Step counts closer than this are equal: far above rounding errors, far below a token."""
NEVER = float("inf")

VersionTokens = tuple[tuple[int, int], ...]
"""Tokens per version, ascending: ((3, 17), (4, 5))."""


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """A response being generated. `tokens`: its final length, lowered by an abort. `on_end` is called when it is complete. `luck`
    (uniform) decides its reward, which takes `reward_s` to compute and is there at `rewarded_s`. Sequences with the same `prompt`
    share its cache; None shares with nobody. The engine sets the rest.

    `turn`: its place in the order of beginning, 0 while it does not run. `kept`: its tokens at its last preemption. When it begins
    again with k of them, `begin_steps` is k steps back, as if it had never stopped.
    """

    prompt_tokens: int
    tokens: int
    on_end: Callable[[SimulatedSequence], None]
    reward_s: float = 0.0
    luck: float = 1.0
    prompt: object = None
    rewarded_s: float = NEVER
    begin_steps: float = 0.0
    first_load: int = 0
    turn: int = 0
    kept: VersionTokens = ()
    kept_tokens: int = 0
    has_begun: bool = False
    is_aborted: bool = False
    has_ended: bool = False

    def whole_tokens(self, steps: float) -> int:
        """Tokens that are done at this step count; it must be running."""
        return int(steps - self.begin_steps + SAME_STEP)


def tokens_per_version(sequence: SimulatedSequence, tokens: int, loads: Sequence[tuple[float, int]]) -> VersionTokens:
    """Versions of the first `tokens` tokens of a sequence. `loads`: (step count, version) of all loads; those from `first_load` on
    fell into its current turn, or its last."""
    done, counts = sequence.kept_tokens, dict(sequence.kept)
    next_loads = [*(steps for steps, _ in loads[sequence.first_load + 1 :]), NEVER]
    for (_, version), until_steps in zip(loads[sequence.first_load :], next_loads, strict=True):
        upto = int(min(tokens, until_steps - sequence.begin_steps + SAME_STEP))
        if upto > done:
            counts[version] = counts.get(version, 0) + upto - done
            done = upto
    return tuple(counts.items())
