"""Environments and the groups that run in them: prompts become rewarded trajectories. This room does not import Ray.

    port.py          what an environment is: one object per trajectory, asked for turns until it ends with a reward;
                     and the environment of today's tasks: a prompt, a response, a reward
    chat.py          messages -> ids by the model's chat template, first prompts and further turns; answers.py: ids -> messages
    conversation.py  the segments of a trajectory while they are made
    episode.py       one trajectory while it is made: an environment and a model in turns
    group_runner.py  groups and evals: n trajectories at once on one engine
    calculator.py, guess.py   the environments of the builtin tasks

`task.environment` names one. A new one is a file here and a line in `ENVIRONMENTS`, or an entry point `asyncrl.environments` of
another package: a class, or a function, that takes the task's rewards and returns an `Environment`.
"""

from __future__ import annotations

from typing import Any

from asyncrl_cli.plugins import find
from asyncrl_cli.profile.schema import TaskSection
from asyncrl_cli.tasks.builtin import BUILTIN

ENVIRONMENTS = {"one-turn": "asyncrl_cli.envs.port:OneTurn", "guess": "asyncrl_cli.envs.guess:Guess"}


def environment_of(task: TaskSection) -> str:
    """The environment that a profile asks for; `auto` is that of a builtin task, or one-turn."""
    if task.environment != "auto":
        return task.environment
    kind, _, name = task.source.partition(":")
    return BUILTIN[name][1].environment if kind == "builtin" and name in BUILTIN else "one-turn"


def find_environment(name: str) -> Any:
    """The class or function that makes an environment. Raises ConfigError for an unknown name."""
    return find("task.environment", name, ENVIRONMENTS, "asyncrl.environments")


def check_environment(name: str) -> None:
    """Raises ConfigError for an unknown name. Our own environments are not imported: that would import transformers."""
    if name not in ENVIRONMENTS:
        find_environment(name)
