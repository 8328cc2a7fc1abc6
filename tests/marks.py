"""Which of many like cases are for `-m "not slow"`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(every: int, values: Iterable[Any]) -> list[Any]:
    """For `parametrize`: the first of every `every` values as it is, the others marked slow."""
    return [
        pytest.param(value, marks=[pytest.mark.slow] if place % every else [])
        for place, value in enumerate(values)
    ]
