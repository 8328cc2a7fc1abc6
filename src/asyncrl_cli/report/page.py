"""The page of one or several runs: a single HTML file with its style, its program, the plotting library and
all data in it.

The texts (verdict, facts, configuration) are HTML, and can be read without the program. A policy in the
page's head forbids it to load anything, so a report is the same offline, and nobody can see that it was
opened.
"""

from __future__ import annotations

import base64
import gzip
import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape
from importlib.resources import files

from asyncrl_cli import __version__
from asyncrl_cli.observe.line_figures import meaning_of
from asyncrl_cli.profile.keys import entries_of
from asyncrl_cli.profile.loaded import DEFAULT, Loaded, is_default
from asyncrl_cli.profile.toml_files import toml_value
from asyncrl_cli.report.run_data import RunData
from asyncrl_cli.report.side_by_side import Comparison
from asyncrl_cli.report.verdict import Remark

GENERATOR = '<meta name="generator" content="asyncrl report">'
"""In each page's head. A file that has it may be overwritten."""
CHART = {"kind": "lines", "unit": "", "series": [], "prefix": "", "log": False, "limit": ["", ""]}
"""What a chart is where charts.toml does not say otherwise."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def plotly() -> str:
    """plotly.js, compressed and as text: 2.0 MB instead of 4.8."""
    library = files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(library, mtime=0)).decode("ascii")


def page_of(runs: Sequence[RunData], *, library: str, title: str, before: str = "", after: str = "") -> str:
    """The page. `library` is `plotly()`; `before` and `after`: further HTML, above the words about runs and
    below their charts."""
    words = [
        before,
        _beside("Verdict", runs, lambda run: "".join(map(_finding, run.findings))),
        _beside("What ran", runs, _facts),
    ]
    program = [
        f'<script type="application/json" id="report-data">{_embedded(runs)}</script>',
        f'<script type="text/plain" id="plotly">{library}</script>',
        f"<script>{_file('page.js')}</script>",
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            f'<head><meta charset="utf-8">{GENERATOR}',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_file('page.css')}</style></head>",
            f'<body><header><h1>{escape(title)}</h1><p class="dim">{escape(_made(runs))}</p></header>',
            NAVIGATION if runs else "",
            f'<main>{"".join(words)}<div id="charts"></div>{after}</main>',
            *(program if runs else []),
            "</body></html>\n",
        ]
    )


NAVIGATION = """<nav><fieldset><span class="dim">horizontal axis</span>
<button data-axis="step">steps</button><button data-axis="samples">samples</button>
<button data-axis="time">run time</button></fieldset>
<button data-theme="dark">dark</button>
<span class="dim">drag to zoom: all charts follow; double-click to reset</span></nav>"""


def _file(name: str) -> str:
    return files("asyncrl_cli.report").joinpath(name).read_text(encoding="utf-8")


def _charts() -> list[dict[str, object]]:
    sections = tomllib.loads(_file("charts.toml")).items()
    charts = ((name, title, chart) for name, section in sections for title, chart in section.items())
    return [{**CHART, "section": name, "title": title, **chart} for name, title, chart in charts]


def _embedded(runs: Sequence[RunData]) -> str:
    """The data as JSON that cannot end its script element."""
    metrics = sorted({key for run in runs for key in run.charts["columns"]})
    data = {
        "charts": _charts(),
        "meanings": {key: meaning_of(key) for key in metrics},
        "runs": [run.charts for run in runs],
    }
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _made(runs: Sequence[RunData]) -> str:
    steps = {run.name: run.charts["steps_per_point"] for run in runs}
    joined = [f"{name}: {number} train steps per point" for name, number in steps.items() if number > 1]
    return " · ".join([f"made by asyncrl {__version__}", *joined])


def _beside(heading: str, runs: Sequence[RunData], content: Callable[[RunData], str]) -> str:
    if not runs:
        return ""
    names = [f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else "" for run in runs]
    contents = [name + content(run) for name, run in zip(names, runs, strict=True)]
    cards = "".join(f'<div class="card">{html}</div>' for html in contents)
    return f'<section><h2>{heading}</h2><div class="beside">{cards}</div></section>'


def _finding(finding: Remark) -> str:
    change = f'<p class="change">{escape(finding.change)}</p>' if finding.change else ""
    text = f"<p><b>{escape(finding.about)}</b> · {escape(finding.text)}</p>"
    return f'<div class="finding {finding.weight}">{text}{change}</div>'


def _facts(run: RunData) -> str:
    purpose = f"<p>{escape(run.loaded.profile.purpose)}</p>" if run.loaded.profile.purpose else ""
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in run.facts)
    return f"{purpose}<dl>{facts}</dl>{_configuration(run.loaded)}"


def _configuration(loaded: Loaded) -> str:
    """Every key with its value and origin; the keys that were set come first."""
    values = entries_of(loaded.profile)
    origins = {key: loaded.origins.get(key, DEFAULT) for key in values}
    given = sum(not is_default(origin) for origin in origins.values())
    keys = sorted(values, key=lambda key: is_default(origins[key]))
    rows = [[f"<code>{escape(key)}</code>", _code(values[key]), escape(origins[key])] for key in keys]
    summary = f"configuration: {given} keys set, {len(rows) - given} at their defaults"
    return f"<details><summary>{summary}</summary>{table(['key', 'value', 'from'], rows)}</details>"


def beside_each_other(compared: Comparison, heading: str = "Side by side") -> str:
    """Differences of configuration first, then figures."""
    names, keys = [escape(name) for name in compared.names], compared.differences.items()
    different = [[f"<code>{escape(key)}</code>", *map(_code, values)] for key, values in keys]
    configurations = "<p>None: the runs have the same configuration.</p>"
    if different:
        configurations = table(["key", *names], different)
    rows = [[escape(row.label), *map(escape, row.texts)] for row in compared.figures]
    figures = table(["", *names], rows, figures=True)
    return card("Differences of configuration", configurations) + card(heading, figures)


def card(heading: str, content: str) -> str:
    """A section of the page; `content` is HTML."""
    return f'<section><h2>{escape(heading)}</h2><div class="card">{content}</div></section>'


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    figures: bool = False,
    strong: Collection[int] = (),
) -> str:
    """An HTML table; cells are HTML. `figures`: all columns but the first are aligned right. `strong`:
    numbers of bold rows."""
    kinds = ["", *((' class="figure"' if figures else "") for _ in heads[1:])]
    head = "".join(f"<th{kind}>{cell}</th>" for kind, cell in zip(kinds, heads, strict=True))
    body = ""
    for number, row in enumerate(rows):
        cells = "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True))
        body += f"<tr{' class=strong' if number in strong else ''}>{cells}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _code(value: object) -> str:
    return "-" if value is None else f"<code>{escape(toml_value(value))}</code>"
