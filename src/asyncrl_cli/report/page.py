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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import chain, islice
from typing import Any

from asyncrl_cli import __version__
from asyncrl_cli.audit.proofs import AUDIT, Audit
from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.safe_files import load_json
from asyncrl_cli.data.sample_fields import NOT_SAMPLED
from asyncrl_cli.measure.machines import MACHINES
from asyncrl_cli.observe.format import evenly, share
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.run_lines import EvalSample, meaning_of
from asyncrl_cli.profile.keys import entries_of
from asyncrl_cli.profile.loaded import DEFAULT, is_default
from asyncrl_cli.profile.toml_files import toml_value
from asyncrl_cli.report.dumps import AGE_COLOURS, DumpedTrajectory, Passage, trajectories_of
from asyncrl_cli.report.run_data import RunData
from asyncrl_cli.report.side_by_side import SideBySide

GENERATOR = '<meta name="generator" content="asyncrl report">'
"""In each page's head. A file that has it may be overwritten."""
CHART = {"kind": "lines", "unit": "", "series": [], "prefix": "", "log": False, "limit": ["", ""]}
"""What a chart is where charts.toml does not say otherwise."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
MAX_STEPS, PER_STEP = 12, 4
MAX_CHARACTERS = 1_000_000
"""Limit for all trajectories on a page together: it is for reading, `asyncrl samples` has the rest."""
NOTABLE_CHANGE = 0.2
"""A token is marked if the trainer's probability of it differs by this much from the sampler's."""
MOST_NAMED = 3
"""Limit for the executors and the waits of a machine that are named."""
AGES = "".join(
    f".age{age} {{ background: color-mix(in srgb, {colour} 22%, transparent); border-bottom: 2px solid "
    f"{colour}; }}"
    for age, colour in enumerate(AGE_COLOURS)
)
LEGEND = (
    "Each token is underlined in the colour of the age of the version that sampled it: "
    + " ".join(
        f'<span class="age{age}">{age if age < len(AGE_COLOURS) - 1 else f"{age} or more"}</span>'
        for age in range(len(AGE_COLOURS))
    )
    + " versions behind the window; a small v7 stands before the tokens of version 7. Text that the model "
    "did not write is grey. "
    f"Dashed: the trainer gave the token a probability that differs by {NOTABLE_CHANGE:g} or more. "
    "Pointing at a token shows its values of fields of your own."
)


def plotly() -> str:
    """plotly.js, compressed and as text: 2.0 MB instead of 4.8."""
    library = files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(library, mtime=0)).decode("ascii")


def page_of(runs: Sequence[RunData], *, library: str, title: str, before: str = "", after: str = "") -> str:
    """The page. `library` is `plotly()`; `before` and `after`: further HTML, above the words about runs and
    below their charts."""
    words = [before, _cards("Verdict", runs, _findings), _cards("What ran", runs, _facts)]
    words.append(_cards("The pipeline's machines", runs, _machines))
    sections = tomllib.loads(_file("charts.toml")).items()
    metrics = sorted({key for run in runs for key in run.columns.values})
    charts = [
        {**CHART, "section": name, "title": title, **chart}
        for name, section in sections
        for heading, given in section.items()
        for title, chart in _each(heading, given, metrics)
    ]
    data = {
        "charts": charts,
        "meanings": {key: meaning_of(key) for key in metrics},
        "runs": [run.charts for run in runs],
    }
    # as JSON that cannot end its script element
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    program = [
        f'<script type="application/json" id="report-data">{embedded}</script>',
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


def _each(
    heading: str, chart: dict[str, Any], metrics: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The chart and its title; of the kind `each`, one of lines for every metric that begins with the
    prefix."""
    if chart.get("kind") != "each":
        yield heading, chart
        return
    for key in metrics:
        if key.startswith(prefix := chart["prefix"]):
            name = key.removeprefix(prefix)
            yield f"{heading} {name}", {**chart, "series": [[key, name]]}


NAVIGATION = """<nav><fieldset><span class="dim">horizontal axis</span>
<button data-axis="step">steps</button><button data-axis="samples">samples</button>
<button data-axis="time">run time</button></fieldset>
<button data-theme="dark">dark</button>
<span class="dim">drag to zoom: all charts follow; double-click to reset</span></nav>"""


def _file(name: str) -> str:
    return files("asyncrl_cli.report").joinpath(name).read_text(encoding="utf-8")


def _made(runs: Sequence[RunData]) -> str:
    steps = {run.name: run.columns.steps_per_point for run in runs}
    joined = [f"{name}: {number} train steps per point" for name, number in steps.items() if number > 1]
    return " · ".join([f"made by asyncrl {__version__}", *joined])


def _cards(heading: str, runs: Sequence[RunData], content: Callable[[RunData], str]) -> str:
    """A section with a card for each run, beside each other; empty without runs."""
    if not runs:
        return ""
    names = [f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else "" for run in runs]
    contents = [name + content(run) for name, run in zip(names, runs, strict=True)]
    cards = "".join(f'<div class="card">{html}</div>' for html in contents)
    return f'<section><h2>{heading}</h2><div class="beside">{cards}</div></section>'


def _findings(run: RunData) -> str:
    html = ""
    for finding in run.findings:
        change = f'<p class="change">{escape(finding.change)}</p>' if finding.change else ""
        text = f"<p><b>{escape(finding.about)}</b> · {escape(finding.text)}</p>"
        html += f'<div class="finding {finding.weight}">{text}{change}</div>'
    return html


def _facts(run: RunData) -> str:
    """What ran, with every key of the configuration, its value and origin; those that were set come first."""
    purpose = f"<p>{escape(run.loaded.profile.purpose)}</p>" if run.loaded.profile.purpose else ""
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in run.facts)
    values = entries_of(run.loaded.profile)
    origins = {key: run.loaded.origins.get(key, DEFAULT) for key in values}
    given = sum(not is_default(origin) for origin in origins.values())
    keys = sorted(values, key=lambda key: is_default(origins[key]))
    rows = [[f"<code>{escape(key)}</code>", _code(values[key]), escape(origins[key])] for key in keys]
    summary = f"configuration: {given} keys set, {len(rows) - given} at their defaults"
    configuration = table(["key", "value", "from"], rows)
    return f"{purpose}<dl>{facts}</dl><details><summary>{summary}</summary>{configuration}</details>"


def _machines(run: RunData) -> str:
    """The time of each machine in its states, and which of the eight the run does not have."""
    rows = []
    for one in run.machines:
        total_s = sum(one.state_s.values()) or 1.0
        states, waits = (
            [f"{what} {share(spent_s[what] / total_s)}" for what in sorted(spent_s, key=spent_s.__getitem__)]
            for spent_s in (one.state_s, {what: s for what, s in one.waits_s.items() if what and s})
        )
        where = ", ".join(one.executors) if len(one.executors) <= MOST_NAMED else f"{len(one.executors)}"
        shown = one.name, where, ", ".join(states[::-1]), "; ".join(waits[: -MOST_NAMED - 1 : -1])
        rows.append([*map(escape, shown)])
    missing = [name for name in MACHINES if name not in {one.name for one in run.machines}]
    note = f'<p class="dim">Not in this run: {", ".join(missing)}.</p>' if missing else ""
    return table(["machine", "executors", "time in states", "what it waited for"], rows) + note


def side_by_side_html(compared: SideBySide, heading: str = "Side by side") -> str:
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


def before_and_after_html(run: Recorded) -> str:
    """The same held-out prompts answered by the first and by the last version that was evaluated, side by
    side; empty if there are not two evals with answers."""
    html = ""
    with_answers = [event for event in run.events("eval") if event.get("samples")]
    for name in dict.fromkeys(event.get("eval_set", "") for event in with_answers):
        evals = [event for event in with_answers if event.get("eval_set", "") == name]
        first, last = evals[0], evals[-1]
        if len(evals) < 2:
            continue
        after = {sample["uid"]: sample for sample in last["samples"]}
        rows = [
            [_asked(before), _answer(before), _answer(after[before["uid"]])]
            for before in first["samples"]
            if before["uid"] in after
        ]
        heads = ["held-out prompt", f"version {first.get('version', 0)}", f"version {last.get('version', 0)}"]
        heading = f"Before and after: {run.name}" + (f" on {name}" if name else "")
        html += card(heading, f'<div class="answers">{table(heads, rows)}</div>')
    return html


def _asked(sample: EvalSample) -> str:
    prompt = escape(sample["prompt"])
    return f"{prompt}<br><b>expected: {escape(sample['answer'])}</b>" if "answer" in sample else prompt


def _answer(sample: EvalSample) -> str:
    return f"{escape(sample['text'])}<br><b>reward {sample['reward']:.4g}</b>"


def audit_html(run: Recorded, title: str) -> str:
    """A section with the verdicts of `asyncrl audit`; empty if it has not been run."""
    path = run.files.path / AUDIT
    try:
        audit = load_json(path, Audit, error=ConfigError) if path.exists() else None
    except ConfigError as error:
        return card(title, f"<p>{escape(error.message)}</p>")
    if audit is None:
        return ""
    rows = []
    for one in audit["claims"]:
        note = "; ".join(one.wrong) or one.unchecked
        cells = (one.verdict, one.what, f"{one.cases:,}", *one.figures(), note)
        rows.append([escape(cell) for cell in cells])
    heads = ["verdict", "claim", "cases", "largest deviation", "limit", ""]
    strong = [number for number, one in enumerate(audit["claims"]) if one.verdict == "fails"]
    steps = f"<p>When it had {audit['train_steps']:,} train steps.</p>"
    return card(title, steps + table(heads, rows, strong=strong))


def samples_html(run: Recorded, title: str = "Samples", max_characters: int = MAX_CHARACTERS) -> str:
    """A section with some trajectories of dumped steps, spread over the run, folded: figures on the fold, the
    text by version inside. It is empty if there are none. For a dump that cannot be read the error is shown
    in its place."""

    def trajectories(step: int) -> Iterator[str]:
        try:
            yield from map(_folded, islice(trajectories_of(run, step), PER_STEP))
        except ConfigError as error:
            yield f'<p class="dim">{escape(error.message)}</p>'

    parts, room = [], max_characters
    for text in chain.from_iterable(map(trajectories, evenly(run.sampled_steps, MAX_STEPS))):
        if (room := room - len(text)) < 0:
            parts.append('<p class="dim">The rest does not fit here: asyncrl samples shows it.</p>')
            break
        parts.append(text)
    if not parts:
        return ""
    head = f'<style>{AGES}</style><h2>{escape(title)}</h2><p class="dim">{LEGEND}</p>'
    return f'<section class="samples">{head}{"".join(parts)}</section>'


def _folded(one: DumpedTrajectory) -> str:
    advantage, sampler = one.line["advantage"], one.probability(one.logprobs)
    facts = [f"step {one.step}", f"{one.group}/{one.number}", f"reward {one.reward:.4g}"]
    facts += [f"advantage {advantage:+.3g}"] if advantage is not None else []
    facts += [f"{name} {value}" for name, value in one.numbers]
    facts += [f"{len(one.sampled_indices)} tokens", f"staleness {one.staleness}", f"span {one.span}"]
    if sampler:
        trainer = one.trainer_probability
        by_trainer = f", trainer's {trainer:.3f}" if trainer is not None else ""
        facts.append(f"mean probability {sampler:.3f}{by_trainer}")
    parts = [f'<details class="sample"><summary>{escape(" · ".join(facts))}</summary>']
    if one.answer is not None:
        parts.append(f'<div class="turn"><b>expected</b><div>{escape(one.answer)}</div></div>')
    for speaker, passages in one.turns:
        text = "".join(_marked(one, passage) for passage in passages)
        parts.append(f'<div class="turn {speaker}"><b>{speaker}</b><div>{text}</div></div>')
    return "".join([*parts, "</details>"])


def _marked(one: DumpedTrajectory, passage: Passage) -> str:
    if passage.version == NOT_SAMPLED:
        return f'<span class="given">{escape(one.text(passage))}</span>'
    tokens = []
    for index in passage.tokens:
        text = escape(one.texts[index])
        sampler, trainer = one.both_probabilities.get(index, (0.0, 0.0))
        if abs(sampler - trainer) >= NOTABLE_CHANGE:
            text = f'<mark title="sampler {sampler:.3f}, trainer {trainer:.3f}">{text}</mark>'
        if fields := one.shown_of(index):
            text = f'<span title="{escape(fields)}">{text}</span>'
        tokens.append(text)
    load = ' class="load"' if passage.is_load else ""
    colour = f'<span class="age{one.age(passage.version)}">{"".join(tokens)}</span>'
    return f'<span class="by"><sup{load}>v{passage.version}</sup>{colour}</span>'
