"""Rewards: the functions that compute them, built from a RewardSpec in the process that runs them.

Each takes (item, response) and returns a number, or {"reward": number, "<declared field>": value}; it may be
a coroutine function. If it cannot judge, it raises instead of returning 0. A response without an answer, or
with an unreadable one, is simply wrong: 0.
The names of its parameters tell how a user's function is called:

    ours    score(item, response) -> float
    TRL's   reward(prompts, completions, **columns) -> list[float | None], with lists of one
    verl's  compute_score(data_source, solution_str, ground_truth, extra_info) -> float, or a dict

What TRL's `log_metric` is given, and the other numbers of verl's dict, become metrics.
"""

from __future__ import annotations

import inspect
import json
import numbers
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, SupportsFloat

from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.contracts.environment import MAX_PARTS, MAX_REWARD, NoReward, Reward, RewardSpec
from asyncrl_cli.contracts.item import Item, messages_of
from asyncrl_cli.tasks.final_answer import after_prompt, final_answer, tagged
from asyncrl_cli.tasks.players import agent_player, verifiers_player
from asyncrl_cli.tasks.rows import DEFAULT_ANSWER, GROUND_TRUTHS, find

RewardFunction = Callable[..., Any]
"""Takes an item and the response to it; for what plays items, the access to the model. Returns a number or an
awaitable, which `checked_reward` checks."""


def is_async(function: RewardFunction) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def load_function(code: UserCode, answer_key: str = DEFAULT_ANSWER) -> RewardFunction:
    """Import a reward function. Raises any error of that import, or TypeError if it cannot be a reward.
    `answer_key`: the column of the answer, by which TRL's functions ask for it, and which verl's get as it is
    in the data."""
    found: RewardFunction = code.load()
    name = code.attribute
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
        return _adapted(found, signature, answer_key, is_trl=True)
    if {"solution_str", "ground_truth"} <= signature.parameters.keys():
        return _adapted(found, signature, answer_key, is_trl=False)
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


def _adapted(
    function: RewardFunction, signature: inspect.Signature, answer_key: str, *, is_trl: bool
) -> RewardFunction:
    """Calls a function of another trainer as that does: TRL, or else verl. Without `**kwargs`, the function
    gets what it has parameters for."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())

    def note(figures: dict[str, float], name: object, value: SupportsFloat) -> None:
        if len(figures) < MAX_PARTS:
            figures[str(name)[:80]] = float(value)

    def arguments(item: Item, response: str, figures: dict[str, float]) -> dict[str, object]:
        prompt, answer, columns = item["prompt"], item["answer"], item["metadata"]
        if is_trl:  # text for a prompt that is text, messages for one of messages, every column of the data
            is_text = isinstance(prompt, str)
            data = {answer_key: answer, "answer": answer, **columns}
            given: dict[str, object] = {
                **{name: [value] for name, value in data.items()},
                "prompts": [prompt if is_text else [dict(message) for message in prompt]],
                "completions": [response if is_text else [{"role": "assistant", "content": response}]],
                "trainer_state": None,
                "log_extra": lambda *_: None,
                "log_metric": partial(note, figures),
            }
        else:
            places = GROUND_TRUTHS if answer_key == DEFAULT_ANSWER else (answer_key,)
            truths = (find(columns, name) for name in places)
            given = {
                "data_source": columns.get("data_source"),
                "solution_str": response,
                # the item's answer is always text
                "ground_truth": next((truth for truth in truths if truth is not None), answer),
                "extra_info": columns.get("extra_info") or {},
            }
        return {name: value for name, value in given.items() if takes_all or name in signature.parameters}

    def reward(returned: Any, figures: dict[str, float]) -> object:
        if is_trl:
            rewards = list(returned)
            if len(rewards) != 1:
                raise ValueError(f"{len(rewards)} rewards for one completion")
            returned = rewards[0]
            if returned is None:
                return NoReward()
        elif isinstance(returned, Mapping):
            for name, value in returned.items():
                if name != "score" and isinstance(value, numbers.Real):
                    note(figures, name, value)
            returned = returned["score"]
        number = returned.item() if hasattr(returned, "item") else returned  # of NumPy or torch
        return Reward(float(number), figures) if figures and isinstance(number, numbers.Real) else number

    def score(item: Item, response: str) -> object:
        figures = dict[str, float]()
        return reward(function(**arguments(item, response, figures)), figures)

    async def score_awaiting(item: Item, response: str) -> object:
        figures = dict[str, float]()
        return reward(await function(**arguments(item, response, figures)), figures)

    return score_awaiting if is_async(function) else score


def checked_reward(value: object) -> Reward:
    """The reward with its parts and fields. Raises TypeError or ValueError unless it is a finite number of at
    most MAX_REWARD (None or NaN is a failure, not 0), and its fields are values that JSON can hold."""
    fields = dict[str, Any]()
    if isinstance(value, Mapping) and "reward" in value:
        fields = {str(name): field for name, field in value.items() if name != "reward"}
        json.dumps(fields, allow_nan=False)
        value = value["reward"]
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the reward returned {type(value).__name__}, not a number: {value!r:.80}")
    reward = float(value)
    if not abs(reward) <= MAX_REWARD:
        limits = f"from {-MAX_REWARD:g} to {MAX_REWARD:g}"
        raise ValueError(f"the reward returned {reward:g}; a reward is a number {limits}")
    return value if isinstance(value, Reward) else Reward(reward, fields=fields)


def _weighted_sum(spec: RewardSpec) -> RewardFunction:
    """The weighted sum. Functions that are coroutine functions are awaited one after the other."""
    functions = {part.name: (part.weight, build_reward(part.spec)) for part in spec.parts}

    def summed(values: Mapping[str, object]) -> Reward:
        rewarded = {name: value for name, value in values.items() if not isinstance(value, NoReward)}
        given = {name: checked_reward(value) for name, value in rewarded.items()}
        if not given:
            raise ValueError("none of the rewards applies to the item")
        figures = {name: figure for reward in given.values() for name, figure in reward.parts.items()}
        fields = {name: value for reward in given.values() for name, value in reward.fields.items()}
        total = sum(functions[name][0] * reward for name, reward in given.items())
        return Reward(total, figures | given, fields)

    def score(item: Item, response: str) -> Reward:
        return summed({name: function(item, response) for name, (_, function) in functions.items()})

    async def score_awaiting(item: Item, response: str) -> Reward:
        values = dict[str, object]()
        for name, (_, function) in functions.items():
            value = function(item, response)
            values[name] = await value if inspect.isawaitable(value) else value
        return summed(values)

    return score_awaiting if any(is_async(function) for _, function in functions.values()) else score


def build_reward(spec: RewardSpec) -> RewardFunction:
    """The function that computes the rewards of a spec. Raises any error of importing a function or package,
    or of a dataset's parameters."""
    worked = None
    if spec.adapter == "worked":  # imported late: a user's own Python may lack what gym.py imports
        from asyncrl_cli.tasks.gym import WORKED

        worked = WORKED.get(spec.dataset)

    def expected(item: Item) -> str:
        if item["answer"] is None:
            raise ValueError("the item has no answer to compare a response with")
        return str(item["answer"])

    if spec.kind == "dataset":
        from asyncrl_cli.tasks.gym import make_dataset

        dataset = make_dataset(spec.dataset, spec.params, seed=0, size=10)

        def by_dataset(item: Item, response: str) -> float:
            answer = worked.answer(response) if worked else tagged(after_prompt(item, response))
            return dataset.score_answer(answer, item["metadata"]["entry"])

        return by_dataset
    if spec.kind == "exact-match":
        if worked:
            return lambda item, response: float(worked.is_correct(response, item["metadata"]["entry"]))
        return lambda item, response: float(tagged(response) == expected(item).strip())
    if spec.kind == "math-verify":
        from asyncrl_cli.tasks.mathematics import is_anywhere, is_right

        def by_math_verify(item: Item, response: str) -> float:
            answer = expected(item)
            if spec.answer_format == "anywhere":
                return float(is_anywhere(response, answer))
            found = final_answer(after_prompt(item, response))
            asked = messages_of(item["prompt"])[-1]["content"]
            return float(found is not None and is_right(found, answer, asked))

        return by_math_verify
    if spec.kind == "several":
        return _weighted_sum(spec)
    if spec.kind == "verifiers":
        return verifiers_player(spec.dataset, spec.params)
    if spec.function is not None:
        is_agent = spec.kind == "agent"
        return agent_player(spec.function) if is_agent else load_function(spec.function, spec.answer_key)
    assert spec.kind == "none", "an environment gives the rewards of episodes"
    return lambda item, response: 0.0
