"""`task.reward` -> the spec of a reward that has been tried."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from asyncrl_cli.errors import ConfigError, PreflightError
from asyncrl_cli.tasks.child import ChildFailed, ChildTimedOut, call_once
from asyncrl_cli.tasks.reward_module import import_root
from asyncrl_cli.tasks.reward_worker import Ready, try_out
from asyncrl_cli.tasks.scoring import Adapter, RewardSpec

START_LIMIT_S = 10.0
BUILT_IN = ("auto", "dataset", "exact-match", "math-verify")


def resolve_reward(
    reward: str,
    *,
    dataset: str,
    params: Mapping[str, Any],
    adapter: Adapter,
    timeout_s: float = START_LIMIT_S,
    only_file: str | None = None,
) -> RewardSpec:
    """The spec of `task.reward`; `dataset` is "" for files. A `module:function` is tried in a process of its own.

    `timeout_s` is that of one reward; the module's import may take as long, and at least START_LIMIT_S. `only_file`: the module is
    imported from this file or not at all.
    """
    if reward == "auto":
        reward = "dataset" if dataset and adapter == "plain" else "exact-match"
    if reward == "dataset" and not dataset:
        raise ConfigError(
            'task.reward = "dataset" is the verifier of a reasoning-gym dataset, and a file has none',
            hint='task.reward = "exact-match", "math-verify" or "module:function"',
        )
    if reward == "math-verify" and importlib.util.find_spec("math_verify") is None:
        raise PreflightError(f'task.reward = "{reward}": the package is missing', hint="pip install math-verify")
    if reward in BUILT_IN:
        return RewardSpec(kind=cast(Any, reward), dataset=dataset, params=params, adapter=adapter)
    module, colon, function = reward.partition(":")
    if not (colon and module and function):
        raise ConfigError(
            f'task.reward = "{reward}" is none of {", ".join(BUILT_IN)} and not of the form module:function',
            hint='for example task.reward = "my_rewards:score"',
        )
    spec = RewardSpec(
        kind="function",
        dataset=dataset,
        params=params,
        adapter=adapter,
        function=reward,
        import_path=os.getcwd() if only_file is None else import_root(reward, only_file),
        module_file=only_file or "",
        only_there=only_file is not None,
    )
    return replace(spec, module_file=_tried(spec, max(START_LIMIT_S, timeout_s)))


def _tried(spec: RewardSpec, limit_s: float) -> str:
    """The file of the function's module, as a process that does nothing else has found it. ConfigError if it cannot be used."""
    try:
        ready: Ready = call_once(try_out, spec, timeout_s=limit_s)
    except ChildTimedOut:
        raise ConfigError(
            f'task.reward = "{spec.function}" cannot be used: its module was not imported within {limit_s:g} s',
            hint="move what takes long into the function's first call, or raise task.reward_timeout_s: an import may take as long",
        ) from None
    except ChildFailed as failure:
        ready = Ready(failure=str(failure))
    if ready.failure:
        where = "only from there, as the run's record says" if spec.only_there else f"in {spec.import_path} first"
        raise ConfigError(
            f'task.reward = "{spec.function}" cannot be used: {ready.failure}',
            hint=f"the module is imported {where}; the function takes (item, response)",
        )
    return ready.module_file
