"""Loads and plays environments made with the package `verifiers`, in child processes, like agents.

`task.python` may name another Python, which has `verifiers` but none of our dependencies: importing this
module needs only the standard library. A package of the environments hub has a function `load_environment`;
`task.params` are its arguments.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from typing import Any

from asyncrl_cli.base.child_process import ChildFailed
from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.user_code import describe
from asyncrl_cli.tasks.agents import Access, opened

Row = Mapping[str, Any]
INSTALL = (
    "pip install 'asyncrl-cli[verifiers]' and the environment's package; or, as verifiers pins many "
    "packages, into a virtual "
    "environment of their own, and --set task.python=<its python>"
)


def load_environment(name: str, params: Mapping[str, Any]) -> Any:
    """Load the environment. Raises ConfigError if this Python cannot load it, and any error of the
    environment's own package."""
    source = f'task.source = "verifiers:{name}"'
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(f"{source}: {sys.executable} does not have the package verifiers", hint=INSTALL)
    import verifiers

    if not hasattr(verifiers, "load_environment"):
        raise ConfigError(
            f"{source}: verifiers {verifiers.__version__} of {sys.executable} no longer has load_environment",
            hint="pip install 'verifiers<0.4'",
        )
    environment = verifiers.load_environment(name, **params)
    if environment.requires_group_rollouts:
        raise ConfigError(
            f"{source}: its rubric judges the rollouts of a prompt together, but here each is rewarded when "
            "it ends",
            hint="take an environment whose reward functions look at one rollout",
        )
    return environment


def read_rows(
    name: str, params: Mapping[str, Any], most_train: int | None, most_eval: int
) -> tuple[list[Row], list[Row] | None]:
    """The first rows of the environment's datasets for training and eval, as JSON values; None if it has none
    for eval. Raises ConfigError, or ChildFailed with the error of its package."""
    try:
        environment = load_environment(name, params)
        train, held_out = environment.build_dataset(), environment.build_eval_dataset()
        if train is None:
            raise ConfigError(f'task.source = "verifiers:{name}" has no dataset to train on')
        return _plain(train, most_train), None if held_out is None else _plain(held_out, most_eval)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ChildFailed(describe(error)) from None


def _plain(dataset: Any, most: int | None) -> list[Row]:
    return [json.loads(json.dumps(row, default=str)) for row in islice(dataset, most)]


def player(name: str, params: Mapping[str, Any]) -> Callable[[Item, Access], Awaitable[float]]:
    """Return a function that plays an item in the environment, over an OpenAI client, and returns the
    rubric's reward."""
    environment = load_environment(name, params)
    from verifiers.clients import OpenAIChatCompletionsClient

    async def play(item: Item, access: Access) -> float:
        async with opened(access) as client:
            model = OpenAIChatCompletionsClient(client)
            played = await environment.run_rollout(dict(item["metadata"]["row"]), model, access.model, {})
        if played["error"]:
            raise RuntimeError(f"verifiers: {played['error']}")
        return played["reward"]

    return play
