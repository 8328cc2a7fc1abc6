"""Keys of other trainers and their counterparts here, for the hints of unknown keys.

They are read from the tables of docs/coming-from.md, a page that comes with asyncrl:

    ## verl
    | there | here | what differs |
    |---|---|---|
    | `data.val_files` | `eval.sets`, `task.eval_path` | sets by name; or one file in place of the held-out prompts |
    | `data.gen_batch_size` | | groups are always admitted one by one |

Keys with the same last part and the same meaning in both are not listed: the hint names the nearest known key
anyway. A row of `section.*` is for all keys of that section that have no row of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from asyncrl_cli.profile.toml_files import shipped_directory

HEADER = "\n| there | here | what differs |\n|---|---|---|\n"
OTHERS = "Other names"
"""The section of names that belong to no trainer."""


class PeerKey(NamedTuple):
    """A key of the trainer `peer`, our keys that replace it, and a note: what differs, or why we have no such
    key."""

    peer: str
    theirs: str
    ours: tuple[str, ...]
    note: str

    def covers(self, parts: Sequence[str]) -> bool:
        """Whether this is the row of a section that the key, in `parts`, belongs to. The key may have fewer
        parts before it."""
        *section, last = self.theirs.split(".")
        return last == "*" and any(
            section[start:] == list(parts[: len(section) - start]) for start in range(len(section))
        )

    @property
    def meaning(self) -> str:
        """The end of an error's message about the key."""
        ours = " and ".join(self.ours)
        if self.peer == OTHERS:
            return f"which is {ours} here"
        return f"{self.peer}'s name for {ours}" if ours else f"which is {self.peer}'s and has no counterpart"

    @property
    def hint(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"use {' and '.join(self.ours)}{note}" if self.ours else self.note


@cache
def rows() -> tuple[PeerKey, ...]:
    """The rows of the page's tables."""
    found: list[PeerKey] = []
    page = (shipped_directory("docs") / "coming-from.md").read_text(encoding="utf-8")
    for section in page.split("\n## "):
        _, _, table = section.partition(HEADER)
        for line in table.partition("\n\n")[0].splitlines():
            theirs, ours, note = (cell.strip() for cell in line.strip("|").split("|"))
            own = tuple(ours.replace("`", "").split(", ")) if ours else ()
            found.append(PeerKey(section.partition("\n")[0], theirs.strip("`"), own, note))
    return tuple(found)


def counterpart(key: str) -> PeerKey | None:
    """The row for a key. The key may have fewer parts than in the table (`test_freq`) or more, and Hydra's
    `+` or dashes. Among several rows, the one with the most parts in common, then the first. If there is
    none, the row of its section."""
    parts = key.lstrip("+~-").replace("-", "_").split(".")
    best, most = None, 0
    for row in rows():
        theirs = row.theirs.split(".")
        shared = min(len(theirs), len(parts))
        if shared > most and theirs[-shared:] == parts[-shared:]:
            best, most = row, shared
    if most > 1 or len(parts) == 1:
        return best
    return next((row for row in rows() if row.covers(parts)), best)


def renamed(name: str) -> PeerKey | None:
    """The row for the last part of a key, if all keys of other trainers with that last part have the same
    counterpart, or none."""
    found = [row for row in rows() if row.theirs.rpartition(".")[2] == name]
    return found[0] if len({row.ours for row in found}) == 1 else None
