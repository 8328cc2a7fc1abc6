"""What the figures of metrics.jsonl mean: meanings.toml, as docs/metrics.md and reports show it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files


@cache
def meanings() -> Mapping[str, str]:
    """Names of metrics (several with blanks between them, patterns as in the file) -> what they mean, in the
    file's order."""
    return tomllib.loads(files("asyncrl_cli.observe").joinpath("meanings.toml").read_text(encoding="utf-8"))


def meaning_of(metric: str) -> str | None:
    """None for an unknown metric."""
    return next((meaning for pattern, meaning in _patterns() if pattern.fullmatch(metric)), None)


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    return [
        (re.compile("|".join(map(_pattern, names.split()))), meaning) for names, meaning in meanings().items()
    ]


def _pattern(name: str) -> str:
    alternatives = re.sub(r"\{(.*?)\}", lambda found: f"(?:{found[1].replace(',', '|')})", name)
    return re.sub(r"<\w+>", "[^/]+", alternatives)
