"""A data store within one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl_cli.data.store import Piece, Store, Stored, bytes_of, is_wanted


class LocalStore(Store):
    name = "local"

    def _put(self, key: str, columns: Mapping[str, Any]) -> tuple[Piece, ...]:
        return (Piece((*columns,), bytes_of(columns), dict(columns)),)

    def _get(self, stored: Sequence[Stored], fields: frozenset[str] | None) -> list[dict[str, Any]]:
        found = []
        for one in stored:
            everything = {name: value for piece in one.pieces for name, value in piece.content.items()}
            found.append({name: value for name, value in everything.items() if is_wanted(name, fields)})
        return found
