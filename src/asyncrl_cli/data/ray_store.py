"""Ray's object store as a `Store`. The only file of this room that knows Ray.

A key's data is one object or, above `SPLIT_BYTES`, one for each field, so that a consumer fetches what it
needs. Objects arrive as views of shared memory: nothing is copied before the microbatch.

The driver owns them, so they survive the worker that made them: a worker's `put` only packs, and the answer
to a call of the driver brings the objects (`shipped`) as further objects of that call. Those of more than 100
KB go to the object store, never through the driver; smaller ones Ray brings within the answer. (`ray.put` in
the worker would make the worker their owner: its death would take all groups that had ended there.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError

from asyncrl_cli.data.store import Piece, Store, Stored, bytes_of, is_wanted

SPLIT_BYTES = 1 << 20


class RayStore(Store):
    name = "ray"

    def _put(self, key: str, columns: Mapping[str, Any]) -> tuple[Piece, ...]:
        whole = Piece((*columns,), bytes_of(columns), dict(columns))
        if whole.num_bytes < SPLIT_BYTES:
            return (whole,)
        return tuple(
            Piece((name,), bytes_of(column), column)
            for name, column in ((name, {name: value}) for name, value in columns.items())
        )

    def _get(self, stored: Sequence[Stored], fields: frozenset[str] | None) -> list[dict[str, Any]]:
        chosen = [
            [piece.content for piece in one.pieces if any(is_wanted(name, fields) for name in piece.names)]
            for one in stored
        ]
        refs = [content for content in chain.from_iterable(chosen) if isinstance(content, ObjectRef)]
        try:
            arrived = iter(ray.get(refs, timeout=self.limit_s))
        except GetTimeoutError:
            raise self.late("the get", len(stored)) from None
        found = []
        for contents in chosen:
            columns: dict[str, Any] = {}
            for content in contents:
                columns |= next(arrived) if isinstance(content, ObjectRef) else content
            found.append({name: value for name, value in columns.items() if is_wanted(name, fields)})
        return found

    def _drop(self, keys: Sequence[str]) -> None:
        pass


def shipped(stored: Sequence[Stored], most: int) -> tuple[list[Stored], list[Any]]:
    """For the answer to a call with `most` further objects: the keys without what they have put here, and the
    objects of that, then None. Raises ValueError if they are too many."""
    objects = [piece.content for one in stored for piece in one.pieces if isinstance(piece.content, dict)]
    if len(objects) > most:
        raise ValueError(f"{len(objects)} objects in an answer of at most {most}")
    heads = [
        one._replace(
            pieces=tuple(p._replace(content=None) if isinstance(p.content, dict) else p for p in one.pieces)
        )
        for one in stored
    ]
    return heads, [*objects, *[None] * (most - len(objects))]


def received(heads: Sequence[Stored], refs: Sequence[ObjectRef]) -> list[Stored]:
    """In the driver: the keys, with the refs of their objects."""
    left = iter(refs)
    return [
        one._replace(
            pieces=tuple(p._replace(content=next(left)) if p.content is None else p for p in one.pieces)
        )
        for one in heads
    ]
