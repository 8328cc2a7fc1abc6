"""Scorers: the functions that compute rewards, built from a RewardSpec in the process that runs them.

A scorer takes (item, response) and returns a number; it may be a coroutine function. If it cannot score, it raises instead of
returning 0. A response without an answer, or with an unreadable one, is simply wrong: 0.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.tasks import agents, verifiers_player
from asyncrl_cli.tasks.final_answer import after_prompt, final_answer, tagged
from asyncrl_cli.tasks.item import WORKED, Item, messages_of
from asyncrl_cli.tasks.reward_spec import RewardSpec
from asyncrl_cli.tasks.user_code import UserCode

Scorer = Callable[[Item, Any], Any]


def is_async(scorer: Scorer) -> bool:
    return inspect.iscoroutinefunction(scorer) or inspect.iscoroutinefunction(getattr(scorer, "__call__", None))  # noqa: B004


def checked_reward(value: object) -> float:
    """The reward as a float. Raises TypeError or ValueError unless it is a finite number: None or NaN is a failure, not 0."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the reward returned {type(value).__name__}, not a number: {value!r:.80}")
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"the reward returned {reward}")
    return reward


def _dataset_scorer(spec: RewardSpec) -> Scorer:
    from asyncrl_cli.tasks.gym import make_dataset

    dataset = make_dataset(spec.dataset, spec.params, seed=0, size=10)
    if spec.adapter == "worked":
        find = WORKED[spec.dataset].answer
        return lambda item, response: dataset.score_answer(find(response), item["metadata"]["entry"])
    return lambda item, response: dataset.score_answer(tagged(after_prompt(item, response)), item["metadata"]["entry"])


def _exact_match_scorer(spec: RewardSpec) -> Scorer:
    if spec.adapter == "worked":
        worked = WORKED[spec.dataset]
        return lambda item, response: float(worked.is_correct(response, item["metadata"]["entry"]))
    return lambda item, response: float(tagged(response) == _answer_of(item).strip())


def _math_verify_scorer(spec: RewardSpec) -> Scorer:
    from asyncrl_cli.tasks.mathematics import is_anywhere, is_right

    if spec.answer_format == "anywhere":
        return lambda item, response: float(is_anywhere(response, _answer_of(item)))

    def score(item: Item, response: str) -> float:
        expected, found = _answer_of(item), final_answer(after_prompt(item, response))
        return float(found is not None and is_right(found, expected, messages_of(item["prompt"])[-1]["content"]))

    return score


def _answer_of(item: Item) -> str:
    if item["answer"] is None:
        raise ValueError("the item has no answer to compare a response with")
    return str(item["answer"])


def load_function(code: UserCode) -> Scorer:
    """Import a reward function. Raises any error of that import, TypeError if it cannot be a reward, ConfigError if it is TRL's."""
    found, name = code.load(), code.attribute
    if inspect.isclass(found):
        raise TypeError(f"{name} is a class; name a function, or an instance that can be called")
    if not callable(found):
        raise TypeError(f"{name} is not a function but {type(found).__name__}")
    called = found if inspect.isroutine(found) or isinstance(found, partial) else type(found).__call__
    if inspect.isasyncgenfunction(called) or inspect.isgeneratorfunction(called):
        raise TypeError(f"{name} yields values; a reward returns one number")
    try:
        signature = inspect.signature(found)
    except ValueError:  # some functions in C have no signature
        return found
    if "completions" in signature.parameters:
        values = {"prompts": 'item["prompt"]', "completions": "response", "answer": 'item["answer"]'}
        given = ", ".join(f"{key}=[{value}]" for key, value in values.items() if key in signature.parameters)
        raise ConfigError(
            f'task.reward = "{code.name}" has TRL\'s signature, {signature!s:.200}; here a reward is called with (item, response)',
            hint=f"name a function that calls it: `def score(item, response): return {name}({given})[0]`",
        )
    try:
        signature.bind({}, "")
    except TypeError as error:
        raise TypeError(f"{name}{signature} cannot be called with (item, response): {error}") from error
    return found


SCORERS: Mapping[str, Callable[[RewardSpec], Scorer]] = {
    "dataset": _dataset_scorer,
    "exact-match": _exact_match_scorer,
    "math-verify": _math_verify_scorer,
    "function": lambda spec: load_function(spec.function),
    "agent": lambda spec: agents.player(spec.function),
    "verifiers": lambda spec: verifiers_player.player(spec.dataset, spec.params),
    "none": lambda spec: lambda item, response: 0.0,
}
"""By `RewardSpec.kind`. `episode` has none: the environment gives the reward."""


def build_scorer(spec: RewardSpec) -> Scorer:
    """The scorer of a spec. Raises any error of importing a function or package, or of a dataset's parameters."""
    return SCORERS[spec.kind](spec)
