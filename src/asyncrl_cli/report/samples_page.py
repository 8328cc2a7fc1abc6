"""Trajectories as a part of a page: folded, each with its figures on the fold, its text by version inside."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import chain, islice

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.trajectories import NOT_SAMPLED
from asyncrl_cli.observe.format import evenly
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.report.dumps import AGE_COLOURS, Passage, Sampled, trajectories_of

MAX_STEPS, PER_STEP = 12, 4
MAX_CHARACTERS = 1_000_000
"""Limit for all trajectories on a page together: it is for reading, `asyncrl samples` has the rest."""
NOTABLE_CHANGE = 0.2
"""A token is marked if the trainer's probability of it differs by this much from the sampler's."""
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
    "Dashed: the trainer gave the token a probability that differs by 0.2 or more."
)


def samples_html(run: Recorded, title: str = "Samples", max_characters: int = MAX_CHARACTERS) -> str:
    """A section with some trajectories of dumped steps, spread over the run; empty if there are none. For a
    dump that cannot be read the error is shown in its place."""
    parts, room = [], max_characters
    for text in chain.from_iterable(_of_step(run, step) for step in evenly(run.sampled_steps, MAX_STEPS)):
        if (room := room - len(text)) < 0:
            parts.append('<p class="dim">The rest does not fit here: asyncrl samples shows it.</p>')
            break
        parts.append(text)
    if not parts:
        return ""
    head = f'<style>{AGES}</style><h2>{escape(title)}</h2><p class="dim">{LEGEND}</p>'
    return f'<section class="samples">{head}{"".join(parts)}</section>'


def _of_step(run: Recorded, step: int) -> Iterator[str]:
    try:
        yield from map(_folded, islice(trajectories_of(run, step), PER_STEP))
    except ConfigError as error:
        yield f'<p class="dim">{escape(error.message)}</p>'


def _folded(one: Sampled) -> str:
    advantage, sampler, trainer = (
        one.line.get("advantage"),
        one.probability(one.logprobs),
        one.trainer_probability,
    )
    facts = [f"step {one.step}", f"{one.group}/{one.number}", f"reward {one.reward:.4g}"]
    facts += [f"advantage {advantage:+.3g}"] if advantage is not None else []
    facts += [f"{len(one.sampled)} tokens", f"staleness {one.staleness}", f"span {one.span}"]
    if sampler:
        by_trainer = f", trainer's {trainer:.3f}" if trainer is not None else ""
        facts.append(f"mean probability {sampler:.3f}{by_trainer}")
    parts = [f'<details class="sample"><summary>{escape(" · ".join(facts))}</summary>']
    if one.answer is not None:
        parts.append(f'<div class="turn"><b>expected</b><div>{escape(one.answer)}</div></div>')
    for speaker, passages in one.turns:
        text = "".join(_marked(one, passage) for passage in passages)
        parts.append(f'<div class="turn {speaker}"><b>{speaker}</b><div>{text}</div></div>')
    return "".join([*parts, "</details>"])


def _marked(one: Sampled, passage: Passage) -> str:
    if passage.version == NOT_SAMPLED:
        return f'<span class="told">{escape(one.text(passage))}</span>'
    tokens = []
    for index in passage.tokens:
        text = escape(one.texts[index])
        sampler, trainer = one.both_probabilities.get(index, (0.0, 0.0))
        if abs(sampler - trainer) >= NOTABLE_CHANGE:
            text = f'<mark title="sampler {sampler:.3f}, trainer {trainer:.3f}">{text}</mark>'
        tokens.append(text)
    load = ' class="load"' if passage.is_load else ""
    colour = f'<span class="age{one.age(passage.version)}">{"".join(tokens)}</span>'
    return f'<span class="by"><sup{load}>v{passage.version}</sup>{colour}</span>'
