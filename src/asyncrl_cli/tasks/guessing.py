"""builtin:guess: find a number that the environment thinks of and gives hints about. The fewer guesses, the higher the reward.

    prompt    17-62
    turns     39 -> higher, 51 -> lower, 45 -> (found: reward 6/8)

The best play is known: always halve what is left. `best_reward` says what it earns on average.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from asyncrl_cli.profile.fields import Section
from asyncrl_cli.tasks.item import Item, make_item

Message = Mapping[str, Any]
HIGHER, LOWER = "higher", "lower"
QUESTION = "I think of a whole number from {} to {}. Guess it: say a number, and I say whether mine is higher or lower."


class GuessingParams(Section):
    min_numbers: Annotated[int, Field(ge=2, le=10**6)] = 16
    max_numbers: Annotated[int, Field(ge=2, le=10**6)] = 80
    max_number: Annotated[int, Field(ge=2, le=10**6)] = 99
    max_guesses: Annotated[int, Field(ge=1, le=100)] = 8

    @model_validator(mode="after")
    def _ordered(self) -> GuessingParams:
        if not self.min_numbers <= self.max_numbers <= self.max_number + 1:
            raise ValueError("min_numbers <= max_numbers <= max_number + 1 must hold")
        return self


class Guessing:
    """Makes items and conversations about them. A prompt is a range: `min_numbers` to `max_numbers` of the numbers up to
    `max_number`. Its lowest number, its size, and the secret in it are each equally distributed."""

    environment = "guess"
    words = (HIGHER, LOWER)

    def __init__(self, params: GuessingParams, form: Literal["plain", "worked"]) -> None:
        self._params = params
        self._form = form

    def draw(self, rng: Random) -> Item:
        params = self._params
        num = rng.randint(params.min_numbers, params.max_numbers)
        low = rng.randint(0, params.max_number + 1 - num)
        high, secret = low + num - 1, rng.randint(low, low + num - 1)
        prompt = f"{low}-{high}" if self._form == "worked" else QUESTION.format(low, high)
        return make_item(prompt, str(secret), {"low": low, "high": high, "secret": secret, "max_guesses": params.max_guesses})

    def demonstration(self, item: Item, rng: Random) -> list[Message]:
        """Halve what is left until the secret is found."""
        low, high, secret = (item["metadata"][key] for key in ("low", "high", "secret"))
        guesses = [(low + high) // 2]
        while guesses[-1] != secret:
            low, high = (guesses[-1] + 1, high) if secret > guesses[-1] else (low, guesses[-1] - 1)
            guesses.append((low + high) // 2)
        return conversation(item, guesses)

    def flawed_demonstration(self, item: Item, rng: Random) -> list[Message]:
        """Guess at random, whatever the hints say."""
        low, high, secret, most = (item["metadata"][key] for key in ("low", "high", "secret", "max_guesses"))
        guesses = [rng.randint(low, high)]
        while guesses[-1] != secret and len(guesses) < most:
            guesses.append(rng.randint(low, high))
        return conversation(item, guesses)

    def ceiling(self, items: Sequence[Item]) -> float:
        """Mean reward of the best play over these ranges and every secret in them."""
        sizes = (item["metadata"]["high"] - item["metadata"]["low"] + 1 for item in items)
        return fmean(best_reward(size, self._params.max_guesses) for size in sizes)


def hint(guess: int, secret: int) -> str:
    return HIGHER if secret > guess else LOWER


def conversation(item: Item, guesses: Sequence[int]) -> list[Message]:
    """The prompt and the guesses, with a hint after each but the last."""
    messages: list[Message] = [{"role": "user", "content": item["prompt"]}]
    for guess in guesses:
        messages.append({"role": "assistant", "content": str(guess)})
        messages.append({"role": "user", "content": hint(guess, item["metadata"]["secret"])})
    return messages[:-1]


def guess_of(text: str) -> int | None:
    """The last whole number in a text, which may say more than that."""
    numbers = re.findall(r"\d{1,18}", text)
    return int(numbers[-1]) if numbers else None


def reward_of(num_guesses: int, max_guesses: int) -> float:
    """1 if the first guess was right, 1 / max_guesses if the last one was: each guess costs the same."""
    return (max_guesses + 1 - num_guesses) / max_guesses


def best_reward(num_numbers: int, max_guesses: int) -> float:
    """Expected reward of the best play if the secret is any of `num_numbers` with the same probability.

    There are at most 2^(k-1) different k-th guesses, one for every series of hints before it. So no play finds more secrets with
    it, and halving finds as many, until none is left.
    """
    total, left = 0.0, num_numbers
    for guess in range(1, max_guesses + 1):
        found = min(left, 2 ** (guess - 1))
        total, left = total + found * reward_of(guess, max_guesses), left - found
    return total / num_numbers
