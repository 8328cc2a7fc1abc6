"""One response in a simulated engine, located by step count: when it began, and which of its tokens are
done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl_cli.contracts.attempts import Failure

SAME_STEP = 1e-9
"""Step counts closer than this count as equal: far above rounding errors, far below a token."""
NEVER = float("inf")

VersionTokens = tuple[tuple[int, int], ...]
"""Tokens per version, ascending: ((3, 17), (4, 5))."""


class ToolWait(NamedTuple):
    """What follows a turn: a wait of `seconds`, `result_tokens` that the model then sees, and a turn of
    `turn_tokens`. With a `failure` (its kind), the trajectory ends after the wait instead."""

    seconds: float
    result_tokens: int
    turn_tokens: int
    failure: str = ""


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
    result_tokens: int = 0
    failure: Failure | None = None
    rewarded_s: float = NEVER
    begin_steps: float = 0.0
    first_load: int = 0
    order: int = 0
    kept: VersionTokens = ()
    kept_tokens: int = 0
    has_begun: bool = False
    is_aborted: bool = False
    has_ended: bool = False

    def whole_tokens(self, steps: float) -> int:
        """Tokens that are done at this step count. The sequence must be running."""
        return int(steps - self.begin_steps + SAME_STEP)


def tokens_per_version(
    sequence: SimulatedSequence, tokens: int, loads: Sequence[tuple[float, int]]
) -> VersionTokens:
    """Versions of the first `tokens` tokens of a sequence. `loads`: (step count, version) of all loads; those
    from `first_load` on came after it last began."""
    done, counts = sequence.kept_tokens, dict(sequence.kept)
    next_loads = [*(steps for steps, _ in loads[sequence.first_load + 1 :]), NEVER]
    for (_, version), until_steps in zip(loads[sequence.first_load :], next_loads, strict=True):
        upto = int(min(tokens, until_steps - sequence.begin_steps + SAME_STEP))
        if upto > done:
            counts[version] = counts.get(version, 0) + upto - done
            done = upto
    return tuple(counts.items())
