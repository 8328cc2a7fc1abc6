"""The rewards themselves, built from a RewardSpec in the process that runs them.

A scorer is called with (item, response) and returns a number, or awaits one. It raises when it cannot say: never 0 for
"do not know". A response that holds no answer, or one that cannot be read, is simply wrong: 0.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import numbers
import sys
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from asyncrl_cli.tasks.item import Item
from asyncrl_cli.tasks.reward_spec import RewardSpec

Scorer = Callable[[Item, str], Any]
ANSWER_TAG, ANSWER_END = "<answer>", "</answer>"


def build_scorer(spec: RewardSpec) -> Scorer:
    """Raises whatever building it raises: the import of a function, a missing package, parameters of a dataset."""
    if spec.kind == "dataset":
        return _dataset_scorer(spec)
    if spec.kind == "exact-match":
        return _exact_match_scorer(spec)
    if spec.kind == "math-verify":
        return _math_verify_scorer()
    return _import_function(spec)


def is_async(scorer: Scorer) -> bool:
    return inspect.iscoroutinefunction(scorer) or inspect.iscoroutinefunction(getattr(scorer, "__call__", None))  # noqa: B004


def checked_reward(value: object) -> float:
    """A finite number, or TypeError / ValueError: a reward that is None or NaN is a failure, not a small reward."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the reward returned {type(value).__name__}, not a number: {value!r:.80}")
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"the reward returned {reward}")
    return reward


def find_answer(response: str) -> str:
    """The text in the last <answer> tag (open to the end, if it is never closed), else the whole response; stripped."""
    _, tag, after = response.rpartition(ANSWER_TAG)
    return (after.partition(ANSWER_END)[0] if tag else response).strip()


def answer_finder(spec: RewardSpec) -> Callable[[str], str | None]:
    if spec.adapter == "plain":
        return find_answer
    from asyncrl_cli.tasks.worked import WORKED

    return WORKED[spec.dataset].answer


async def awaited(value: Awaitable[Any]) -> float:
    return checked_reward(await value)


def _dataset_scorer(spec: RewardSpec) -> Scorer:
    from asyncrl_cli.tasks.gym import make_dataset

    dataset = make_dataset(spec.dataset, spec.params, seed=0, size=10)
    find = answer_finder(spec)

    def score(item: Item, response: str) -> Any:
        answer = find(response)
        return 0.0 if answer is None else dataset.score_answer(answer, item["metadata"]["entry"])

    return score


def _exact_match_scorer(spec: RewardSpec) -> Scorer:
    find = answer_finder(spec)

    def score(item: Item, response: str) -> float:
        if item["answer"] is None:
            raise ValueError("the item has no answer to match")
        answer = find(response)
        return float(answer is not None and answer.strip() == item["answer"].strip())

    return score


def _math_verify_scorer() -> Scorer:
    from math_verify import parse, verify

    # Its own timeouts end in a silent False; ours, around the process, end in a counted failure. It warns about that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    @lru_cache(maxsize=1024)
    def gold(answer: str) -> Any:
        return parse(answer, parsing_timeout=None) or parse(f"\\boxed{{{answer}}}", parsing_timeout=None)

    def score(item: Item, response: str) -> float:
        expected = gold(item["answer"] or "")
        if not expected:
            raise ValueError(f"the item's answer is no mathematics: {item['answer']!r:.80}")
        return float(verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None))

    return score


def _import_function(spec: RewardSpec) -> Scorer:
    if spec.import_path and spec.import_path not in sys.path:
        sys.path.insert(0, spec.import_path)
    module_name, _, path = spec.function.partition(":")
    found: object = importlib.import_module(module_name)
    for name in path.split("."):
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{path} is not a function but {type(found).__name__}")
    try:
        inspect.signature(found).bind({}, "")
    except TypeError as error:
        raise TypeError(f"{path}{inspect.signature(found)} cannot be called with (item, response): {error}") from error
    return found
