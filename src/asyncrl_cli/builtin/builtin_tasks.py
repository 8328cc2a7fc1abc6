"""The tasks that come with asyncrl: their items and demonstrations, looked up by name.

builtin:calculator: expressions too hard for a small model, and a calculator of single operations.

    prompt    47+83*65
    turns     calculate(83*65) -> 5395, calculate(47+5395) -> 5442, answer(5442)

A model has to learn to multiply first, to copy results, and to use the calculator (calculator.py), because
its own results are wrong. An answer is either right or wrong, so the best mean reward is 1.

builtin:guess: find a number that the environment thinks of and gives hints about.

    prompt    17-62
    turns     39 -> higher, 51 -> lower, 45 -> (found)

Par is the number of guesses in which halving finds any number of the range: 6 for these 46 numbers. A game
within par earns 1. Each further guess costs a third of that, and after two of them the game is lost and earns
0. So halving is the best play and earns 1, and luck is worth little. `best_reward` computes what the best
play earns on average.

All prompts of a task differ. The eval items depend on `task.params` only, so runs with different seeds can be
compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Annotated, ClassVar

from pydantic import Field, ValidationError, model_validator

from asyncrl_cli.base.errors import ConfigError, did_you_mean
from asyncrl_cli.contracts.environment import Adapter, Answer, End, Environment, Message, Turn
from asyncrl_cli.contracts.item import Item, make_item, messages_of, take_new
from asyncrl_cli.profile.fields import Section

MAX_TRIES_PER_PROMPT = 50
Step = tuple[str, int]
"""One operation, such as `83*65`, and its value."""
SIGNS: Mapping[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
CALCULATION = "What is {}? Use the calculator for every operation, then give the answer."
HIGHER, LOWER = "higher", "lower"
GAME = (
    "I think of a whole number from {} to {}. Guess it: say a number, and I say whether mine is "
    "higher or lower."
)


class Arithmetic(Section):
    """Draws items and writes conversations that solve them. Operation counts, operands and signs are drawn
    uniformly."""

    environment: ClassVar = "asyncrl_cli.builtin.calculator:Calculator"
    words: ClassVar = ("calculate expression=", "answer value=", "thanks")
    min_operations: Annotated[int, Field(ge=1, le=16)] = 1
    max_operations: Annotated[int, Field(ge=1, le=16)] = 3
    max_number: Annotated[int, Field(ge=9, le=999_999)] = 99

    @model_validator(mode="after")
    def _ordered(self) -> Arithmetic:
        if self.min_operations > self.max_operations:
            raise ValueError("max_operations must be >= min_operations")
        return self

    def draw(self, rng: Random, form: Adapter) -> Item:
        parts = [str(rng.randint(2, self.max_number))]
        for _ in range(rng.randint(self.min_operations, self.max_operations)):
            parts += rng.choice(list(SIGNS)), str(rng.randint(2, self.max_number))
        expression = "".join(parts)
        prompt = expression if form == "worked" else CALCULATION.format(expression)
        return make_item(prompt, str(steps_of(expression)[-1][1]), {"expression": expression})

    def demonstration(self, item: Item, rng: Random) -> list[Message]:
        steps = steps_of(item["metadata"]["expression"])
        return solution(item["prompt"], steps, steps[-1][1])

    def flawed_demonstration(self, item: Item, rng: Random) -> list[Message]:
        """A conversation with one mistake: multiplications do not come first, a step is left out, or the
        answer or one of its digits is made up. By chance, a few are still right."""
        expression = item["metadata"]["expression"]
        steps = steps_of(expression)
        value = steps[-1][1]
        mistake = rng.choice(("order", "step", "made up", "digit"))
        if mistake == "order":
            steps = steps_of(expression, first="")
            return solution(item["prompt"], steps, steps[-1][1])
        if mistake == "step":
            known = [int(re.split(r"(?<=\d)[-+*]", expression)[0]), *(result for _, result in steps)]
            return solution(item["prompt"], steps[:-1], known[-2])
        if mistake == "made up":
            return solution(item["prompt"], [], rng.randrange(10 ** len(str(abs(value)))))
        digits = list(str(value))
        digits[rng.randrange(len(digits))] = str(rng.randrange(10))
        return solution(item["prompt"], steps, int("".join(digits)))

    def ceiling(self, items: Sequence[Item]) -> float:
        return 1.0


def steps_of(expression: str, first: str = "*") -> list[Step]:
    """The operations that compute `expression`, in order: those with the sign `first`, then the others, from
    left to right."""
    numbers = [int(number) for number in re.findall(r"\d+", expression)]
    signs = re.findall(r"[-+*]", expression)
    steps: list[Step] = []
    while signs:
        place = signs.index(first) if first in signs else 0
        left, sign, right = numbers[place], signs.pop(place), numbers.pop(place + 1)
        numbers[place] = SIGNS[sign](left, right)
        steps.append((f"{left}{sign}{right}", numbers[place]))
    return steps


def solution(prompt: str, steps: Sequence[Step], answer: int) -> list[Message]:
    """The prompt, a call of the calculator for each step with its result, and the answer."""

    def call(tool: str, **arguments: str | int) -> Message:
        called = {"type": "function", "function": {"name": tool, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [called]}

    messages: list[Message] = [{"role": "user", "content": prompt}]
    for operation, result in steps:
        messages += call("calculate", expression=operation), {"role": "tool", "content": str(result)}
    return [*messages, call("answer", value=answer)]


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
        prompt = f"{low}-{high}" if form == "worked" else GAME.format(low, high)
        game = {"low": low, "high": high, "secret": secret, "par": par_of(num)}
        return make_item(prompt, str(secret), game | {"max_guesses": par_of(num) + self.spare_guesses})

    def demonstration(self, item: Item, rng: Random) -> list[Message]:
        """Every guess halves the remaining range."""
        return game_of(item, lambda low, high: (low + high) // 2)

    def flawed_demonstration(self, item: Item, rng: Random) -> list[Message]:
        """Every guess is the lowest remaining number, or every guess is the highest. Guesses are not random:
        the gradient of a model that has learned to guess at random would be noise."""
        return game_of(item, rng.choice((lambda low, high: low, lambda low, high: high)))

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


def game_of(item: Item, guess: Callable[[int, int], int]) -> list[Message]:
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


Builtin = Arithmetic | Guessing
"""A task's fields are its parameters. It draws items, whose prompts may repeat, and writes a correct and a
flawed demonstration of each. `environment`: the one that plays its episodes. `words`: texts for which
builtin:tiny gets a token each. `ceiling(items)`: the mean reward of the best play."""
BUILTIN: Mapping[str, type[Builtin]] = {"calculator": Arithmetic, "guess": Guessing}
"""By the name in `task.source = "builtin:<name>"`."""


def builtin_task(name: str, params: Mapping[str, object]) -> Builtin:
    """The builtin task of this name. Raises ConfigError if there is none, or if `params` are wrong."""
    if name not in BUILTIN:
        known = did_you_mean(name, BUILTIN, f"builtin tasks: {', '.join(BUILTIN)}")
        raise ConfigError(f'task.source: there is no task "builtin:{name}"', hint=known)
    kind = BUILTIN[name]
    if unknown := [key for key in params if key not in kind.model_fields]:
        known = did_you_mean(unknown[0], kind.model_fields, f"it has: {', '.join(kind.model_fields)}")
        why = f'task.params.{unknown[0]}: the task "builtin:{name}" has no such parameter'
        raise ConfigError(why, hint=known)
    try:
        return kind.model_validate(params)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["task.params", *map(str, first["loc"])])
        given = f" = {first['input']!r:.80}" if first["loc"] else ""
        why = first["msg"].removeprefix("Value error, ").lower()
        defaults = ", ".join(f"{key} = {field.default}" for key, field in kind.model_fields.items())
        hint = f"parameters and their defaults: {defaults}"
        raise ConfigError(f"{where}{given}: {why} (builtin:{name})", hint=hint) from None


def drawn(task: Builtin, name: str, form: Adapter, stream: str, num: int, taken: set[str]) -> list[Item]:
    """`num` items whose prompts differ from each other and from `taken`; their prompts are added to `taken`.

    Raises ConfigError if the task does not produce that many.
    """
    rng, most = Random(f"builtin:{name} {stream}"), MAX_TRIES_PER_PROMPT * num
    found, num_tries = take_new((task.draw(rng, form) for _ in range(most)), num, taken)
    if len(found) < num:
        made = f"made only {len(found)} of {num} new prompts in {num_tries:,} tries"
        hint = "widen task.params, or lower task.train_prompts or eval.prompts"
        raise ConfigError(f"builtin:{name} with these parameters {made}", hint=hint)
    return found
