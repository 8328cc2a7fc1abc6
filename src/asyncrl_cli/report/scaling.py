"""The page of `asyncrl tune --scale`: groups per second over GPUs, with the line of perfect linearity and
90% intervals, as a drawing within the page, and the same figures as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from asyncrl_cli.bench.effects import Scaling
from asyncrl_cli.report.page import card, page_of, table

WIDTH, HEIGHT, MARGIN = 720, 420, 60
COLOURS = "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#9c6b4e"


def scaling_page(name: str, scaled: Sequence[Scaling]) -> str:
    rows = []
    for one in scaled:
        for gpus, effect, linearity in zip(one.gpus, one.effects, one.linearity, strict=True):
            if (rate := effect.groups_per_s) is not None and linearity is not None:
                figures = f"{rate.value:.3g}", f"{rate.low:.3g} to {rate.high:.3g}", f"{linearity:.2f}"
                mark = " (more no longer pay)" if gpus == one.enough_gpus != one.gpus[-1] else ""
                rows.append([escape(one.profile), f"{gpus}{mark}", *figures])
    heads = ["profile", "GPUs", "groups/s", "90% interval", "linearity"]
    title = f"SIMULATED: {name}, speed over GPUs"
    return page_of(
        [],
        library="",
        title=title,
        before=card("Groups per second", drawing(scaled)) + card("Figures", table(heads, rows, figures=True)),
    )


def drawing(scaled: Sequence[Scaling]) -> str:
    """Both axes are logarithmic, so that perfect linearity is the dashed diagonal of each profile."""
    points = [
        (gpus, rate)
        for one in scaled
        for gpus, effect in zip(one.gpus, one.effects, strict=True)
        if (rate := effect.groups_per_s) is not None
    ]
    least_x, most_x = min(gpus for gpus, _ in points), max(gpus for gpus, _ in points)
    least_y, most_y = min(rate.low for _, rate in points), max(rate.high for _, rate in points)

    def place(gpus: float, rate: float) -> tuple[float, float]:
        x = math.log(gpus / least_x) / max(math.log(most_x / least_x), 1e-9)
        y = math.log(rate / least_y) / max(math.log(most_y / least_y), 1e-9)
        return MARGIN + x * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - y * (HEIGHT - 2 * MARGIN)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="groups per second over GPUs">']
    for gpus in sorted({gpus for gpus, _ in points}):
        x, y = place(gpus, least_y)
        parts.append(f'<text x="{x:.0f}" y="{y + 24:.0f}" fill="currentColor">{gpus}</text>')
    for tick in (least_y, math.sqrt(least_y * most_y), most_y):
        parts.append(f'<text x="4" y="{place(least_x, tick)[1]:.0f}" fill="currentColor">{tick:.3g}</text>')
    for number, one in enumerate(scaled):
        colour, corners = COLOURS[number % len(COLOURS)], []
        for gpus, effect in zip(one.gpus, one.effects, strict=True):
            if (rate_here := effect.groups_per_s) is None:
                continue
            x, y = place(gpus, rate_here.value)
            (_, low), (_, high) = place(gpus, rate_here.low), place(gpus, rate_here.high)
            corners.append(f"{x:.1f},{y:.1f}")
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
            )
        first = one.effects[0].groups_per_s
        if first is not None:
            reach = min(most_x, one.gpus[0] * most_y / first.value)
            (x1, y1), (x2, y2) = (
                place(one.gpus[0], first.value),
                place(reach, first.value * reach / one.gpus[0]),
            )
            ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
            parts.append(f'<line {ends} stroke="{colour}" stroke-dasharray="3 5"/>')
        drawn = " ".join(corners)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = MARGIN + 12, MARGIN / 2 + 18 * number
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}">{escape(one.profile)}</text>')
    return "".join([*parts, "</svg>"])
