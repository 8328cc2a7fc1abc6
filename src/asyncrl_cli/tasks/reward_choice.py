"""Turns `task.reward` or `task.agent` into a RewardSpec, and tries a user's function out before the run begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.tasks.agents import check_agent
from asyncrl_cli.tasks.code_records import try_out, user_code
from asyncrl_cli.tasks.reward_spec import Adapter, RewardSpec
from asyncrl_cli.tasks.scoring import check_function
from asyncrl_cli.tasks.user_code import is_user_code

BUILT_IN = ("auto", "dataset", "exact-match", "math-verify", "none")


def resolve_reward(
    reward: str,
    *,
    dataset: str,
    params: Mapping[str, Any],
    adapter: Adapter,
    timeout_s: float = 10.0,
    only_file: str | None = None,
    directory: str | None = None,
) -> RewardSpec:
    """The spec of `task.reward`; `dataset` is "" for files. A `module:function` is tried out in a child process.

    `timeout_s`: the limit of one reward; the module's import may take as long. `only_file` and `directory`: as in
    `user_code`. Raises ConfigError.
    """
    if reward == "auto":
        reward = "dataset" if dataset and adapter == "plain" else "exact-match"
    if reward == "dataset" and not dataset:
        raise ConfigError(
            'task.reward = "dataset" is the verifier of a reasoning-gym dataset, and this source has none',
            hint='task.reward = "exact-match", "math-verify" or "module:function"',
        )
    if reward in BUILT_IN:
        return RewardSpec(kind=cast(Any, reward), dataset=dataset, params=params, adapter=adapter)
    if not is_user_code(reward):
        raise ConfigError(
            f'task.reward = "{reward}" is none of {", ".join(BUILT_IN)} and not of the form module:function',
            hint='for example task.reward = "my_rewards:score"',
        )
    code, _ = try_out(
        "task.reward",
        user_code(reward, only_file, directory),
        check_function,
        limit_s=timeout_s,
        limit_key="task.reward_timeout_s",
        expects="the function takes (item, response)",
    )
    return RewardSpec(kind="function", dataset=dataset, params=params, adapter=adapter, function=code)


def resolve_agent(
    agent: str,
    *,
    dataset: str,
    params: Mapping[str, Any],
    adapter: Adapter,
    timeout_s: float,
    only_file: str | None = None,
    directory: str | None = None,
) -> RewardSpec:
    """The spec of `task.agent`, which is tried out like a reward function. Raises ConfigError."""
    if not is_user_code(agent):
        raise ConfigError(f'task.agent = "{agent}" is not of the form module:function', hint='for example "my_agent:episode"')
    code, _ = try_out(
        "task.agent",
        user_code(agent, only_file, directory),
        check_agent,
        limit_s=timeout_s,
        limit_key="env.tool_timeout_s",
        expects="it is an async function of (client, item)",
    )
    return RewardSpec(kind="agent", dataset=dataset, params=params, adapter=adapter, function=code)
