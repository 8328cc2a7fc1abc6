"""The page of `asyncrl tune --scale`: groups per second over GPUs, with the line of perfect linearity and
90% intervals, as a drawing within the page, and the same figures as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from asyncrl_cli.bench.effects import Scaling
from asyncrl_cli.report.page import card, page_of, table

WIDTH, HEIGHT, MARGIN = 720, 420, 60
GRID = 'stroke="currentColor" opacity="0.2"'
CAPTION = (
    "<p>Both axes are logarithmic. Dashed: perfect linearity. Bars: 90% intervals, without the "
    "model's own error.</p>"
)
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
    """Both axes are logarithmic: perfect linearity is the dashed diagonal of each profile. With a caption."""
    points = [point for one in scaled for point in one.rates]
    numbers = sorted({gpus for gpus, _ in points})
    least, most = min(rate.low for _, rate in points), max(rate.high for _, rate in points)

    def place(gpus: float, rate: float) -> tuple[float, float]:
        x = math.log(gpus / numbers[0]) / max(math.log(numbers[-1] / numbers[0]), 1e-9)
        y = math.log(rate / least) / max(math.log(most / least), 1e-9)
        return MARGIN + x * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - y * (HEIGHT - 2 * MARGIN)

    def line(begin: tuple[float, float], end: tuple[float, float], look: str) -> str:
        (x1, y1), (x2, y2) = place(*begin), place(*end)
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {look}/>'

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="groups per second over GPUs">']
    for gpus in numbers:
        x, y = place(gpus, least)
        label = f"{gpus} GPUs" if gpus == numbers[0] else str(gpus)
        parts.append(f'<text x="{x:.0f}" y="{y + 24:.0f}" fill="currentColor">{label}</text>')
        parts.append(line((gpus, least), (gpus, most), GRID))
    for tick in (least, math.sqrt(least * most), most):
        y = place(numbers[0], tick)[1]
        parts.append(f'<text x="4" y="{y:.0f}" fill="currentColor">{tick:.3g}</text>')
        parts.append(line((numbers[0], tick), (numbers[-1], tick), GRID))
    for number, one in enumerate(scaled):
        colour = COLOURS[number % len(COLOURS)]
        stroke, ((fewest, rate), *_) = f'stroke="{colour}"', one.rates
        parts += [line((gpus, each.low), (gpus, each.high), stroke) for gpus, each in one.rates]
        reach = min(numbers[-1], fewest * most / rate.value)
        ideal = (reach, rate.value * reach / fewest)
        parts.append(line((fewest, rate.value), ideal, f'{stroke} stroke-dasharray="3 5"'))
        corners = [place(gpus, each.value) for gpus, each in one.rates]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        parts.append(f'<polyline points="{drawn}" fill="none" {stroke} stroke-width="2"/>')
        x, y = MARGIN + 220 * (number % 3), 20 + 18 * (number // 3)  # in rows above the lines
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}">{escape(one.profile)}</text>')
    return "".join([*parts, "</svg>", CAPTION])
