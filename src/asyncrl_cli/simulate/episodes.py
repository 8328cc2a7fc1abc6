"""Draws what follows the first turn of a trajectory: tool calls, their results, and further turns, within the limits of `[env]`."""

from __future__ import annotations

import math
import random

from asyncrl_cli.profile.arithmetic import max_context_tokens
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.responses import ResponseLengths
from asyncrl_cli.simulate.sequences import ToolCall
from asyncrl_cli.simulate.workload import Drawn, Turns


class Episodes:
    """Called with a trajectory's own generator and the tokens of its first turn, it returns the tool calls that follow."""

    def __init__(self, turns: Turns, lengths: ResponseLengths, profile: Profile, prompt_tokens: int) -> None:
        self._turns = turns
        self._lengths = lengths
        self._env = profile.env
        self._room_tokens = max_context_tokens(profile) - prompt_tokens

    def __call__(self, rng: random.Random, tokens: int) -> list[ToolCall]:
        calls: list[ToolCall] = []
        number, left = max(1, min(round(draw(self._turns.number, rng)), self._env.max_turns)), self._room_tokens - tokens
        for turn_tokens in self._lengths(rng, number - 1):
            seconds, result_tokens = draw(self._turns.tool_s, rng), round(draw(self._turns.result_tokens, rng))
            if seconds > self._env.tool_timeout_s:
                return [*calls, ToolCall(self._env.tool_timeout_s, 0, 0, "tool-timeout")]
            if (left := left - result_tokens) < 1:
                break
            calls.append(ToolCall(seconds, result_tokens, min(turn_tokens, left)))
            left -= calls[-1].turn_tokens
        return calls


def draw(figure: Drawn, rng: random.Random) -> float:
    if figure.median is None:
        return rng.choice(figure.values)
    return figure.median * math.exp(min(figure.sigma * rng.gauss(0.0, 1.0), 40.0))
