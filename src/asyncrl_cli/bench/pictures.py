"""Draws the pictures of a comparison: how each executor spends its time (a Gantt chart), and each profile's
speed and bound."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from asyncrl_cli.bench.results import Comparison, DrawnRun, Result, is_uneven

COLOURS = {
    "busy": "#2f7ebc",
    "starved": "#f2d16b",
    "waiting for tools": "#f7b7a3",
    "blocked": "#e08a3c",
    "syncing": "#8e5bb5",
    "loading": "#c04a6e",
    "paused": "#c9ced6",
    "done": "#ffffff",
    "failed": "#c62828",
}
"""By state. Work is dark and waiting is bright, so a good schedule gives a dark picture."""
TRAINER_BUSY = "#2a9060"
FREE_SLOTS = "#bcd6ea"
VIEW_WINDOWS = 3
MIN_SAMPLES = 20
"""Running sequences are drawn if a view has at least this many counts of them; there is one per second."""
DOTS_PER_INCH = 130
ROW_INCHES, PANEL_INCHES, WIDTH_INCHES = 0.27, 0.62, 13.0


def draw_timelines(comparison: Comparison, path: Path) -> None:
    """One panel per profile, one row per executor. All panels use the same scales for time and for running
    sequences."""
    timelines = comparison.timelines
    length_s = view_length_s(timelines)
    views = [
        _running(one, name, one.middle_s(length_s), length_s) for one in timelines for name in one.workers
    ]
    most = max((count for samples in views for _, count in samples), default=0.0)
    rows = [len(timeline.trainers) + len(timeline.workers) for timeline in timelines]
    height = sum(PANEL_INCHES + ROW_INCHES * count for count in rows) + 1.2
    figure = _figure(WIDTH_INCHES, height)
    panels = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=[count + 1.2 for count in rows])[
        :, 0
    ]
    for panel, timeline in zip(panels, timelines, strict=True):
        _draw_panel(panel, timeline, length_s, most, comparison)
    panels[-1].set_xlabel("seconds")
    _legend(figure, timelines, most)
    figure.suptitle(
        f"{'SIMULATED: w' if comparison.simulated else 'W'}here the time goes, in the middle of the run",
        fontsize=13,
    )
    _save(figure, path)


def view_length_s(timelines: Sequence[DrawnRun]) -> float:
    """Three windows of median length, but at least one and a half windows of every profile."""
    lengths_s = sorted(timeline.window_s for timeline in timelines)
    return max(VIEW_WINDOWS * lengths_s[(len(lengths_s) - 1) // 2], 1.5 * lengths_s[-1])


def _draw_panel(
    panel: Axes, timeline: DrawnRun, length_s: float, most: float, comparison: Comparison
) -> None:
    begin_s = timeline.middle_s(length_s)
    names = [*timeline.trainers, *timeline.workers]
    for row, name in enumerate(names):
        _draw_row(panel, row, timeline, name, begin_s, length_s, most)
    for publish_s in timeline.publishes_s:
        if begin_s <= publish_s <= begin_s + length_s:
            panel.axvline(
                publish_s - begin_s, color="#222222", linewidth=0.9, linestyle=(0, (3, 2)), zorder=5
            )
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(0, length_s)
    panel.tick_params(axis="x", labelsize=8)
    panel.set_title(_panel_title(timeline, begin_s, comparison), loc="left", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)


def _panel_title(timeline: DrawnRun, begin_s: float, comparison: Comparison) -> str:
    result = next(result for result in comparison.results if result.profile == timeline.profile)
    figures = f"   {result.figures['window_time_s'].median:.4g} s per {comparison.window_groups} groups"
    hidden = timeline.num_workers - len(timeline.workers)
    shown = f"   {len(timeline.workers)} of {timeline.num_workers} rollout workers shown" if hidden else ""
    return f"{timeline.profile}{figures}{shown}   from {begin_s:.0f} s of the run"


def _draw_row(
    panel: Axes, row: int, timeline: DrawnRun, name: str, begin_s: float, length_s: float, most: float
) -> None:
    """One executor's states as bars. A generating worker's height is its number of running sequences,
    relative to `most`."""
    stays: dict[str, list[tuple[float, float]]] = {}
    for state, start_s, end_s in timeline.spans.get(name, ()):
        left, right = max(start_s - begin_s, 0.0), min(end_s - begin_s, length_s)
        if right > left:
            stays.setdefault(state, []).append((left, right - left))
    running = _running(timeline, name, begin_s, length_s) if most else []
    for state, bars in stays.items():
        is_busy = state == "busy"
        colour = TRAINER_BUSY if name in timeline.trainers and is_busy else COLOURS[state]
        panel.broken_barh(
            bars,
            (row - 0.42, 0.84),
            facecolors=FREE_SLOTS if is_busy and running else colour,
            linewidth=0,
            zorder=1 if is_busy else 3,
        )
    if running:
        tops = [row + 0.42 - 0.84 * count / most for _, count in running]
        panel.fill_between(
            [s for s, _ in running],
            tops,
            row + 0.42,
            step="post",
            color=COLOURS["busy"],
            linewidth=0,
            zorder=2,
        )


def _running(timeline: DrawnRun, name: str, begin_s: float, length_s: float) -> list[tuple[float, float]]:
    """(time, running sequences) within the view, extended to its edges; empty with fewer than `MIN_SAMPLES`
    counts."""
    samples = [(time_s - begin_s, count) for time_s, count in timeline.running.get(name, ())]
    inside = [(time_s, count) for time_s, count in samples if 0 <= time_s <= length_s]
    if len(inside) < MIN_SAMPLES:
        return []
    before = [count for time_s, count in samples if time_s < 0] or [inside[0][1]]
    return [(0.0, before[-1]), *inside, (length_s, inside[-1][1])]


def _legend(figure: Figure, timelines: Sequence[DrawnRun], most: float) -> None:
    shown = [one.spans.get(name, ()) for one in timelines for name in (*one.trainers, *one.workers)]
    seen = {state for stays in shown for state, _, _ in stays}
    handles: list[Any] = [Patch(color=TRAINER_BUSY, label="training")]
    labels = {"busy": f"generating (full height: {most:.0f} sequences)" if most else "generating"}
    handles += [
        Patch(color=colour, label=labels.get(state, state))
        for state, colour in COLOURS.items()
        if state in seen
    ]
    if most:
        handles.insert(2, Patch(color=FREE_SLOTS, label="generating, with room for more"))
    handles.append(
        Line2D([], [], color="#222222", linewidth=0.9, linestyle=(0, (3, 2)), label="new version published")
    )
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 8), frameon=False, fontsize=9
    )


def draw_speedups(comparison: Comparison, path: Path) -> None:
    """Draw groups per second as bars, the bound as an outline around each, the spread of repeats as a
    whisker."""
    results = comparison.results
    figure = _figure(max(6.5, 1.7 * len(results) + 1.5), 4.6)
    panel = figure.subplots()
    top = max(_draw_bar(panel, place, result, comparison) for place, result in enumerate(results))
    panel.set_xticks(
        range(len(results)), ["\n".join(textwrap.wrap(result.profile, 12)) for result in results], fontsize=9
    )
    panel.set_ylabel("groups per second")
    panel.set_ylim(0, top * 1.22)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title("\n".join(textwrap.wrap(comparison.title, 80)), loc="left", fontsize=10)
    if comparison.has_bound:
        outline = Patch(
            fill=False, edgecolor="#444444", linestyle="--", label="bound: full batches, no waits"
        )
        figure.legend(handles=[outline], loc="outside lower center", frameon=False, fontsize=9)
    _save(figure, path)


def _draw_bar(panel: Axes, place: int, result: Result, comparison: Comparison) -> float:
    """Draw one profile's bar, bound and label. Returns the height of the highest."""
    speed = result.figures["groups_per_s"]
    is_baseline = result.profile == comparison.baseline
    panel.bar(place, speed.median, width=0.62, color="#8d99a8" if is_baseline else COLOURS["busy"])
    top = speed.median
    if speed.max > speed.min:
        below, above = speed.median - speed.min, speed.max - speed.median
        panel.errorbar(place, speed.median, yerr=[[below], [above]], color="#222222", capsize=4, linewidth=1)
        top = max(top, speed.max)
    if (ideal_s := result.median("ideal_s")) is not None:
        ideal = comparison.window_groups / ideal_s
        panel.bar(place, ideal, width=0.62, fill=False, edgecolor="#444444", linestyle="--", linewidth=1.1)
        top = max(top, ideal)
    labels = {
        "speedup": "{:.2f}x",
        "speedup_per_token": "{:.2f}x per token",
        "bound_ratio": "{:.0%} of bound",
    }
    if is_baseline or not is_uneven(comparison.results):
        del labels["speedup_per_token"]
    label = "\n".join(
        form.format(result.median(name)) for name, form in labels.items() if name in result.figures
    )
    panel.annotate(label, (place, top), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=9)
    return top


def _figure(width: float, height: float) -> Figure:
    """A figure made without pyplot, which has global state and may need a display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
