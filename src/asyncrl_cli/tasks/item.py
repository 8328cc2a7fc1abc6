"""An item: one prompt of the dataset, with a uid made from its content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

Item = Mapping[str, Any]
"""`{"uid": str, "prompt": str, "answer": str | None, "metadata": {...}}`."""


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
    """Of a list of items in their order: equal fingerprints mean that a saved cursor points at the same prompt."""
    content = hashlib.blake2b(digest_size=16)
    for item in items:
        content.update(item["uid"].encode() + b"\n")
    return content.hexdigest()
