"""Reward functions of the user: `load_function` makes a scorer of one. The names of its parameters tell how
it is called.

    ours    score(item, response) -> float
    TRL's   reward(prompts, completions, **columns) -> list[float | None], with lists of one
    verl's  compute_score(data_source, solution_str, ground_truth, extra_info) -> float, or a dict with a `score`

Each may be a coroutine function. What TRL's `log_metric` is given, and the other numbers of verl's dict,
become metrics.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.reward_spec import MAX_PARTS, NoReward, Reward
from asyncrl_cli.contracts.user_code import UserCode
from asyncrl_cli.tasks.rows import DEFAULT_ANSWER, GROUND_TRUTHS, find

Scorer = Callable[[Item, Any], Any]
Figures = dict[str, float]


class Signature(NamedTuple):
    """How a function of another trainer is called. `arguments` returns them by name, and `reward` reads what
    the function returned. Both may add to the figures."""

    arguments: Callable[[Item, str, Figures], dict[str, Any]]
    reward: Callable[[Any, Figures], Any]


def is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def load_function(code: UserCode, answer_key: str = DEFAULT_ANSWER) -> Scorer:
    """Import a reward function. Raises any error of that import, or TypeError if it cannot be a reward.
    `answer_key`: the column of the answer, by which TRL's functions ask for it, and which verl's get as it is
    in the data."""
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
        check_trl(name, signature)
        return _adapted(found, signature, Signature(partial(_trl_arguments, answer_key), _trl_reward))
    if {"solution_str", "ground_truth"} <= signature.parameters.keys():
        return _adapted(found, signature, Signature(partial(_verl_arguments, answer_key), _verl_reward))
    try:
        signature.bind({}, "")
    except TypeError as error:
        raise TypeError(f"{name}{signature} cannot be called with (item, response): {error}") from error
    return found


def check_trl(name: str, signature: inspect.Signature) -> None:
    """Raises TypeError if a function in TRL's signature asks for what rewards are not given here."""
    asked = signature.parameters.get("completion_ids")
    if asked is not None and asked.default is asked.empty:
        raise TypeError(f"{name} asks for completion_ids, which are not available where rewards are computed")


def _adapted(function: Callable[..., Any], signature: inspect.Signature, call: Signature) -> Scorer:
    """The scorer that calls a function of another trainer. Without `**kwargs`, the function gets what it has
    parameters for."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())

    def asked(item: Item, response: str, figures: Figures) -> dict[str, Any]:
        given = call.arguments(item, response, figures)
        return (
            given
            if takes_all
            else {name: value for name, value in given.items() if name in signature.parameters}
        )

    def score(item: Item, response: str) -> Any:
        figures = Figures()
        return call.reward(function(**asked(item, response, figures)), figures)

    async def score_awaiting(item: Item, response: str) -> Any:
        figures = Figures()
        return call.reward(await function(**asked(item, response, figures)), figures)

    return score_awaiting if is_async(function) else score


def _trl_arguments(answer_key: str, item: Item, response: str, figures: Figures) -> dict[str, Any]:
    """As TRL gives them: text for a prompt that is text, messages for one of messages, and every column of
    the data."""
    prompt, answer = item["prompt"], item["answer"]
    is_text = isinstance(prompt, str)
    columns = {answer_key: answer, "answer": answer, **item["metadata"]}
    return {
        **{name: [value] for name, value in columns.items()},
        "prompts": [prompt if is_text else [dict(message) for message in prompt]],
        "completions": [response if is_text else [{"role": "assistant", "content": response}]],
        "trainer_state": None,
        "log_extra": lambda *_: None,
        "log_metric": partial(_note, figures),
    }


def _trl_reward(returned: Any, figures: Figures) -> Any:
    rewards = list(returned)
    if len(rewards) != 1:
        raise ValueError(f"{len(rewards)} rewards for one completion")
    return NoReward() if rewards[0] is None else _with(rewards[0], figures)


def _verl_arguments(answer_key: str, item: Item, response: str, figures: Figures) -> dict[str, Any]:
    columns = item["metadata"]
    truths = (
        find(columns, name) for name in (GROUND_TRUTHS if answer_key == DEFAULT_ANSWER else (answer_key,))
    )
    return {
        "data_source": columns.get("data_source"),
        "solution_str": response,
        # the item's answer is always text
        "ground_truth": next((truth for truth in truths if truth is not None), item["answer"]),
        "extra_info": columns.get("extra_info") or {},
    }


def _verl_reward(returned: Any, figures: Figures) -> Any:
    if not isinstance(returned, Mapping):
        return _with(returned, figures)
    for name, value in returned.items():
        if name != "score" and isinstance(value, Real):
            _note(figures, name, value)
    return _with(returned["score"], figures)


def _with(reward: Any, figures: Figures) -> Any:
    """The reward with its figures. A number of NumPy or torch becomes Python's."""
    number = reward.item() if hasattr(reward, "item") else reward
    return Reward(number, figures) if figures and isinstance(number, Real) else number


def _note(figures: Figures, name: str, value: Any) -> None:
    if len(figures) < MAX_PARTS:
        figures[str(name)[:80]] = float(value)
