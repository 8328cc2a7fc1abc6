"""How people are told the names of tensors: the first few, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence

NAMES_SHOWN = 3


def first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more}"
