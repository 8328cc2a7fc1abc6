"""The live screen. Rich draws the newest status in a thread of its own, so that a slow terminal never holds up the loop."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from asyncrl_cli.observe.plain import Plain
from asyncrl_cli.observe.render import render, render_summary
from asyncrl_cli.observe.sinks import Sink
from asyncrl_cli.observe.status import RunStatus, StillStarting
from asyncrl_cli.observe.terminal import SafeConsole

REDRAWS_PER_S = 2
"""A status is made every second."""
CLOSE_TIMEOUT_S = 5.0


class Screen(Sink):
    """Draws the newest status. `close` leaves the last picture and the run's totals."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or SafeConsole(stderr=True)
        self._status: Mapping[str, Any] | None = None
        self._live = Live(
            console=self._console, get_renderable=self._picture, refresh_per_second=REDRAWS_PER_S, vertical_overflow="crop"
        )
        self._live.start()

    def status(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def close(self, status: Mapping[str, Any]) -> None:
        """Waits for the last picture, within a limit: a stuck terminal is left as it is."""
        self._status = status
        closing = threading.Thread(target=self._live.stop, name="screen", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        if not closing.is_alive():
            self._console.print(render_summary({**status, "error": ""}))  # the command's last line says it

    def _picture(self) -> Text:
        return Text() if self._status is None else _on(self._console, self._status)


def _on(console: Console, status: Mapping[str, Any], remark: str = "") -> Text:
    width, height = console.size
    return render(status, width=width, height=height - 1, remark=remark)


def make_ui(ui: str, console: Console | None = None) -> Sink | None:
    """The sink that people see. `auto`: the screen on a terminal that can show it, else plain lines on stderr."""
    console = console or SafeConsole(stderr=True)
    if ui == "none":
        return None
    if ui == "live" or (ui == "auto" and can_show(console)):
        return Screen(console)
    return Plain(sys.stderr)


def can_show(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and "utf" in console.encoding.lower()


def print_status(found: RunStatus, console: Console) -> None:
    """`asyncrl status`: the picture once, and the totals of an ended run."""
    console.print(render(found.status, width=console.width, height=200, remark=found.remark), highlight=False)
    if found.liveness == "ended":
        console.print(render_summary(found.status))


def watch_status(read: Callable[[], RunStatus], console: Console, *, every_s: float = 1.0) -> RunStatus:
    """`asyncrl status --watch`: redraw until the run has ended or died. Ctrl-C is the caller's."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            try:
                found = read()
            except StillStarting as not_yet:
                live.update(not_yet.message, refresh=True)
            else:
                live.update(_on(console, found.status, found.remark), refresh=True)
                if found.liveness in ("ended", "dead"):
                    return found
            time.sleep(every_s)
