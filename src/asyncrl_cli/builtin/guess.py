"""builtin:guess: find a number that the environment thinks of and gives hints about. The fewer guesses, the
higher the reward.

    prompt    17-62
    turns     39 -> higher, 51 -> lower, 45 -> (found)

Par is the number of guesses in which halving finds any number of the range: 6 for these 46 numbers. A game
within par earns 1. Each further guess costs a third of that, and after two of them the game is lost and earns
0. So halving is the best play and earns 1, and luck is worth little. `best_reward` computes what the best
play earns on average.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from asyncrl_cli.contracts.environment import Answer, End, Environment, Message, Turn
from asyncrl_cli.contracts.item import Item, make_item, messages_of
from asyncrl_cli.contracts.reward_spec import Adapter
from asyncrl_cli.profile.fields import Section

HIGHER, LOWER = "higher", "lower"
QUESTION = (
    "I think of a whole number from {} to {}. Guess it: say a number, and I say whether mine is "
    "higher or lower."
)


class Guessing(Section):
    """Draws items and writes conversations that play them. A prompt is a range of `min_numbers` to
    `max_numbers` numbers, none above `max_number`. Its size, its lowest number and the secret in it are drawn
    uniformly."""

    environment: ClassVar = "guess"
    words: ClassVar = (HIGHER, LOWER)
    min_numbers: Annotated[int, Field(ge=2, le=10**6)] = 16
    max_numbers: Annotated[int, Field(ge=2, le=10**6)] = 80
    max_number: Annotated[int, Field(ge=2, le=10**6)] = 99
    spare_guesses: Annotated[int, Field(ge=0, le=100)] = 2

    @model_validator(mode="after")
    def _ordered(self) -> Guessing:
        if not self.min_numbers <= self.max_numbers <= self.max_number + 1:
            raise ValueError("min_numbers <= max_numbers <= max_number + 1 must hold")
        return self

    def draw(self, rng: Random, form: Adapter) -> Item:
        num = rng.randint(self.min_numbers, self.max_numbers)
        low = rng.randint(0, self.max_number + 1 - num)
        high, secret = low + num - 1, rng.randint(low, low + num - 1)
        prompt = f"{low}-{high}" if form == "worked" else QUESTION.format(low, high)
        game = {"low": low, "high": high, "secret": secret, "par": par_of(num)}
        return make_item(prompt, str(secret), game | {"max_guesses": par_of(num) + self.spare_guesses})

    def demonstration(self, item: Item, rng: Random) -> list[Message]:
        """Every guess halves the remaining range."""
        return conversation(item, lambda low, high: (low + high) // 2)

    def flawed_demonstration(self, item: Item, rng: Random) -> list[Message]:
        """Every guess is the lowest remaining number, or every guess is the highest. Guesses are not random:
        the gradient of a model that has learned to guess at random would be noise."""
        return conversation(item, rng.choice((lambda low, high: low, lambda low, high: high)))

    def ceiling(self, items: Sequence[Item]) -> float:
        """Mean reward of the best play over these ranges and every secret in them."""
        games = (item["metadata"] for item in items)
        return fmean(
            best_reward(game["high"] - game["low"] + 1, game["par"], game["max_guesses"]) for game in games
        )


def par_of(num_numbers: int) -> int:
    """The least number of guesses that is always enough: k guesses tell 2^k - 1 numbers apart."""
    return num_numbers.bit_length()


def hint(guess: int, secret: int) -> str:
    return HIGHER if secret > guess else LOWER


def conversation(item: Item, guess: Callable[[int, int], int]) -> list[Message]:
    """The prompt and the guesses, with a hint after each but the last. `guess(low, high)` chooses from the
    remaining range."""
    low, high, secret, most = (item["metadata"][key] for key in ("low", "high", "secret", "max_guesses"))
    messages: list[Message] = [{"role": "user", "content": item["prompt"]}]
    while True:
        number = guess(low, high)
        messages.append({"role": "assistant", "content": str(number)})
        if number == secret or len(messages) == 2 * most:
            return messages
        messages.append({"role": "user", "content": hint(number, secret)})
        low, high = (number + 1, high) if secret > number else (low, number - 1)


def reward_of(num_guesses: int, par: int, max_guesses: int) -> float:
    """1 if the number was found within par. Each further guess earns less, in equal steps, down to 0 after
    max_guesses."""
    return min(1.0, (max_guesses + 1 - num_guesses) / (max_guesses + 1 - par))


def best_reward(num_numbers: int, par: int, max_guesses: int) -> float:
    """Expected reward of the best play if the secret is any of `num_numbers` with the same probability.

    There are at most 2^(k-1) different k-th guesses, one for every sequence of hints before it. So no play
    finds more secrets with its k-th guess, and halving finds exactly that many, until none is left.
    """
    total, left = 0.0, num_numbers
    for guess in range(1, max_guesses + 1):
        found = min(left, 2 ** (guess - 1))
        total, left = total + found * reward_of(guess, par, max_guesses), left - found
    return total / num_numbers


class Guess(Environment):
    """Turns of plain text, each answered by a hint. A secret that is not found earns 0."""

    def __init__(self, rewards: object) -> None:
        """The rewards of the task are not used: the reward follows from the guesses."""

    async def start(self, item: Item) -> Turn:
        facts = item["metadata"]
        self._secret, self._par, self._most = facts["secret"], facts["par"], facts["max_guesses"]
        self._help = f"say a number from {facts['low']} to {facts['high']}"
        self._num_guesses = 0
        return Turn(messages=messages_of(item["prompt"]), is_last=self._most == 1)

    async def step(self, answer: Answer) -> Turn | End:
        self._num_guesses += 1
        numbers = re.findall(r"\d{1,18}", answer.message.get("content") or "")
        guess = int(numbers[-1]) if numbers else None
        if guess == self._secret:
            return self._end(reward_of(self._num_guesses, self._par, self._most))
        if self._num_guesses == self._most:
            return self._end(0.0)
        reply = self._help if guess is None else hint(guess, self._secret)
        is_last = self._num_guesses == self._most - 1
        return Turn(messages=({"role": "user", "content": reply},), is_last=is_last)

    async def cut(self, reason: str) -> End:
        return self._end(0.0)

    def _end(self, reward: float) -> End:
        return End(reward=reward, facts={"guesses": self._num_guesses, "found": float(reward > 0)})
