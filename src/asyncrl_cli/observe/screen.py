"""The live screen. A thread of its own draws the newest status, so that a slow terminal never holds up the loop."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live

from asyncrl_cli.observe.plain import Plain
from asyncrl_cli.observe.render import render, render_summary
from asyncrl_cli.observe.sinks import Sink
from asyncrl_cli.observe.status import RunStatus, StillStarting
from asyncrl_cli.observe.terminal import SafeConsole

REDRAW_S = 0.25
CLOSE_TIMEOUT_S = 5.0


class Screen(Sink):
    """Draws each new status, at most four times a second. `close` leaves the last picture and the run's totals."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or SafeConsole(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._status: Mapping[str, Any] | None = None
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="screen", daemon=True)
        self._live.start()
        self._thread.start()

    def status(self, status: Mapping[str, Any]) -> None:
        self._status = status
        self._news.set()

    def close(self, status: Mapping[str, Any]) -> None:
        """Waits for the drawing thread, within a limit: a stuck terminal is left as it is."""
        self._status = status
        self._closing.set()
        self._news.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._live.stop()
            self._console.print(render_summary({**status, "error": ""}))  # the command's last line says it

    def _work(self) -> None:
        while not self._closing.is_set():
            self._news.wait()
            self._news.clear()
            self._draw()
            self._closing.wait(REDRAW_S)
        self._draw()

    def _draw(self) -> None:
        if self._status is not None:
            _show(self._live, self._status)


def _show(live: Live, status: Mapping[str, Any], remark: str = "") -> None:
    width, height = live.console.size
    live.update(render(status, width=width, height=height - 1, remark=remark), refresh=True)


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
                _show(live, found.status, found.remark)
                if found.liveness in ("ended", "dead"):
                    return found
            time.sleep(every_s)
