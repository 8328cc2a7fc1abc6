"""Plays items in processes of their own: agents, and environments made with the package `verifiers`.

An agent is a user's `async def episode(client, item) -> reward`. Agents run like async rewards
(sandbox/child_rewards.py), up to 128 per process. `client` is an `openai.AsyncOpenAI` for the gateway of a
rollout worker; `client.model` is the model name to request. An agent may post its reward to the gateway and
return None.

For verifiers, `task.python` may name another Python, which has `verifiers` but none of our dependencies:
importing this module needs only the standard library. A package of the environments hub has a function
`load_environment`; `task.params` are its arguments.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from asyncrl_cli.base.child_process import ChildFailed
from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.named_code import UserCode, describe
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.tasks.rows import Row

REWARD_TIMEOUT_S = 5.0

Episode = Callable[[Any, Item], Awaitable[float | None]]


@dataclass(frozen=True, slots=True)
class Access:
    """What a client needs for one session of the gateway."""

    base_url: str
    key: str
    model: str


def load_agent(code: UserCode) -> Episode:
    """Import the agent's function. Raises any error of that import, or TypeError if the function cannot be an
    agent."""
    function: Episode = code.load()
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{code.attribute} is not an async function")
    try:
        inspect.signature(function).bind(None, {})
    except TypeError as error:
        raise TypeError(
            f"{code.attribute}{inspect.signature(function)} cannot be called with (client, item): {error}"
        ) from error
    return function


def agent_player(code: UserCode) -> Callable[[Item, Access], Awaitable[float]]:
    """Return a function that plays an item with the agent and returns its reward. Raises the errors of
    `load_agent`."""
    import openai  # noqa: F401  (the import takes seconds: longer than an episode may block its process)

    function = load_agent(code)

    async def play(item: Item, access: Access) -> float:
        async with opened(access) as client:
            reward = await function(client, item)
        if reward is None:
            async with opened(access) as client:  # the agent may have closed the first client
                at_once = client.with_options(timeout=REWARD_TIMEOUT_S, max_retries=0)
                url = f"{access.base_url.removesuffix('/v1')}/reward"
                reward = (await at_once.get(url, cast_to=object))["reward"]
        if reward is None:
            raise ValueError("the agent returned None and did not post a reward")
        return reward

    return play


@asynccontextmanager
async def opened(access: Access) -> AsyncIterator[Any]:
    """An OpenAI client for the session."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    # Loopback needs no certificates (loading them takes longer than a request) and none of the machine's
    # proxies.
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
    async with AsyncOpenAI(base_url=access.base_url, api_key=access.key, http_client=http) as client:
        client.model = access.model  # type: ignore[attr-defined]
        yield client


INSTALL = (
    "pip install 'asyncrl-cli[verifiers]' and the environment's package; or, as verifiers pins many "
    "packages, into a virtual environment of their own, and --set task.python=<its python>"
)


def load_environment(name: str, params: Mapping[str, object]) -> Any:
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
        why = "its rubric judges the rollouts of a prompt together, but here each is rewarded when it ends"
        hint = "take an environment whose reward functions look at one rollout"
        raise ConfigError(f"{source}: {why}", hint=hint)
    return environment


def read_rows(
    name: str, params: Mapping[str, object], most_train: int | None, most_eval: int
) -> tuple[list[Row], list[Row] | None]:
    """The first rows of the environment's datasets for training and eval, as JSON values; None if it has none
    for eval. Raises ConfigError, or ChildFailed with the error of its package."""
    try:
        environment = load_environment(name, params)
        train, held_out = environment.build_dataset(), environment.build_eval_dataset()
        if train is None:
            hint = "take an environment whose load_environment gives it a dataset"
            raise ConfigError(f'task.source = "verifiers:{name}" has no dataset to train on', hint=hint)
        return _plain(train, most_train), None if held_out is None else _plain(held_out, most_eval)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ChildFailed(describe(error)) from None


def _plain(dataset: Iterable[object], most: int | None) -> list[Row]:
    return [json.loads(json.dumps(row, default=str)) for row in islice(dataset, most)]


def verifiers_player(name: str, params: Mapping[str, object]) -> Callable[[Item, Access], Awaitable[float]]:
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
        return float(played["reward"])

    return play
