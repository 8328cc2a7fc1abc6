"""builtin:calculator: expressions too hard for a small model, and their solutions with a calculator of single
operations.

    prompt    47+83*65
    turns     calculate(83*65) -> 5395, calculate(47+5395) -> 5442, answer(5442)

A model has to learn to multiply first, to copy results, and to use the calculator, because its own results
are wrong. An answer is either right or wrong, so the best mean reward is 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from asyncrl_cli.contracts.environment import Message
from asyncrl_cli.contracts.item import Item, make_item
from asyncrl_cli.contracts.reward_spec import Adapter
from asyncrl_cli.profile.fields import Section

Step = tuple[str, int]
"""One operation, such as `83*65`, and its value."""
SIGNS: Mapping[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
QUESTION = "What is {}? Use the calculator for every operation, then give the answer."


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
        prompt = expression if form == "worked" else QUESTION.format(expression)
        return make_item(prompt, str(steps_of(expression)[-1][1]), {"expression": expression})

    def demonstration(self, item: Item, rng: Random) -> list[Message]:
        steps = steps_of(item["metadata"]["expression"])
        return conversation(item["prompt"], steps, steps[-1][1])

    def flawed_demonstration(self, item: Item, rng: Random) -> list[Message]:
        """A conversation with one mistake: multiplications do not come first, a step is left out, or the
        answer or one of its digits is made up. By chance, a few are still right."""
        expression = item["metadata"]["expression"]
        steps = steps_of(expression)
        value = steps[-1][1]
        mistake = rng.choice(("order", "step", "made up", "digit"))
        if mistake == "order":
            steps = steps_of(expression, first="")
            return conversation(item["prompt"], steps, steps[-1][1])
        if mistake == "step":
            known = [int(re.split(r"(?<=\d)[-+*]", expression)[0]), *(result for _, result in steps)]
            return conversation(item["prompt"], steps[:-1], known[-2])
        if mistake == "made up":
            return conversation(item["prompt"], [], rng.randrange(10 ** len(str(abs(value)))))
        digits = list(str(value))
        digits[rng.randrange(len(digits))] = str(rng.randrange(10))
        return conversation(item["prompt"], steps, int("".join(digits)))

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


def conversation(prompt: str, steps: Sequence[Step], answer: int) -> list[Message]:
    """The prompt, a call of the calculator for each step with its result, and the answer."""
    messages: list[Message] = [{"role": "user", "content": prompt}]
    for operation, result in steps:
        messages += _call("calculate", expression=operation), {"role": "tool", "content": str(result)}
    return [*messages, _call("answer", value=answer)]


def _call(tool: str, **arguments: str | int) -> Message:
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
