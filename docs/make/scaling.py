"""Writes docs/pictures/scaling.svg: the chart of a page of `asyncrl tune --scale`, as a file of its own.

    asyncrl tune verl-7b-math --scale 32,64,128,256,512 --out scaling.html
    python -m docs.make.scaling scaling.html

The page's colours follow its reader's; grey is legible on any.
"""

from __future__ import annotations

import sys
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "scaling.svg"
LOOK = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13"'


def main() -> None:
    page = Path(sys.argv[1]).read_text(encoding="utf-8")
    drawing = page[page.index("<svg viewBox") : page.index("</svg>", page.index("<svg viewBox"))]
    drawing = drawing.replace("<svg", f"<svg {LOOK}", 1).replace("currentColor", "#808080")
    PICTURE.write_text(f"{drawing}</svg>\n", encoding="utf-8")


if __name__ == "__main__":
    main()
