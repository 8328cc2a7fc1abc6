"""Draws docs/pictures/screen.svg: the screen of a real run, once it has come to a train step.

asyncrl train --profile partial-rollout --name first          # in another terminal
python -m docs.make.screen runs/first 60
"""

from __future__ import annotations

import io
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.observe.render import render
from asyncrl_cli.observe.run_status import read_status

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "screen.svg"
WIDTH, HEIGHT = 104, 40


def main(run: Path, step: int) -> None:
    while True:
        with suppress(AsyncrlError):  # it starts, or is between two attempts
            status = read_status(str(run), run.parent).status
            if status.phase == "running" and status.progress.step >= step:
                break
        time.sleep(1)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(render(status, width=WIDTH, height=HEIGHT))
    picture = console.export_svg(title=f"asyncrl train --profile {status.profile}", theme=MONOKAI)
    # nothing from elsewhere
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), encoding="utf-8")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
