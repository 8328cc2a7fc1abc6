"""Entries of a reasoning-gym dataset, all with different prompts, made in a process of their own.

Some datasets iterate over sets of
strings or draw from the global generator, so that the same seed gives other entries in another process: this one
fixes both. A resumed run must find the prompts that it began with.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.tasks.child import ChildFailed, call_once
from asyncrl_cli.tasks.gym import make_dataset, refused_params
from asyncrl_cli.tasks.item import Item, make_item
from asyncrl_cli.tasks.scoring import Adapter
from asyncrl_cli.tasks.worked import WORKED, Entry

GENERATE_TIMEOUT_S = 600.0
MAX_TRIES_PER_PROMPT = 50
MIN_TRIES = 500

Made = list[Item]
"""With the entry that an item was made from as its metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`num_prompts` by stream: an independent, reproducible sequence of entries. Streams share no prompt."""

    dataset: str
    params: Mapping[str, Any]
    adapter: Adapter
    num_prompts: Mapping[str, int]


def make_entries(order: Order) -> dict[str, Made]:
    """By stream. Raises what is wrong with the order, ConfigError mostly."""
    try:
        return cast(dict[str, Made], call_once(_made, order, timeout_s=GENERATE_TIMEOUT_S, PYTHONHASHSEED="0"))
    except ChildFailed as failure:
        raise ConfigError(f'dataset "{order.dataset}" cannot make its prompts: {failure}') from failure


def _made(order: Order) -> dict[str, Made]:
    """In the child."""
    random.seed(0)  # some draw from the global generator
    taken: set[str] = set()
    return {stream: _distinct(order, stream, taken) for stream in order.num_prompts}


def _distinct(order: Order, stream: str, taken: set[str]) -> Made:
    """Entries whose prompts differ from each other and from `taken`, which grows by them.

    ConfigError with the numbers if the dataset keeps repeating itself.
    """
    found: Made = []
    num = order.num_prompts[stream]
    num_tries, chunk, chunk_size = 0, 0, max(num, MIN_TRIES)
    while len(found) < num:
        num_found_before = len(found)
        for prompt, entry in _entries(order, stream_seed(order.dataset, order.params, f"{stream}/{chunk}"), chunk_size):
            num_tries += 1
            if prompt not in taken:
                taken.add(prompt)
                found.append(make_item(prompt, entry["answer"], {"entry": entry}))
                if len(found) == num:
                    return found
        if len(found) == num_found_before or num_tries > MAX_TRIES_PER_PROMPT * num:
            raise _too_few(order.dataset, stream, num, len(found), len(taken), num_tries)
        chunk += 1
    return found


def stream_seed(name: str, params: Mapping[str, Any], stream: str) -> int:
    """Item i of a dataset is made from seed + i: seeds must lie far apart, or two streams share their items."""
    content = json.dumps([name, params, stream], sort_keys=True, default=repr)
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little") % 2**31


def _entries(order: Order, seed: int, size: int) -> Iterator[tuple[str, Entry]]:
    dataset = make_dataset(order.dataset, order.params, seed=seed, size=size)
    for index in range(size):
        try:
            entry = dataset[index]
            prompt = str(entry["question"]) if order.adapter == "plain" else WORKED[order.dataset].prompt(entry)
        except IndexError:  # fewer than its size, as some datasets of a finite stock have
            return
        except Exception as error:
            raise refused_params(order.dataset, order.params, error) from error
        yield prompt, entry


def _too_few(name: str, stream: str, num: int, num_found: int, num_distinct: int, num_tries: int) -> ConfigError:
    key = "eval.prompts" if stream == "eval" else "task.train_prompts"
    return ConfigError(
        f'dataset "{name}" with these parameters made only {num_found} of {num} new prompts for {key} in {num_tries} '
        f"tries ({num_distinct} distinct ones in all, train and eval together)",
        hint=f"lower {key}, or widen task.params",
    )
