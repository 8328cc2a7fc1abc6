"""What builtin:tiny is taught: prompts of the training split with responses, a given share of which has a slip in it.

The slips are the room that RL has: a model taught without any would begin near its end, and one taught by nothing would
begin at 0, where no reward tells a good response from a bad one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from asyncrl_cli.errors import ConfigError

Demonstration = Callable[[Mapping[str, Any], Random], str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a task has to teach: the prompts of both splits, and responses to them.

    `demonstration` is a correct response to an item, `flawed_demonstration` one with a slip in it; None where the task knows none.
    """

    name: str
    train: Sequence[Mapping[str, Any]]
    eval: Sequence[Mapping[str, Any]]
    demonstration: Demonstration
    flawed_demonstration: Demonstration = None


class Lesson(NamedTuple):
    prompt: str
    response: str


def make_lessons(task: Course, *, num: int, label_noise: float, seed: int) -> list[Lesson]:
    """`num` lessons: the training items in random order, again and again.

    Raises ConfigError if the task shows no working.
    """
    if task.demonstration is None or task.flawed_demonstration is None:
        raise ConfigError(
            f'model.path = "builtin:tiny" learns from demonstrations, and {task.name} has none in this form',
            hint='task.source = "reasoning-gym:number_sorting" has, or name a pretrained model',
        )
    rng = Random(f"lessons {seed}")
    items = list(task.train)
    lessons: list[Lesson] = []
    while len(lessons) < num:
        rng.shuffle(items)
        for item in items[: num - len(lessons)]:
            teach = task.flawed_demonstration if rng.random() < label_noise else task.demonstration
            lessons.append(Lesson(prompt=item["prompt"], response=teach(item, rng)))
    return lessons


def characters_of(task: Course, lessons: Sequence[Lesson]) -> list[str]:
    """Every character of any prompt or lesson, sorted: the tokenizer's vocabulary."""
    texts = [item["prompt"] for split in (task.train, task.eval) for item in split]
    texts += [text for lesson in lessons for text in lesson]
    return sorted(set().union(*texts))
