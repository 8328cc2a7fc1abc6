"""The tasks that come with asyncrl: looks them up by name, checks their parameters and draws their items.

All prompts differ. The eval items depend on `task.params` only, so runs with different seeds can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from pydantic import ValidationError

from asyncrl_cli.base.errors import ConfigError, did_you_mean
from asyncrl_cli.builtin.calculation import Arithmetic
from asyncrl_cli.builtin.guess import Guessing
from asyncrl_cli.contracts.item import Item, take_new
from asyncrl_cli.contracts.reward_spec import Adapter
from asyncrl_cli.profile.schema import TaskSection

MAX_TRIES_PER_PROMPT = 50

Builtin = Arithmetic | Guessing
"""A task's fields are its parameters. It draws items, whose prompts may repeat, and writes a correct and a
flawed demonstration of each. `environment`: the one that plays its episodes. `words`: texts for which
builtin:tiny gets a token each. `ceiling(items)`: the mean reward of the best play."""
BUILTIN: Mapping[str, type[Builtin]] = {"calculator": Arithmetic, "guess": Guessing}
"""By the name in `task.source = "builtin:<name>"`."""


def environment_of(task: TaskSection) -> str:
    """The name of the profile's environment. `auto` means a builtin task's own environment, or else
    one-turn."""
    if task.environment != "auto":
        return task.environment
    kind, _, name = task.source.partition(":")
    return BUILTIN[name].environment if kind == "builtin" and name in BUILTIN else "one-turn"


def builtin_task(name: str, params: Mapping[str, object]) -> Builtin:
    """The builtin task of this name. Raises ConfigError if there is none, or if `params` are wrong."""
    if name not in BUILTIN:
        known = did_you_mean(name, BUILTIN, f"builtin tasks: {', '.join(BUILTIN)}")
        raise ConfigError(f'task.source: there is no task "builtin:{name}"', hint=known)
    kind = BUILTIN[name]
    if unknown := [key for key in params if key not in kind.model_fields]:
        known = did_you_mean(unknown[0], kind.model_fields, f"it has: {', '.join(kind.model_fields)}")
        raise ConfigError(
            f'task.params.{unknown[0]}: the task "builtin:{name}" has no such parameter', hint=known
        )
    try:
        return kind.model_validate(params)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["task.params", *map(str, first["loc"])])
        given = f" = {first['input']!r:.80}" if first["loc"] else ""
        raise ConfigError(
            f"{where}{given}: {first['msg'].removeprefix('Value error, ').lower()} (builtin:{name})"
        ) from None


def drawn(task: Builtin, name: str, form: Adapter, stream: str, num: int, taken: set[str]) -> list[Item]:
    """`num` items whose prompts differ from each other and from `taken`; their prompts are added to `taken`.

    Raises ConfigError if the task does not produce that many.
    """
    rng, most = Random(f"builtin:{name} {stream}"), MAX_TRIES_PER_PROMPT * num
    found, num_tries = take_new((task.draw(rng, form) for _ in range(most)), num, taken)
    if len(found) < num:
        raise ConfigError(
            f"builtin:{name} with these parameters made only {len(found)} of {num} new prompts in "
            f"{num_tries:,} tries",
            hint="widen task.params, or lower task.train_prompts or eval.prompts",
        )
    return found
