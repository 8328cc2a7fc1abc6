"""Compact prompts whose answers are worked out in writing: how `builtin:tiny` sees a reasoning-gym dataset.

A format turns a dataset entry into a short prompt, knows how a correct response is worked out, and finds the answer in
a response so that the dataset's own verifier can score it. Pure text: no model, no tensor.

    entry     Sort these numbers in ascending order: 37.0, 5.0, 12.0
    prompt    <370512=
    response  053712,051237#051237        every adjacent swap writes the list again; the answer follows `#`
    answer    [5, 37, 12] -> what score_answer is given
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, Protocol

Entry = Mapping[str, Any]
"""An entry of a reasoning-gym dataset: `question`, `answer` and `metadata`."""


class WorkedFormat(Protocol):
    """How one dataset is asked, worked out and answered in few characters."""

    alphabet: str
    """Every character that a prompt or a demonstration can hold, in the order of the tokenizer's ids."""
    default_params: Mapping[str, Any]
    """Parameters of the dataset that the format was chosen for; `task.params` overrides them one by one."""
    max_prompt_chars: int
    """Longest prompt under `default_params`."""

    def prompt(self, entry: Entry) -> str: ...

    def demonstration(self, entry: Entry, rng: Random) -> str:
        """A correct response, working and answer; `rng` chooses where several are equally good."""

    def answer(self, response: str) -> str:
        """What the verifier is given for this response; it need not be well-formed."""


class NumberSortingFormat:
    """Bubble sort in writing: `<` or `>` and two-digit numbers; each swap of the first neighbours out of order is a new list.

    The number of swaps grows with the square of the list's size and its text with the cube, so responses are
    long-tailed although list sizes are uniform. Two digits, because the verifier forgives a difference of 1.
    """

    alphabet = "0123456789<>=,#"
    default_params: Mapping[str, Any] = {
        "min_numbers": 2,
        "max_numbers": 5,
        "min_decimals": 0,
        "max_decimals": 0,
        "min_value": 0,
        "max_value": 99,
    }
    max_prompt_chars = 12

    def prompt(self, entry: Entry) -> str:
        direction = "<" if entry["metadata"]["direction"] == "ascending" else ">"
        return direction + "".join(f"{number:02d}" for number in _numbers(entry)) + "="

    def demonstration(self, entry: Entry, rng: Random) -> str:
        numbers = _numbers(entry)
        if entry["metadata"]["direction"] == "ascending":
            lists = _bubble(numbers, sign=1)
        else:
            lists = _bubble(numbers, sign=-1)
        written = ["".join(f"{number:02d}" for number in line) for line in lists]
        return ",".join(written[1:]) + "#" + written[-1]

    def answer(self, response: str) -> str:
        digits = response.rpartition("#")[2] if "#" in response else ""
        if not digits.isdecimal() or len(digits) % 2:
            return digits
        return "[" + ", ".join(str(int(digits[i : i + 2])) for i in range(0, len(digits), 2)) + "]"


def _numbers(entry: Entry) -> list[int]:
    numbers = [float(number) for number in entry["metadata"]["original_numbers"]]
    if any(number != int(number) or not 0 <= number <= 99 for number in numbers):
        raise ValueError("the worked form of number_sorting needs whole numbers from 0 to 99")
    return [int(number) for number in numbers]


def _bubble(numbers: list[int], *, sign: int) -> list[list[int]]:
    """All lists on the way from `numbers` to sorted order, each with the first neighbours out of order swapped."""
    lists = [numbers]
    while True:
        last = lists[-1]
        wrong = next((i for i in range(len(last) - 1) if sign * last[i] > sign * last[i + 1]), None)
        if wrong is None:
            return lists
        lists.append([*last[:wrong], last[wrong + 1], last[wrong], *last[wrong + 2 :]])


WORKED: Mapping[str, WorkedFormat] = {"number_sorting": NumberSortingFormat()}
"""The datasets that have a worked form, by reasoning-gym's name."""
