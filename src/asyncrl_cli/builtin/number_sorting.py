"""The worked form of prompts, for `builtin:tiny`.

In the worked form prompts are compact, and responses write out their working before the answer. A format
turns a dataset's entry into such a prompt, writes a correct response, and tells whether a response is
correct. Pure text: no model, no tensor.

    entry     Sort these numbers in ascending order: 11.0, 5.0, 2.0
    prompt    <b52=
    response  5b2,52b,25b        every swap of neighbours writes the list again; the last list is the answer
    right     25b                the only correct last list
    answer    [2, 5, 11]         what the dataset's own verifier is given, if task.reward = "dataset"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from asyncrl_cli.contracts.item import Item

DIGITS = "0123456789ab"
Entry = Mapping[str, Any]
"""An entry of a reasoning-gym dataset: `question`, `answer` and `metadata`."""


class NumberSortingFormat:
    """Bubble sort in writing. A prompt is `<` or `>` and one character per number; every swap of neighbours
    writes a new list.

    The number of swaps grows with the square of the list's size and its text with the cube, so responses are
    long-tailed although list sizes are uniform. Twelve values, because with ten there are too few short
    lists.
    """

    default_params: Mapping[str, int] = {
        "min_numbers": 2,
        "max_numbers": 5,
        "min_decimals": 0,
        "max_decimals": 0,
        "min_value": 0,
        "max_value": 11,
    }
    """Each key in `task.params` overrides one of them."""

    def prompt(self, entry: Entry) -> str:
        direction = "<" if _sign(entry) > 0 else ">"
        return direction + _text(_numbers(entry)) + "="

    def demonstration(self, item: Item, rng: Random) -> str:
        """A correct response, working and answer."""
        entry = item["metadata"]["entry"]
        return _written(_bubble(_numbers(entry), sign=_sign(entry)))

    def flawed_demonstration(self, item: Item, rng: Random) -> str:
        """A wrong response: it stops before the list is sorted, or miscopies a number of a list that is
        sorted already."""
        entry = item["metadata"]["entry"]
        lists = _bubble(_numbers(entry), sign=_sign(entry))
        if len(lists) > 1:
            return _written(lists[: rng.randrange(1, len(lists))])
        miscopied = list(lists[0])
        miscopied[rng.randrange(len(miscopied))] = rng.randrange(len(DIGITS))
        return _text(miscopied)

    def answer(self, response: str) -> str:
        """The response's answer in the form that the dataset's verifier reads. The response may be
        malformed."""
        digits = response.rpartition(",")[2]
        if not all(digit in DIGITS for digit in digits):
            return digits
        return "[" + ", ".join(str(DIGITS.index(digit)) for digit in digits) + "]"

    def is_correct(self, response: str, entry: Entry) -> bool:
        """Whether the last list is exactly right; number_sorting's own verifier also accepts numbers that are
        off by 1."""
        return response.rpartition(",")[2] == _text(sorted(_numbers(entry), reverse=_sign(entry) < 0))


def _numbers(entry: Entry) -> list[int]:
    numbers = [float(number) for number in entry["metadata"]["original_numbers"]]
    if any(number != int(number) or not 0 <= number < len(DIGITS) for number in numbers):
        limits = f"whole numbers from 0 to {len(DIGITS) - 1}"
        raise ValueError(
            f'the worked form of number_sorting needs {limits}; task.adapter = "plain" takes others'
        )
    return [int(number) for number in numbers]


def _sign(entry: Entry) -> int:
    return 1 if entry["metadata"]["direction"] == "ascending" else -1


def _text(numbers: Sequence[int]) -> str:
    return "".join(DIGITS[number] for number in numbers)


def _written(lists: Sequence[Sequence[int]]) -> str:
    """All lists but the first, which the prompt shows already; the first one if there is no other."""
    return ",".join(_text(numbers) for numbers in (lists[1:] or lists))


def _bubble(numbers: Sequence[int], *, sign: int) -> list[list[int]]:
    """All lists from `numbers` to sorted order. Each swaps the first out-of-order neighbours of the one
    before it."""
    lists = [list(numbers)]
    while True:
        last = lists[-1]
        wrong = next((i for i in range(len(last) - 1) if sign * last[i] > sign * last[i + 1]), None)
        if wrong is None:
            return lists
        lists.append([*last[:wrong], last[wrong + 1], last[wrong], *last[wrong + 2 :]])


WORKED: Mapping[str, NumberSortingFormat] = {"number_sorting": NumberSortingFormat()}
"""The datasets that have a worked form, by reasoning-gym's name."""
