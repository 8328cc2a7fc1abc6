"""Draws docs/pictures/<mode>.svg: some seconds of each mode, from simulated runs of the same work
(modes.toml). In docs/pictures/compared.svg the first and the last mode stand one above the other.

    python -m docs.make.modes

Every response is a line in its slot, in the colour of the version that samples it; every train step is a box.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from asyncrl_cli.cli.tune_answers import MODES
from asyncrl_cli.observe.recorded import Recorded, add_span

DOCS = Path(__file__).resolve().parents[1]
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
"""Of versions, in turn. Okabe and Ito's, which people with any colour vision tell apart."""
TRAINER, GREY, IDLE = "#6b7480", "#808080", "rgba(128,128,128,0.14)"
WIDTH, LABELS, TOP, TRAINER_PX, SLOT_PX, GAP = 780, 66, 16, 22, 6, 6
SECONDS = 60
ROOM_FOR_A_NUMBER = 24
FIRST_VERSION = 3
"""The view begins where this version is published: the run's beginning is over."""


class Picture:
    def __init__(self, run: Recorded) -> None:
        self._events = list(run.events("published", "loaded"))
        self._lines = list(run.timeline())
        self._roles = run.roles
        self._step_ends_s = [line["time_s"] for line in run.metrics()]
        self._start_s = (
            next(
                e["time_s"]
                for e in self._events
                if e["event"] == "published" and e["version"] == FIRST_VERSION
            )
            - 1
        )

    def svg(self) -> tuple[str, float]:
        """The picture and its height."""
        workers = sorted(name for name, role in self._roles.items() if role == "rollout")
        (trainer, *_) = (name for name, role in self._roles.items() if role == "trainer")
        slots = 1 + max(
            slot for line in self._lines for stays in line.get("slots", {}).values() for slot, *_ in stays
        )
        parts, top = (
            [*self._row("trainer", TOP, TRAINER_PX), *self._steps(trainer, TOP)],
            TOP + TRAINER_PX + GAP,
        )
        for worker in workers:
            parts += [
                *self._row(worker, top, slots * SLOT_PX),
                *self._loads(worker, top, slots),
                *self._responses(worker, top),
            ]
            top += slots * SLOT_PX + GAP
        parts += self._publishes(top - GAP)
        return drawn("\n".join(parts), top), top

    def _x(self, time_s: float) -> float:
        inside = min(max(time_s - self._start_s, 0.0), SECONDS)
        return round(LABELS + inside / SECONDS * (WIDTH - LABELS), 1)

    def _box(self, start_s: float, end_s: float, y: float, height: float, colour: str) -> str:
        left, right = self._x(start_s), self._x(end_s)
        return (
            (f'<rect x="{left}" y="{y}" width="{right - left:.1f}" height="{height}" fill="{colour}"/>')
            if right > left
            else ""
        )

    def _row(self, name: str, y: float, height: float) -> Iterator[str]:
        yield f'<text x="0" y="{y + height / 2 + 4}">{name}</text>'
        yield self._box(self._start_s, self._start_s + SECONDS, y, height, IDLE)

    def _steps(self, trainer: str, y: float) -> Iterator[str]:
        busy: list[tuple[str, float, float]] = []
        for state, start_s, end_s in (
            stay for line in self._lines for stay in line["spans"].get(trainer, ())
        ):
            if state == "busy":
                add_span(busy, state, start_s, end_s)
        for _, start_s, end_s in busy:
            inside = [time_s for time_s in self._step_ends_s if start_s < time_s < end_s - 0.1]
            for begins_s, ends_s in pairwise([start_s, *inside, end_s]):
                yield self._box(begins_s, ends_s - 0.1, y, TRAINER_PX, TRAINER)
                if self._x(ends_s) - self._x(begins_s) > ROOM_FOR_A_NUMBER:
                    step = bisect_left(self._step_ends_s, ends_s - 0.1) + 1
                    yield f'<text class="in" x="{self._x(begins_s) + 5}" y="{y + 15}">{step}</text>'

    def _responses(self, worker: str, top: float) -> Iterator[str]:
        loads = [
            event for event in self._events if event["event"] == "loaded" and event.get("worker") == worker
        ]
        times = [event["time_s"] for event in loads]
        for line in self._lines:
            for slot, _, start_s, end_s in line.get("slots", {}).get(worker, ()):
                cuts = [start_s, *(time_s for time_s in times if start_s < time_s < end_s), end_s]
                for begins_s, ends_s in pairwise(cuts):
                    version = loads[bisect_right(times, begins_s) - 1]["version"]
                    yield self._box(
                        begins_s,
                        ends_s,
                        top + slot * SLOT_PX + 1,
                        SLOT_PX - 2,
                        COLOURS[version % len(COLOURS)],
                    )

    def _loads(self, worker: str, top: float, slots: int) -> Iterator[str]:
        for line in self._lines:
            for state, start_s, end_s in line["spans"].get(worker, ()):
                if state == "loading":
                    yield self._box(start_s, end_s, top, slots * SLOT_PX, "rgba(128,128,128,0.45)")

    def _publishes(self, bottom: float) -> Iterator[str]:
        for event in self._events:
            x = self._x(event["time_s"])
            if event["event"] == "published" and LABELS < x < WIDTH - 16:
                colour = COLOURS[event["version"] % len(COLOURS)]
                yield f'<path d="M{x} {TOP - 2}V{bottom}" stroke="{GREY}" stroke-dasharray="3 3"/>'
                yield (
                    f'<text x="{x - 6}" y="{TOP - 5}" '
                    f'style="fill:{colour};font-weight:600">v{event["version"]}</text>'
                )


def drawn(body: str, height: float) -> str:
    style = f"text{{font:11px system-ui,sans-serif;fill:{GREY}}} .in{{fill:#fff}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"><style>{style}</style>\n'
        f"{body}\n</svg>\n"
    )


def compared(pictures: dict[str, tuple[str, float]]) -> str:
    """Pictures one above the other, each below its name."""
    parts, top = [], 0.0
    for name, (svg, height) in pictures.items():
        parts.append(f'<text x="0" y="{top + 13}" style="font-size:13px;font-weight:600">{name}</text>')
        parts.append(svg.replace("<svg ", f'<svg y="{top + 20}" width="{WIDTH}" height="{height}" ', 1))
        top += 20 + height + 14
    return drawn("\n".join(parts), top - 14)


def main() -> None:
    profiles = [word for mode in MODES[1:] for word in ("--profile", mode)]
    with tempfile.TemporaryDirectory() as made:
        workload = str(Path(__file__).with_name("modes.toml"))
        command = [sys.executable, "-m", "asyncrl_cli", "bench", "--simulate", workload, *profiles]
        subprocess.run([*command, "--out", made], check=True, capture_output=True)
        pictures = {mode: Picture(Recorded(Path(made) / "runs" / f"{mode}-s0")).svg() for mode in MODES}
    written = {mode: svg for mode, (svg, _) in pictures.items()}
    written["compared"] = compared({mode: pictures[mode] for mode in (MODES[0], MODES[-1])})
    for name, svg in written.items():
        path = DOCS / "pictures" / f"{name}.svg"
        path.write_text(svg, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
