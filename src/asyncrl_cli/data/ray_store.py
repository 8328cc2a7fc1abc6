"""Ray's object store as a `Store`. The only file of this room that knows Ray.

Each large field of a key is an object of its own, and all others share one: a consumer fetches what it
needs. Objects arrive as views of shared memory: nothing is copied before the microbatch.

The driver owns them, so they survive the worker that made them: a worker's `put` only packs, and the answer
to a call of the driver brings the objects (`shipped`) as further objects of that call. They go to the object
store, never through the driver. (On a cluster that asyncrl has not started, Ray brings those of less than
100 KB within the answer.) `ray.put` in the worker would make the worker their owner: its death would take all
groups that had ended there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError

from asyncrl_cli.base.errors import ExecutorLost, first_line
from asyncrl_cli.data.store import Piece, Store, Stored, bytes_of, is_wanted

SPLIT_BYTES = 1 << 20
"""A field of at least this size has an object of its own. (A get takes about 60 us per object, as long as the
copy of 0.3 MiB.)"""
MOST_PIECES = 8
"""Objects of one key: the largest fields have one each, all others share the last."""


class RayStore(Store):
    name = "ray"

    def _put(self, key: str, columns: Mapping[str, Any]) -> tuple[Piece, ...]:
        large = [name for name in columns if bytes_of({name: columns[name]}) >= SPLIT_BYTES]
        alone = sorted(large, key=lambda name: -columns[name].nbytes)[: MOST_PIECES - 1]
        shares = [*([name] for name in alone), [name for name in columns if name not in alone]]
        pieces = ({name: columns[name] for name in share} for share in shares if share)
        return tuple(Piece((*piece,), bytes_of(piece), piece) for piece in pieces)

    def hold(self, stored: Stored) -> None:
        pieces = tuple(
            piece._replace(content=ray.put(piece.content)) if isinstance(piece.content, dict) else piece
            for piece in stored.pieces
        )
        super().hold(stored._replace(pieces=pieces))

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
        except ObjectLostError as error:
            why = first_line(error)
            raise ExecutorLost(f"arrays were lost: {why}", executor=f"the {self.name} store") from error
        found = []
        for contents in chosen:
            columns: dict[str, Any] = {}
            for content in contents:
                columns |= next(arrived) if isinstance(content, ObjectRef) else content
            found.append({name: value for name, value in columns.items() if is_wanted(name, fields)})
        return found


def shipped(stored: Sequence[Stored], most: int) -> tuple[list[Stored], list[Any]]:
    """For the answer to a call with `most` further objects: the keys without what they have put here, and the
    objects of that, then None. Raises ValueError if they are too many."""
    objects = [content for one in stored for content in one.objects]
    if len(objects) > most:
        raise ValueError(f"{len(objects)} objects in an answer of at most {most}")
    heads = [
        one._replace(
            pieces=tuple(p._replace(content=...) if isinstance(p.content, dict) else p for p in one.pieces)
        )
        for one in stored
    ]
    return heads, [*objects, *[None] * (most - len(objects))]


def received(heads: Sequence[Stored], refs: Sequence[ObjectRef]) -> list[Stored]:
    """In the driver: the keys, with the refs of the objects that `shipped` has taken out."""
    left = iter(refs)
    return [
        one._replace(
            pieces=tuple(p._replace(content=next(left)) if p.content is ... else p for p in one.pieces)
        )
        for one in heads
    ]
