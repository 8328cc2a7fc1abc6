"""What a task's reward is: a small picklable description that a reward process builds the real thing from."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl_cli.errors import ConfigError, PreflightError
from asyncrl_cli.tasks.child import ChildFailed, call_once
from asyncrl_cli.tasks.frames import Hello, Ready

WORKER = "asyncrl_cli.tasks.reward_worker"
CHECK_TIMEOUT_S = 60.0
BUILT_IN = ("auto", "exact-match", "math-verify")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """`dataset` and `params` say which verifier and whose items; `adapter` how the answer is found in a response.

    `import_path` is the directory that a `module:function` is looked up in first: where the command was started.
    """

    kind: Literal["dataset", "exact-match", "math-verify", "function"]
    dataset: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    adapter: Literal["plain", "worked"] = "plain"
    function: str = ""
    import_path: str = ""


def resolve_reward(reward: str, *, dataset: str, params: Mapping[str, Any], adapter: Literal["plain", "worked"]) -> RewardSpec:
    """The spec of `task.reward`; `dataset` is "" for files. A `module:function` is tried in a process of its own."""
    if reward == "auto":
        kind: Literal["dataset", "exact-match"] = "dataset" if dataset else "exact-match"
        return RewardSpec(kind=kind, dataset=dataset, params=params, adapter=adapter)
    if reward == "exact-match":
        return RewardSpec(kind="exact-match", dataset=dataset, params=params, adapter=adapter)
    if reward == "math-verify":
        if importlib.util.find_spec("math_verify") is None:
            raise PreflightError(f'task.reward = "{reward}": the package is missing', hint="pip install math-verify")
        return RewardSpec(kind="math-verify", dataset=dataset, params=params, adapter=adapter)
    spec = RewardSpec(
        kind="function", dataset=dataset, params=params, adapter=adapter, function=reward, import_path=str(Path.cwd())
    )
    _check_function(spec)
    return spec


def _check_function(spec: RewardSpec) -> None:
    module, colon, function = spec.function.partition(":")
    if not (colon and module and function):
        raise ConfigError(
            f'task.reward = "{spec.function}" is none of {", ".join(BUILT_IN)} and not of the form module:function',
            hint='for example task.reward = "my_rewards:score"',
        )
    reason = _try_in_worker(spec)
    if reason:
        raise ConfigError(
            f'task.reward = "{spec.function}" cannot be used: {reason}',
            hint=f"the module is looked up in {spec.import_path} first; the function takes (item, response)",
        )


def _try_in_worker(spec: RewardSpec) -> str:
    """Why a reward process cannot start with `spec`; "" if it can."""
    try:
        ready: Ready = call_once(WORKER, Hello(spec=spec, timeout_s=CHECK_TIMEOUT_S), "-", timeout_s=CHECK_TIMEOUT_S)
    except ChildFailed as failure:
        return str(failure)
    return ready.failure
