"""Agents: user functions that play an item through an OpenAI client, `async def episode(client, item) ->
reward`.

They run like async rewards (sandbox/child_rewards.py), up to 128 per process. `client` is an `openai.AsyncOpenAI` for
the gateway of a rollout worker; `client.model` is the model name to request. An agent may post its reward to
the gateway and return None.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.user_code import UserCode

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
    function = code.load()
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{code.attribute} is not an async function")
    try:
        inspect.signature(function).bind(None, {})
    except TypeError as error:
        raise TypeError(
            f"{code.attribute}{inspect.signature(function)} cannot be called with (client, item): {error}"
        ) from error
    return function


def player(code: UserCode) -> Callable[[Item, Access], Awaitable[float]]:
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
                reward = (await at_once.get(f"{access.base_url.removesuffix('/v1')}/reward", cast_to=object))[
                    "reward"
                ]
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
