"""A rehearsal of the reward before a run: does it reward the reference answers, and nothing that is no
answer?

    items -> the reference in the usual forms ──> reward processes ──> rewards ─┬─> table
          -> the prompt, nothing, other answers ─┘                              └─> warnings, or an error

No model is needed. What counts is what an advantage sees, the differences within an item: a text is rewarded
like a right answer if it earns more than the least of the item's texts, and at least half of the way to the
most that a form of the reference earns.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from asyncrl_cli.base.errors import ConfigError, timeout
from asyncrl_cli.base.named_code import describe
from asyncrl_cli.contracts.item import Item, UnknownField, messages_of, strict_item
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.sandbox.parent_rewards import RewardFailed, RewardPool, default_workers
from asyncrl_cli.tasks.code_choice import environment_of
from asyncrl_cli.tasks.files import KINDS
from asyncrl_cli.tasks.reward_functions import build_reward
from asyncrl_cli.tasks.task import Task

LIMIT_S = 20.0
"""For all texts together, once the reward's process has started."""
MAX_PROBED, AT_ONCE = 8, 4
"""Items tried if none has an answer; items scored at the same time, so that some are done when the time is
up."""
BLIND = ("", "1", "The answer is 1.")
"""Responses for items without an answer, beside the prompt."""
FORMS = {
    "the reference answer as it is": "{}",
    "... in \\boxed{}": "\\boxed{{{}}}",
    "... after ####": "#### {}",
    '... after "The answer is"': "The answer is {}.",
    '... after "Answer:"': "Answer: {}",
    "... in <answer> tags": "<think>\n\n</think>\n<answer>{}</answer>",
}
PROMPT, EMPTY, OTHER = "the prompt repeated", "an empty text", "another item's answer"
EXPRESSION = "the prompt's expression, not worked out"
FOILS = {PROMPT: 0.0, EXPRESSION: 0.0, EMPTY: 0.0, OTHER: 0.05}
"""What must not score, and the share of items on which it may without a warning: some tasks have several
right answers."""
ARITHMETIC = re.compile(r"\(*\d[\d\s+\-*/^×÷().]*[\d)]")  # noqa: RUF001
OPERATION = re.compile(r"[+*/^×÷]|\s-\s")  # noqa: RUF001
WITHOUT_IT = "task.rehearsal_items = 0 starts the run without a rehearsal"

Score = Callable[[Item, str], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Scored:
    """A text that was scored for an item. `reward` is None if the reward failed, and `failure` says how."""

    item: Item
    text: str
    reward: float | None
    failure: str = ""
    is_right: bool = False

    @property
    def earned(self) -> float:
        return float("-inf") if self.reward is None else self.reward

    @property
    def outcome(self) -> str:
        return f"it failed: {self.failure:.200}" if self.reward is None else f"reward {self.reward:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """`rows`: by what the texts are, in the table's order. `reason`: why there are none. `unscored`: a text
    of each item whose reference scores in no form. `misread`: fields that the reward reads and no item
    has."""

    name: str
    rows: dict[str, list[Scored]] = field(default_factory=dict)
    reason: str = ""
    wall_s: float = 0.0
    unscored: Sequence[Scored] = ()
    num_items: int = 0
    refusal: ConfigError | None = None
    blind: Sequence[Scored] = ()
    misread: str = ""

    def lines(self) -> list[str]:
        """The table as text."""
        if not self.rows:
            return [f"reward: {self.name}, not rehearsed: {self.reason}"]
        width = max(map(len, self.rows))
        title = f"reward: {self.name}, rehearsed on {self.num_items} items in {self.wall_s:.1f} s"
        lines = [title, f"{'':{width}}  mean reward  like a right answer"]
        for what, scored in self.rows.items():
            rewards = [one.reward for one in scored if one.reward is not None]
            mean = f"{sum(rewards) / len(rewards):11.3f}" if rewards else f"{'failed':>11}"
            lines.append(f"{what:{width}}  {mean}  {sum(one.is_right for one in scored):>6} of {len(scored)}")
        return lines

    def document(self) -> dict[str, object]:
        """The table as JSON."""
        rows = {
            what: {
                "texts": len(scored),
                "like_right": sum(one.is_right for one in scored),
                "failed": sum(one.reward is None for one in scored),
                "rewards": [one.reward for one in scored],
            }
            for what, scored in self.rows.items()
        }
        return {
            "reward": self.name,
            "items": self.num_items,
            "reason": self.reason,
            "rows": rows,
            "warnings": self.warnings(),
        }

    def warnings(self) -> list[str]:
        """What the user should look at, with the worst example of each kind."""
        found = []
        if 0 < len(self.unscored) < self.num_items:  # all of them are an error, with the same example
            worst = self.unscored[0]
            found.append(
                f"task.reward: for {len(self.unscored)} of {self.num_items} items the reference answer "
                f"scores in none of the usual forms, for example {worst.item['answer']!r:.60}: "
                f"{_unscored(worst)}"
            )
        for what, most in FOILS.items():
            scored = self.rows.get(what, [])
            right = [one for one in scored if one.is_right]
            if len(right) > most * len(scored):
                worst = max(right, key=lambda one: one.reward or 0.0)
                found.append(
                    f"task.reward: {what}{',' * (',' in what)} is rewarded like a right answer for "
                    f"{len(right)} of {len(scored)} items, for example {worst.text!r:.100}: {worst.outcome}, "
                    f"where the answer is {worst.item['answer']!r:.60}"
                )
        if self.misread:
            found.append(f"task.reward reads {self.misread}")
        texts = [*self.blind, *(one for scored in self.rows.values() for one in scored)]
        if failed := [one for one in texts if one.reward is None]:
            found.append(
                f"task.reward failed for {len(failed)} of {len(texts)} texts, and such trajectories are left "
                f"out; for example on {failed[-1].text!r:.100}: {failed[-1].failure:.200}"
            )
        return found

    def check(self) -> None:
        """Raises ConfigError if there are references and none of them scores in any form, or the reward asks
        for missing ones."""
        if self.refusal is not None:
            raise self.refusal
        if not self.rows or len(self.unscored) < self.num_items:
            return
        worst = self.unscored[0]
        if len({one.reward for scored in self.rows.values() for one in scored}) == 1 and worst.reward:
            raise ConfigError(
                f"task.reward = {self.name} does not tell right from wrong: every text earns "
                f"{worst.reward:g}, on {self.num_items} items",
                hint=f"check the reward; if it is meant to be so, {WITHOUT_IT}",
            )
        raise ConfigError(
            f"task.reward = {self.name}: no reference answer scores in any of the usual forms, on "
            f"{self.num_items} items; for example {worst.text!r:.100}: {_unscored(worst)}, where the answer "
            f"is {worst.item['answer']!r:.60}",
            hint=f"check task.answer_key and the reward; if it is meant to be so, {WITHOUT_IT}",
        )


def _unscored(one: Scored) -> str:
    """The outcome of a reference that earns no more than the item's other texts, which may be more than 0."""
    return f"{one.outcome}, and no text that it judged earns less" if one.reward else one.outcome


async def rehearse(profile: Profile, task: Task, log_path: Path = Path(os.devnull)) -> Rehearsal:
    """Rehearse the task's reward on `task.rehearsal_items` training items, within LIMIT_S. The caller shows
    the result and calls its `check`. Raises ExecutorFailed if the reward cannot be started. `log_path`: the
    file for what the reward prints."""
    kind, most = task.reward.kind, profile.task.rehearsal_items
    code = task.reward.function
    name = " + ".join(f'"{part.name}"' for part in task.reward.parts) or f'"{code.name if code else kind}"'
    if most == 0:
        return Rehearsal(name=name, reason="task.rehearsal_items = 0")
    if kind == "none":
        return Rehearsal(name=name, reason="a reward model scores the responses")
    plays_turns = environment_of(profile.task) != "one-turn" and task.tool_class is None
    if task.reward.plays or kind == "episode" or plays_turns:
        why = "episodes of several turns get their rewards as a model plays them"
        return Rehearsal(name=name, reason=why)
    items = [item for item in task.train if task.expected(item) is not None]
    # of items that are generated, a plan has only the first
    is_file = profile.task.source.partition(":")[0] in KINDS
    chosen = Random(0).sample(items, most) if is_file and len(items) > most else items[:most]
    began_s = time.monotonic()
    if kind == "exact-match":  # ours, and quick: it needs no process
        function = build_reward(task.reward)

        async def score(item: Item, text: str) -> float:
            try:
                return float(function(item, text))
            except Exception as error:  # as in a reward process
                raise RewardFailed(describe(error)) from error

        return await _rehearsed(name, task, chosen, score, began_s)
    limit_s = min(LIMIT_S, profile.task.reward_timeout_s)
    pool = RewardPool(task.reward, timeout_s=limit_s, workers=default_workers(), log_path=log_path)
    try:
        await pool.start()
        if not items:
            return await _tried_blind(name, task, pool.score)
        found = await _rehearsed(name, task, chosen, pool.score, began_s)
        texts = [one.text for row in found.rows.values() for one in row[:1]]
        return replace(found, misread=await _misread(task, chosen[0], texts, pool.score))
    finally:
        await pool.close()


async def _rehearsed(name: str, task: Task, items: Sequence[Item], score: Score, began_s: float) -> Rehearsal:
    rows: dict[str, list[Scored]] = {}
    unscored: list[Scored] = []
    num_items = 0
    turns = asyncio.Semaphore(AT_ONCE)

    async def rehearse_item(index: int) -> None:
        nonlocal num_items
        async with turns:
            scored = await _scored_item(task, items, index, score)
        num_items += 1
        for what, one in scored.items():
            rows.setdefault(what, []).append(one)
        if not any(one.is_right for what, one in scored.items() if what not in FOILS):
            unscored.append(next(iter(scored.values())))

    with suppress(TimeoutError):
        async with timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for index in range(len(items)):
                tasks.create_task(rehearse_item(index))
    return Rehearsal(
        name=name,
        rows={what: rows[what] for what in (*FORMS, *FOILS) if what in rows},
        reason="" if rows else f"no item was scored within {LIMIT_S:g} s",
        wall_s=time.monotonic() - began_s,
        unscored=unscored,
        num_items=num_items,
    )


async def _scored_item(task: Task, items: Sequence[Item], index: int, score: Score) -> dict[str, Scored]:
    """All texts of an item, by what they are. Answers that are wrong have the form in which this item's own
    earns most."""
    item, expected = items[index], str(task.expected(items[index]))
    forms = FORMS if task.reward.adapter == "plain" else dict([next(iter(FORMS.items()))])

    async def scored(texts: Mapping[str, str]) -> dict[str, Scored]:
        found = await asyncio.gather(*(_score(item, text, score) for text in texts.values()))
        return dict(zip(texts, found, strict=True))

    found = await scored({what: form.format(expected) for what, form in forms.items()})
    best = max(found, key=lambda what: found[what].earned)
    asked = messages_of(item["prompt"])[-1]["content"]
    foils = {PROMPT: asked, EMPTY: ""}
    # The longest arithmetic expression in the prompt that is not the answer itself.
    expressions = [text.strip() for text in ARITHMETIC.findall(asked) if OPERATION.search(text)]
    others = [text for text in expressions if text.replace(" ", "") != expected.replace(" ", "")]
    if others:
        foils[EXPRESSION] = forms[best].format(max(others, key=len))
    # The next item's answer that differs from this one.
    following = (str(task.expected(items[(index + step) % len(items)])) for step in range(1, len(items)))
    plain = expected.strip().casefold()
    other = next((answer for answer in following if answer.strip().casefold() != plain), None)
    if other is not None:
        foils[OTHER] = forms[best].format(other)
    found |= await scored(foils)
    least = min((one.reward for one in found.values() if one.reward is not None), default=0.0)
    middle = (least + found[best].earned) / 2
    return {
        what: replace(one, is_right=one.earned > least and one.earned >= middle)
        for what, one in found.items()
    }


async def _score(item: Item, text: str, score: Score) -> Scored:
    try:
        return Scored(item, text, await score(item, text))
    except RewardFailed as failed:
        return Scored(item, text, None, str(failed))


async def _misread(task: Task, item: Item, texts: Sequence[str], score: Score) -> str:
    """What a function of the user's reads with `get` from an item, and what no item has; "" if there is
    nothing, or no time to find it."""
    strict = strict_item(item, task.train)
    with suppress(TimeoutError):
        async with timeout(LIMIT_S):
            for text in dict.fromkeys(texts) if task.reward.functions else ():
                kind, _, read = (await _score(strict, text, score)).failure.partition(": ")
                if kind == UnknownField.__name__ and read.endswith(")"):  # else no code of the user's read it
                    return read
    return ""


async def _tried_blind(name: str, task: Task, score: Score) -> Rehearsal:
    """For items without answers: the reward is refused if it fails for every response, or if it reads
    `item["answer"]` and tells no response from another."""
    tried, asks, items = list[Scored](), False, task.train[:MAX_PROBED]
    for item in items:
        texts = (messages_of(item["prompt"])[-1]["content"], *BLIND)
        tried += [await _score(item, text, score) for text in texts]
        without = {key: value for key, value in item.items() if key != "answer"}
        asks |= (await _score(without, "1", score)).failure.startswith("KeyError: 'answer'")
    columns = ", ".join(list(items[0]["metadata"])[:10]) or "none besides the prompt"
    rewards, wrong = {one.reward for one in tried}, ""
    if asks and len(rewards) == 1:
        wrong = 'reads item["answer"], but no item has an answer, and all responses earn the same'
        hint = "task.answer_key names the column with the answers, or `column.field`; the columns are: "
        hint += columns
    elif rewards == {None}:
        last = tried[-1]
        wrong = f"failed for every response that it was tried with, on {len(items)} items; for example "
        wrong += f"on {last.text!r}: {last.failure:.300}"
        hint = f'columns besides prompt and answer are in item["metadata"]: {columns}; {WITHOUT_IT}'
    return Rehearsal(
        name=name,
        reason="no item has an answer to try it with",
        refusal=ConfigError(f"task.reward = {name} {wrong}", hint=hint) if wrong else None,
        blind=tried,
        misread=await _misread(task, items[0], [one.text for one in tried[: 1 + len(BLIND)]], score),
    )
