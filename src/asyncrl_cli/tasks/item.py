"""An item: one prompt of the dataset, with a uid made from its content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta
from numbers import Number
from typing import Any
from uuid import UUID

Item = Mapping[str, Any]
"""`{"uid": str, "prompt": str, "answer": str | None, "metadata": {...}}`; metadata holds whatever Python values a source has."""

PLAIN = (str, bytes, Number, type(None), date, time, timedelta, UUID)
"""Values that `repr` tells apart. A `datetime` is a `date`, a `Decimal` a `Number`."""


def make_item(prompt: str, answer: str | None, metadata: Mapping[str, Any]) -> Item:
    return {"uid": content_uid(prompt, answer), "prompt": prompt, "answer": answer, "metadata": dict(metadata)}


def content_uid(prompt: str, answer: str | None) -> str:
    """16 hex digits: the same item has the same uid in every run, whatever its place in the source."""
    content = hashlib.blake2b(digest_size=8)
    for text in (prompt, answer or ""):
        encoded = text.encode("utf-8", "surrogatepass")
        content.update(len(encoded).to_bytes(8, "little") + encoded)
    return content.hexdigest()


def fingerprint(items: Iterable[Item]) -> str:
    """Of a list of items in their order, with all that a reward sees of them: equal fingerprints mean that a saved cursor points
    at the same prompt, and that it is rewarded as before. The same in every process."""
    content = hashlib.blake2b(digest_size=16)
    for item in items:
        content.update(f"{item['uid']} {_canonical(item['metadata'])}\n".encode("utf-8", "surrogatepass"))
    return content.hexdigest()


def _canonical(value: Any) -> str:
    """Equal values give equal texts, whatever the process. Of an object that is no plain value only its type counts."""
    kind = type(value).__name__
    if type(value) in (str, float):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{kind}{{{','.join(f'{_canonical(key)}:{_canonical(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"{kind}[{','.join(map(_canonical, value))}]"
    if isinstance(value, (set, frozenset)):  # strings hash differently in each process, and order sets
        return f"{kind}[{','.join(sorted(map(_canonical, value)))}]"
    if type(value) is int:
        return hex(value)  # decimal digits are limited in number
    return repr(value) if isinstance(value, PLAIN) else kind
