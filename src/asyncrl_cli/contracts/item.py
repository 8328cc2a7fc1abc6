"""Items, each one prompt of a dataset with a uid made from its content; and the worked form of prompts, for
`builtin:tiny`.

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

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from numbers import Number
from random import Random
from typing import Any
from uuid import UUID

Item = Mapping[str, Any]
"""`{"uid": str, "prompt": Prompt, "answer": str | None, "metadata": {...}}`; metadata holds any Python values
of the source."""
Prompt = str | Sequence[Mapping[str, str]]
"""The user's message as text, or a conversation up to the model's answer: messages with `role` and
`content`."""
PLAIN = (str, bytes, Number, type(None), date, time, timedelta, UUID)
"""Types whose `repr` identifies the value. `datetime` is a subclass of `date`; `Decimal` is registered as a
`Number`."""
DIGITS = "0123456789ab"
Entry = Mapping[str, Any]
"""An entry of a reasoning-gym dataset: `question`, `answer` and `metadata`."""


def make_item(prompt: Prompt, answer: str | None, metadata: Mapping[str, Any]) -> Item:
    return {
        "uid": content_uid(prompt, answer),
        "prompt": prompt,
        "answer": answer,
        "metadata": dict(metadata),
    }


def content_uid(prompt: Prompt, answer: str | None) -> str:
    """16 hex digits: the same item has the same uid in every run, whatever its place in the source."""
    content = hashlib.blake2b(digest_size=8)
    for text in (content_text(prompt), answer or ""):
        encoded = text.encode("utf-8", "surrogatepass")
        content.update(len(encoded).to_bytes(8, "little") + encoded)
    return content.hexdigest()


def content_text(prompt: Prompt) -> str:
    """The text from which uids are made. It tells a text from a list with the same text as its only
    message."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def prompt_key(prompt: Prompt) -> str:
    """The same for prompts that a model sees as the same: a text, and a list with this text as the user's
    only message. Space around a message does not count, because many chat templates strip it."""
    return json.dumps(
        [{**message, "content": message["content"].strip()} for message in messages_of(prompt)],
        sort_keys=True,
    )


def take_new(items: Iterator[Item], num: int, taken: set[str]) -> tuple[list[Item], int]:
    """The next `num` items (fewer if there are no more) whose prompts differ from each other and from
    `taken`; and how many items were looked at. Adds the prompts to `taken`."""
    found, num_seen = list[Item](), 0
    while len(found) < num and (item := next(items, None)) is not None:
        num_seen += 1
        if (key := prompt_key(item["prompt"])) not in taken:
            taken.add(key)
            found.append(item)
    return found, num_seen


def messages_of(prompt: Prompt) -> tuple[Mapping[str, str], ...]:
    """The prompt as messages. A text becomes a user message."""
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)


def fingerprint(items: Iterable[Item]) -> str:
    """Digest of items in order, including everything that a reward sees of them; the same in every process.
    If it is unchanged, a saved cursor points at the same prompt, and that prompt is rewarded as before."""
    content = hashlib.blake2b(digest_size=16)
    for item in items:
        content.update(f"{item['uid']} {_canonical(item['metadata'])}\n".encode("utf-8", "surrogatepass"))
    return content.hexdigest()


def _canonical(value: Any) -> str:
    """A text that is the same for equal values in every process. For objects that are not plain values only
    the type counts."""
    kind = type(value).__name__
    if type(value) in (str, float):
        return repr(value)
    if isinstance(value, Mapping):
        return (
            f"{kind}{{{','.join(f'{_canonical(key)}:{_canonical(entry)}' for key, entry in value.items())}}}"
        )
    if isinstance(value, (list, tuple)):
        return f"{kind}[{','.join(map(_canonical, value))}]"
    # string hashes, and so the order of sets, differ between processes
    if isinstance(value, (set, frozenset)):
        return f"{kind}[{','.join(sorted(map(_canonical, value)))}]"
    if type(value) is int:
        return hex(value)  # Python limits the length of decimal digits
    return repr(value) if isinstance(value, PLAIN) else kind


class NumberSortingFormat:
    """Bubble sort in writing. A prompt is `<` or `>` and one character per number; every swap of neighbours
    writes a new list.

    The number of swaps grows with the square of the list's size and its text with the cube, so responses are
    long-tailed although list sizes are uniform. Twelve values, because with ten there are too few short
    lists.
    """

    default_params: Mapping[str, Any] = {
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
