"""Trajectories in a terminal. Colours say how old the version of a token is; without colours, marks in the
text say the same."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from asyncrl_cli.contracts.trajectories import NOT_SAMPLED
from asyncrl_cli.report.trajectories import AGE_COLOURS, CALL, Passage, Sampled

MARK, LOAD = "(v{})", "(load v{})"
"""Before the tokens of a version, and where new weights were loaded within an answer."""


def shown(sampled: Sampled) -> RenderableType:
    """One trajectory: what it is, what its tokens were worth, and its text turn by turn."""
    return Group(Rule(_title(sampled), align="left", style="dim"), *_facts(sampled), _turns(sampled))


def _title(one: Sampled) -> Text:
    title = Text(f"step {one.step}  {one.group}  trajectory {one.number}  ", "bold")
    title.append(f"reward {one.reward:.4g}", "bold")
    advantage = one.line.get("advantage")
    return title.append(f"  advantage {advantage:+.3g}", "bold") if advantage is not None else title


def _facts(one: Sampled) -> list[Text]:
    versions = Text()
    for version in one.own_versions:
        versions.append(f"v{version}", AGE_COLOURS[one.age(version)]).append(" ")
    age = f"oldest {one.staleness} behind window v{one.window}" if one.staleness else f"window v{one.window}"
    ended = f"ended: {one.line.get('finish_reason', '?')}"
    first = Text.assemble(f"{len(one.sampled)} tokens sampled by ", versions, f"({age}), {ended}")
    if rewards := one.line.get("turn_rewards"):
        first.append(f", rewards {' '.join(f'{reward:.3g}' for reward in rewards)}")
    expected = [] if one.answer is None else [Text.assemble("expected: ", (one.answer, "bold"))]
    sampler = one.probability(one.logprobs)
    if sampler is None:
        return [first, *expected]
    second = Text(f"mean probability: sampler {sampler:.3f}")
    if one.both_probabilities:
        second.append(f", trainer {one.trainer_probability:.3f}")
        token, (before, after) = max(
            one.both_probabilities.items(), key=lambda entry: abs(entry[1][0] - entry[1][1])
        )
        if f"{before:.3f}" != f"{after:.3f}":
            second.append(f"; most changed {one.texts[token]!r}: {before:.3f} -> {after:.3f}")
    return [first, second, *expected]


def _turns(one: Sampled) -> Table:
    """A row for each turn: who speaks, and the text."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for whose, stretches in one.turns:
        table.add_row(whose, Text.assemble(*(_coloured(one, stretch) for stretch in stretches)))
    return table


def _coloured(one: Sampled, stretch: Passage) -> Text:
    if stretch.version == NOT_SAMPLED:
        return Text(one.text(stretch), "dim")
    style, mark = (
        AGE_COLOURS[one.age(stretch.version)],
        (LOAD if stretch.is_load else MARK).format(stretch.version),
    )
    said = Text(one.text(stretch), style)
    said.highlight_regex(CALL, "bold")
    return Text().append(mark, f"dim {style}").append_text(said)
