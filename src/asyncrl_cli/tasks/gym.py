"""Prompts from reasoning-gym: checks a dataset's name and parameters, and makes its entries. At the end: the
worked form of prompts, for `builtin:tiny`.

Only processes of their own import reasoning_gym: it takes one to two seconds (sympy, matplotlib, every
dataset), and some datasets iterate over sets of strings or draw from the global generator, so the same seed
gives different entries in different processes. The process that makes prompts fixes the hash seed and the
global generator, because a resumed run must find the prompts that it began with.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from random import Random
from typing import Any, Protocol, get_type_hints

from asyncrl_cli.base.child_process import ChildFailed, call_once
from asyncrl_cli.base.errors import ConfigError, did_you_mean
from asyncrl_cli.contracts.environment import RewardSpec
from asyncrl_cli.contracts.item import Item, make_item, take_new

SET_ELSEWHERE = {"seed": "run.seed", "size": "task.train_prompts"}
GENERATE_TIMEOUT_S = 600.0
MAX_TRIES_PER_PROMPT = 50
MIN_TRIES = 500
Entry = Mapping[str, Any]
"""An entry of a reasoning-gym dataset: `question`, `answer` and `metadata`."""


class Dataset(Protocol):
    def __getitem__(self, index: int) -> Entry: ...

    def score_answer(self, answer: str, entry: Entry) -> float: ...


def make_dataset(name: str, params: Mapping[str, object], *, seed: int, size: int) -> Dataset:
    """The dataset with these parameters. Raises a ConfigError that names the nearest datasets if there is
    none of this name, or the wrong parameter and why it is wrong."""
    # Imported late: processes that only use the worked form start faster without.
    import reasoning_gym.composite  # noqa: F401  (registers one more dataset)
    from pydantic import TypeAdapter, ValidationError
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        nearest = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(nearest)}" if nearest else f"one of: {', '.join(sorted(DATASETS))}"
        raise ConfigError(f'task.source: reasoning-gym has no dataset "{name}"', hint=hint)
    dataset_class, config_class = DATASETS[name]
    hints = get_type_hints(config_class)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(config_class) if field.init}
    checked = dict[str, object]()
    for key, value in params.items():
        if key in SET_ELSEWHERE:
            raise ConfigError(f"task.params.{key} cannot be set", hint=f"{SET_ELSEWHERE[key]} sets it")
        if key not in kinds:
            known = sorted(set(kinds) - set(SET_ELSEWHERE))
            hint = did_you_mean(key, known, f"it has: {', '.join(known)}")
            raise ConfigError(f'task.params.{key}: dataset "{name}" has no such parameter', hint=hint)
        # Numbers and texts must have exactly the right type; containers may come as TOML's lists and tables.
        is_strict = kinds[key] in (int, float, str, bool)
        try:
            checked[key] = TypeAdapter(kinds[key]).validate_python(value, strict=is_strict)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].lower()
            why = f'task.params.{key} = {value!r}: {reason} (dataset "{name}")'
            kind = getattr(kinds[key], "__name__", kinds[key])
            raise ConfigError(why, hint=f"its type in the dataset's configuration is {kind}") from error
    checked |= {key: value for key, value in (("seed", seed), ("size", size)) if key in kinds}
    try:
        dataset: Dataset = dataset_class(config_class(**checked))
        return dataset
    except Exception as error:  # reasoning-gym's configurations check with assert and raise anything
        raise _refused_params(name, params, error) from error


def _refused_params(name: str, params: Mapping[str, object], error: Exception) -> ConfigError:
    """An error that names the parameters mentioned in the dataset's own error, or all that were given if it
    mentions none."""
    reason = str(error) or type(error).__name__
    named = [key for key in params if key in reason] or list(params)
    given = ", ".join(f"task.params.{key} = {params[key]!r}" for key in named)
    hint = "change task.params; parameters that are not given there have the dataset's defaults"
    return ConfigError(f'dataset "{name}" refuses {given or "its default parameters"}: {reason}', hint=hint)


def make_entries(spec: RewardSpec, num_prompts: Mapping[str, int]) -> dict[str, list[Item]]:
    """Items of the reward's dataset: `num_prompts[stream]` of them for each stream, with their entries as
    metadata.

    A stream is an independent, reproducible sequence; no prompt is in two of them. Raises ConfigError for
    wrong parameters, or if the dataset has too few prompts.
    """
    try:
        return call_once(_made, spec, num_prompts, timeout_s=GENERATE_TIMEOUT_S, PYTHONHASHSEED="0")
    except ChildFailed as failure:
        hint = "change task.params, or lower task.train_prompts or eval.prompts"
        why = f'dataset "{spec.dataset}" cannot make its prompts: {failure}'
        raise ConfigError(why, hint=hint) from failure


def _made(spec: RewardSpec, num_prompts: Mapping[str, int]) -> dict[str, list[Item]]:
    """`make_entries`, in the child."""
    random.seed(0)  # some datasets draw from the global generator
    taken: set[str] = set()
    return {stream: _distinct(spec, stream, num, taken) for stream, num in num_prompts.items()}


def _distinct(spec: RewardSpec, stream: str, num: int, taken: set[str]) -> list[Item]:
    """`num` items whose prompts differ from each other and from `taken`; their prompts are added to `taken`.

    Raises ConfigError with the numbers if the dataset keeps repeating itself.
    """
    found, num_tries = list[Item](), 0
    for chunk in count():
        seed = stream_seed(spec.dataset, spec.params, f"{stream}/{chunk}")
        more, num_seen = take_new(_items(spec, seed, max(num, MIN_TRIES)), num - len(found), taken)
        found, num_tries = found + more, num_tries + num_seen
        if len(found) == num:
            break
        if not more or num_tries > MAX_TRIES_PER_PROMPT * num:
            key = "eval.prompts" if stream == "eval" else "task.train_prompts"
            raise ConfigError(
                f'dataset "{spec.dataset}" with these parameters made only {len(found)} of {num} new prompts '
                f"for {key} in {num_tries} tries ({len(taken)} distinct ones in all, "
                "train and eval together)",
                hint=f"lower {key}, or widen task.params",
            )
    return found


def stream_seed(name: str, params: Mapping[str, object], stream: str) -> int:
    """The seed of a stream. A dataset makes item i from seed + i, so seeds must lie far apart, or two streams
    share items."""
    content = json.dumps([name, params, stream], sort_keys=True, default=repr)
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little") % 2**31


def _items(spec: RewardSpec, seed: int, size: int) -> Iterator[Item]:
    dataset = make_dataset(spec.dataset, spec.params, seed=seed, size=size)
    for index in range(size):
        try:
            entry = dataset[index]
            prompt = str(entry["question"]) if spec.adapter == "plain" else WORKED[spec.dataset].prompt(entry)
        except IndexError:  # some datasets have a finite stock, smaller than `size`
            return
        except Exception as error:  # each dataset's own code
            raise _refused_params(spec.dataset, spec.params, error) from error
        yield make_item(prompt, entry["answer"], {"entry": entry})


DIGITS = "0123456789ab"


class NumberSortingFormat:
    """Bubble sort in writing: prompts are compact, and responses write out their working before the answer.

        entry     Sort these numbers in ascending order: 11.0, 5.0, 2.0
        prompt    <b52=
        response  5b2,52b,25b     every swap of neighbours writes the list again; the last list is the answer
        right     25b             the only correct last list
        answer    [2, 5, 11]      what the dataset's own verifier is given, if task.reward = "dataset"

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
