"""Safe output to a terminal: control sequences in names, files and error messages are shown as escapes and
never take effect.

Also the building blocks of the screen as coloured text: labels, meters, wrapped lines, blocks side by side.
"""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from asyncrl_cli.observe.format import is_number

_BIDI_AND_BREAKS = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_SHOWN = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"},
    **{code: f"\\u{code:04x}" for code in (*_BIDI_AND_BREAKS, *range(0xD800, 0xE000))},
}
_IN_ASCII = str.maketrans("━─│·…█▉▊▋▌▍▎▏▁▂▃▄▅▆▇", "=-|-.########_.-=+*#")
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
JOINT = "\N{NO-BREAK SPACE}"
LABEL = 11
"""Width of the label at the beginning of a line, in cells."""


def neutral(text: str) -> str:
    """Escape control characters (C0 except tab and newline, DEL, C1), bidirectional controls, line
    separators, lone surrogates."""
    return text.translate(_SHOWN)


def uncoloured(text: str) -> str:
    """`neutral`, with ANSI colour sequences removed instead of escaped."""
    return neutral(_COLOURS.sub("", text))


class SafeConsole(Console):
    """A console that escapes all text with `neutral` and interprets neither markup nor emoji codes: only our
    own styles become control sequences. Bars and lines are drawn in ASCII where the encoding is not UTF."""

    def __init__(self, **options: Any) -> None:
        # Some terminals say that they have 0 columns, and so do the variables there: their size is not known.
        sized = {
            name: value
            for name, value in os.environ.items()
            if name not in ("COLUMNS", "LINES") or value.strip("0")
        }
        super().__init__(highlight=False, markup=False, emoji=False, **{"_environ": sized, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        shapes = {} if "utf" in self.encoding.lower() else _IN_ASCII
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else Segment(neutral(segment.text.translate(shapes)), segment.style)
            )


@contextmanager
def key_presses() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits so many seconds for a key and returns it, or "". A key needs no Enter;
    Ctrl-C works as ever. It just waits if stdin is not our terminal, or we are in its background."""
    if not sys.stdin.isatty() or os.tcgetpgrp(keys := sys.stdin.fileno()) != os.getpgrp():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:

        def key(seconds: float) -> str:
            is_pressed = select.select([keys], [], [], seconds)[0]
            return os.read(keys, 1).decode("ascii", "replace") if is_pressed else ""

        yield key
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def label(name: str, width: int = LABEL) -> Text:
    return Text().append(f"{name[: width - 1]:<{width}}", "dim bold")


def rule(words: str, width: int) -> Text:
    return Text(words + "─" * max(0, width - len(words)), "dim")


def meter(fraction: object, width: int, style: str) -> Text:
    width = max(4, width)
    if not is_number(fraction):
        return Text("·" * width, "dim")
    filled = round(min(1.0, max(0.0, fraction)) * width)
    return Text("━" * filled, style).append("─" * (width - filled), "dim")


def strip(amounts: Mapping[str, float], styles: Mapping[str, str], width: int) -> Text:
    """Shares of a whole as coloured cells, the largest first."""
    total = sum(amounts.values())
    if total <= 0:
        return Text().append("·" * width, "dim")
    cells, reached = Text(), 0.0
    for name, amount in sorted(amounts.items(), key=lambda entry: -entry[1]):
        reached += amount
        cells.append("█" * (round(reached / total * width) - len(cells)), styles.get(name, ""))
    return cells


def beside(left: Sequence[Text], right: Sequence[Text], half: int) -> list[Text]:
    """Two blocks; the right one begins at cell `half`."""
    lines = []
    for first, second in zip_longest(left, right, fillvalue=Text()):
        line = first.copy()
        line.truncate(half - 2, pad=True)
        lines.append(line.append("  ").append_text(second))
    return lines


def flow(
    start: Text, text: str, width: int, style: str = "dim", *, max_lines: int | None = None
) -> list[Text]:
    """Append words to `start`, and continue below it, behind the labels."""
    has_room = start.cell_len + LABEL <= width
    first = " " * (start.cell_len if has_room else LABEL)
    wrapper = textwrap.TextWrapper(
        max(width, 2 * LABEL),
        first,
        " " * LABEL,
        max_lines=max_lines,
        placeholder=" ...",
        break_on_hyphens=False,
    )
    lines = [line.replace(JOINT, " ") for line in wrapper.wrap(text)]
    if has_room and lines:
        start.append(lines.pop(0)[start.cell_len :], style)
    return [start, *(Text(line, style) for line in lines)]


def joined(parts: Sequence[str], separator: str) -> str:
    """Parts of a line between which `flow` may break it, and only there."""
    return separator.join(part.replace(" ", JOINT) for part in parts)
