"""Keys of other trainers, and those that stand for them here, which are the hints of unknown keys.

They are the tables of docs/coming-from.md, a page that comes with asyncrl:

    ## verl
    | there | here | what differs |
    |---|---|---|
    | `data.val_files` | `eval.sets`, `task.eval_path` | sets by name; or one file in place of the held-out prompts |
    | `data.gen_batch_size` | | groups are always admitted one by one |

A key whose last part is the same in both, with the same meaning, is in none of them: the nearest known key is named anyway.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from asyncrl_cli.profile.toml_files import shipped_directory

HEADER = "\n| there | here | what differs |\n|---|---|---|\n"
OTHERS = "Other names"
"""The section of names that are no trainer's."""


class Row(NamedTuple):
    """A key of another trainer, our keys in its place, and what differs between them or why there is none. `peer`: the trainer."""

    peer: str
    theirs: str
    ours: tuple[str, ...]
    note: str

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
def rows() -> tuple[Row, ...]:
    """The rows of the page's tables."""
    found: list[Row] = []
    page = (shipped_directory("docs") / "coming-from.md").read_text(encoding="utf-8")
    for section in page.split("\n## "):
        _, _, table = section.partition(HEADER)
        for line in table.partition("\n\n")[0].splitlines():
            theirs, ours, note = (cell.strip() for cell in line.strip("|").split("|"))
            own = tuple(ours.replace("`", "").split(", ")) if ours else ()
            found.append(Row(section.partition("\n")[0], theirs.strip("`"), own, note))
    return tuple(found)


def counterpart(key: str) -> Row | None:
    """The row of a key, which may have fewer parts than in the table (`test_freq`) or more, and Hydra's `+` or dashes. Of several
    rows the one with most parts in common, then the first."""
    parts = key.lstrip("+~-").replace("-", "_").split(".")
    best, most = None, 0
    for row in rows():
        theirs = row.theirs.split(".")
        shared = min(len(theirs), len(parts))
        if shared > most and theirs[-shared:] == parts[-shared:]:
            best, most = row, shared
    return best
