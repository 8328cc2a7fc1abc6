"""Scorers: the functions that compute rewards, built from a RewardSpec in the process that runs them.

A scorer takes (item, response) and returns a number; it may be a coroutine function. If it cannot score, it raises instead of
returning 0. A response without an answer, or with an unreadable one, is simply wrong: 0.
"""

from __future__ import annotations

import inspect
import logging
import math
import numbers
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.tasks import agents, verifiers_player
from asyncrl_cli.tasks.item import WORKED, Item
from asyncrl_cli.tasks.reward_spec import RewardSpec
from asyncrl_cli.tasks.user_code import UserCode

Scorer = Callable[[Item, Any], Any]
ANSWER_TAG, ANSWER_END = "<answer>", "</answer>"


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


def find_answer(response: str) -> str:
    """The text in the last <answer> tag (up to the end if it is not closed), or else the whole response; stripped."""
    _, tag, after = response.rpartition(ANSWER_TAG)
    return (after.partition(ANSWER_END)[0] if tag else response).strip()


def _dataset_scorer(spec: RewardSpec) -> Scorer:
    from asyncrl_cli.tasks.gym import make_dataset

    dataset = make_dataset(spec.dataset, spec.params, seed=0, size=10)
    find = WORKED[spec.dataset].answer if spec.adapter == "worked" else find_answer
    return lambda item, response: dataset.score_answer(find(response), item["metadata"]["entry"])


def _exact_match_scorer(spec: RewardSpec) -> Scorer:
    if spec.adapter == "worked":
        worked = WORKED[spec.dataset]
        return lambda item, response: float(worked.is_correct(response, item["metadata"]["entry"]))

    def score(item: Item, response: str) -> float:
        if item["answer"] is None:
            raise ValueError("the item has no answer to match")
        return float(find_answer(response) == item["answer"].strip())

    return score


def _math_verify_scorer(spec: RewardSpec) -> Scorer:
    from math_verify import parse, verify

    # math-verify's own timeouts silently return False, so they are switched off (it warns about that). Our timeout, around the
    # process, counts a failure.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    @lru_cache(maxsize=1024)
    def gold(answer: str) -> Any:
        return parse(answer, parsing_timeout=None) or parse(f"\\boxed{{{answer}}}", parsing_timeout=None)

    def score(item: Item, response: str) -> float:
        expected = gold(item["answer"] or "")
        if not expected:
            raise ValueError(f"the item's answer is not mathematics: {item['answer']!r:.80}")
        return float(verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None))

    return score


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
