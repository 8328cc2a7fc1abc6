"""Scorers: the functions that compute rewards, built from a RewardSpec in the process that runs them.

A scorer takes (item, response) and returns a number; it may be a coroutine function. If it cannot score, it
raises instead of returning 0. A response without an answer, or with an unreadable one, is simply wrong: 0.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl_cli.builtin.number_sorting import WORKED
from asyncrl_cli.contracts.item import Item, messages_of
from asyncrl_cli.contracts.reward_spec import MAX_REWARD, NAMES_ANSWER, NoReward, Reward, RewardSpec
from asyncrl_cli.tasks import agents, verifiers_player
from asyncrl_cli.tasks.final_answer import after_prompt, final_answer, names_answer, tagged
from asyncrl_cli.tasks.reward_functions import Scorer, is_async, load_function


def checked_reward(value: object) -> Reward:
    """The reward with its parts. Raises TypeError or ValueError unless it is a finite number of at most
    MAX_REWARD: None or NaN is a failure, not 0."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the reward returned {type(value).__name__}, not a number: {value!r:.80}")
    reward = float(value)
    if not abs(reward) <= MAX_REWARD:
        raise ValueError(
            f"the reward returned {reward:g}; a reward is a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
        )
    return value if isinstance(value, Reward) else Reward(reward)


def with_reference(spec: RewardSpec, item: Item, response: Any, reward: Reward) -> Reward:
    """The reward with one more figure: whether the response names the reference answer, if there is one to
    look for."""
    answer = item.get("answer")
    if spec.adapter == "worked" or not isinstance(answer, str) or not isinstance(response, str):
        return reward
    return Reward(reward, {**reward.parts, NAMES_ANSWER: float(names_answer(response, answer))})


def _dataset_scorer(spec: RewardSpec) -> Scorer:
    from asyncrl_cli.tasks.gym import make_dataset

    dataset = make_dataset(spec.dataset, spec.params, seed=0, size=10)
    if spec.adapter == "worked":
        find = WORKED[spec.dataset].answer
        return lambda item, response: dataset.score_answer(find(response), item["metadata"]["entry"])
    return lambda item, response: dataset.score_answer(
        tagged(after_prompt(item, response)), item["metadata"]["entry"]
    )


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
        return float(
            found is not None and is_right(found, expected, messages_of(item["prompt"])[-1]["content"])
        )

    return score


def _answer_of(item: Item) -> str:
    if item["answer"] is None:
        raise ValueError("the item has no answer to compare a response with")
    return str(item["answer"])


def _several_scorer(spec: RewardSpec) -> Scorer:
    """The weighted sum. Scorers that are coroutine functions are awaited one after the other."""
    scorers = {part.name: (part.weight, build_scorer(part.spec)) for part in spec.parts}

    def summed(values: Mapping[str, Any]) -> Reward:
        given = {
            name: checked_reward(value) for name, value in values.items() if not isinstance(value, NoReward)
        }
        if not given:
            raise ValueError("none of the rewards applies to the item")
        figures = {name: figure for reward in given.values() for name, figure in reward.parts.items()}
        return Reward(sum(scorers[name][0] * reward for name, reward in given.items()), figures | given)

    def score(item: Item, response: str) -> Reward:
        return summed({name: scorer(item, response) for name, (_, scorer) in scorers.items()})

    async def score_awaiting(item: Item, response: str) -> Reward:
        values = dict[str, Any]()
        for name, (_, scorer) in scorers.items():
            value = scorer(item, response)
            values[name] = await value if inspect.isawaitable(value) else value
        return summed(values)

    return score_awaiting if any(is_async(scorer) for _, scorer in scorers.values()) else score


SCORERS: Mapping[str, Callable[[RewardSpec], Scorer]] = {
    "dataset": _dataset_scorer,
    "exact-match": _exact_match_scorer,
    "math-verify": _math_verify_scorer,
    "function": lambda spec: load_function(spec.function, spec.answer_key),
    "several": _several_scorer,
    "agent": lambda spec: agents.player(spec.function),
    "verifiers": lambda spec: verifiers_player.player(spec.dataset, spec.params),
    "none": lambda spec: lambda item, response: 0.0,
}
"""By `RewardSpec.kind`. `episode` has none: the environment gives the reward."""


def build_scorer(spec: RewardSpec) -> Scorer:
    """The scorer of a spec. Raises any error of importing a function or package, or of a dataset's
    parameters."""
    return SCORERS[spec.kind](spec)
