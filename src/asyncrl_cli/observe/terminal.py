"""The way to a terminal: what comes from files, names and errors may hold control sequences. They are shown, never obeyed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_BIDI_AND_BREAKS = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_SHOWN = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"},
    **{code: f"\\u{code:04x}" for code in (*_BIDI_AND_BREAKS, *range(0xD800, 0xE000))},
}
_IN_ASCII = str.maketrans("━─│·…█▉▊▋▌▍▎▏▁▂▃▄▅▆▇", "=-|-.########_.-=+*#")
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def neutral(text: str) -> str:
    """As escapes: control characters (C0 but tab and newline, DEL, C1), those that turn text's direction, lone surrogates."""
    return text.translate(_SHOWN)


def uncoloured(text: str) -> str:
    """Neutral, and without the colours that programs give their logs."""
    return neutral(_COLOURS.sub("", text))


class SafeConsole(Console):
    """A console whose texts are neutral, and neither markup nor emoji codes: only our own styles become sequences. Where it cannot
    show bars and lines, it draws them in ASCII."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        shapes = {} if "utf" in self.encoding.lower() else _IN_ASCII
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(neutral(segment.text.translate(shapes)), segment.style)
