"""Environments and the groups that run in them: prompts become rewarded trajectories. This room does not import Ray.

    port.py          what an environment is: one object per trajectory, asked for turns until it ends with a reward;
                     and the environment of today's tasks: a prompt, a response, a reward
    episode.py       one trajectory while it is made: messages -> tokens -> the arrays that it becomes
    group_runner.py  groups and evals: n trajectories at once on one engine

`task.environment` names one. A new one is a file here and a line in `ENVIRONMENTS`, or an entry point `asyncrl.environments` of
another package: a class, or a function, that takes the task's rewards and returns an `Environment`.
"""

from __future__ import annotations

from typing import Any

from asyncrl_cli.plugins import find

ENVIRONMENTS = {"one-turn": "asyncrl_cli.envs.port:OneTurn"}


def find_environment(name: str) -> Any:
    """The class or function that makes an environment. Raises ConfigError for an unknown name."""
    return find("task.environment", name, ENVIRONMENTS, "asyncrl.environments")


def check_environment(name: str) -> None:
    """Raises ConfigError for an unknown name. Our own environments are not imported: that would import transformers."""
    if name not in ENVIRONMENTS:
        find_environment(name)
