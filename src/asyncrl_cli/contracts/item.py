"""Items, each one prompt of a dataset with a uid made from its content.

make_item("1+1=", "2", {}) == {"uid": "ae02604c3990cd98", "prompt": "1+1=", "answer": "2", "metadata": {}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from numbers import Number
from typing import Any
from uuid import UUID

from asyncrl_cli.base.errors import did_you_mean

Item = Mapping[str, Any]
"""`{"uid": str, "prompt": ChatPrompt, "answer": str | None, "metadata": {...}}`; metadata holds any Python
values of the source."""
ChatPrompt = str | Sequence[Mapping[str, str]]
"""The user's message as text, or a conversation up to the model's answer: messages with `role` and
`content`."""
PLAIN = (str, bytes, Number, type(None), date, time, timedelta, UUID)
"""Types whose `repr` identifies the value. `datetime` is a subclass of `date`; `Decimal` is registered as a
`Number`."""


class UnknownField(LookupError):
    """A field that no item has."""


class StrictFields(dict[str, Any]):
    """A mapping whose `get` refuses a name that no item has: a misspelt one would give None. `where`: how
    code reads the mapping; `known`: the names that items have."""

    where: str
    known: tuple[str, ...]

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self and name not in self.known:
            columns = f"there are {', '.join(self.known)}" if self.known else "there are none"
            otherwise = columns if self.where != "item" else 'columns are in item["metadata"]'
            meant = did_you_mean(name, [*self, *self.known], otherwise)
            raise UnknownField(f'{self.where}.get("{name:.80}"), which no item has: {meant}')
        return super().get(name, default)


def strict_item(item: Item, items: Sequence[Item]) -> Item:
    """The item, which raises UnknownField if a field is read with `get` that none of `items` has."""
    metadata, whole = StrictFields(item["metadata"]), StrictFields(item)
    metadata.where, whole.where = 'item["metadata"]', "item"
    metadata.known, whole.known = tuple(dict.fromkeys(name for one in items for name in one["metadata"])), ()
    whole["metadata"] = metadata
    return whole


def make_item(prompt: ChatPrompt, answer: str | None, metadata: Mapping[str, object]) -> Item:
    return {
        "uid": content_uid(prompt, answer),
        "prompt": prompt,
        "answer": answer,
        "metadata": dict(metadata),
    }


def content_uid(prompt: ChatPrompt, answer: str | None) -> str:
    """16 hex digits: the same item has the same uid in every run, whatever its place in the source."""
    content = hashlib.blake2b(digest_size=8)
    for text in (content_text(prompt), answer or ""):
        encoded = text.encode("utf-8", "surrogatepass")
        content.update(len(encoded).to_bytes(8, "little") + encoded)
    return content.hexdigest()


def content_text(prompt: ChatPrompt) -> str:
    """The text from which uids are made. It tells a text from a list with the same text as its only
    message."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def prompt_key(prompt: ChatPrompt) -> str:
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


def messages_of(prompt: ChatPrompt) -> tuple[Mapping[str, str], ...]:
    """The prompt as messages. A text becomes a user message."""
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)


def fingerprint(items: Iterable[Item]) -> str:
    """Digest of items in order, including everything that a reward sees of them; the same in every process.
    If it is unchanged, a saved cursor points at the same prompt, and that prompt is rewarded as before."""
    content = hashlib.blake2b(digest_size=16)
    for item in items:
        content.update(f"{item['uid']} {_canonical(item['metadata'])}\n".encode("utf-8", "surrogatepass"))
    return content.hexdigest()


def _canonical(value: object) -> str:
    """A text that is the same for equal values in every process. For objects that are not plain values only
    the type counts."""
    kind = type(value).__name__
    if type(value) in (str, float):
        return repr(value)
    if isinstance(value, Mapping):
        entries = ",".join(f"{_canonical(key)}:{_canonical(entry)}" for key, entry in value.items())
        return f"{kind}{{{entries}}}"
    if isinstance(value, (list, tuple)):
        return f"{kind}[{','.join(map(_canonical, value))}]"
    # The order of a set differs between processes, because hashes of strings do.
    if isinstance(value, (set, frozenset)):
        return f"{kind}[{','.join(sorted(map(_canonical, value)))}]"
    if type(value) is int:
        return hex(value)  # Python limits the length of decimal digits
    return repr(value) if isinstance(value, PLAIN) else kind
