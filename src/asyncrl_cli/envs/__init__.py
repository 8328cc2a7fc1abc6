"""Environments and the groups that run in them: prompts become rewarded trajectories. This room does not import Ray.

    port.py          what an environment is: one object per trajectory, asked for turns until it ends with a reward;
                     and the environment of today's tasks: a prompt, a response, a reward
    chat.py          messages -> ids by the model's chat template, first prompts and further turns; answers.py: ids -> messages
    conversation.py  the segments of a trajectory while they are made
    episode.py       one trajectory while it is made: an environment and a model in turns
    group_runner.py  groups and evals: n trajectories at once on one engine
    tool_environment.py  the environment that a user's class is; processes.py: where it runs; call_log.py: what its tools did
    calculator.py, guess.py   the environments of the builtin tasks

`task.environment` names one. A new one is a file here and a line in `ENVIRONMENTS`, or an entry point `asyncrl.environments` of
another package: a class, or a function, that takes the task's rewards and returns an `Environment`. Or it is a user's class.
"""

from __future__ import annotations

from typing import Any

from asyncrl_cli.plugins import find
from asyncrl_cli.tasks.user_code import is_user_code

ENVIRONMENTS = {"one-turn": "asyncrl_cli.envs.port:OneTurn", "guess": "asyncrl_cli.envs.guess:Guess"}


def find_environment(name: str) -> Any:
    """The class or function that makes an environment. Raises ConfigError for an unknown name."""
    return find("task.environment", name, ENVIRONMENTS, "asyncrl.environments", also="a class of yours as module:Class")


def check_environment(name: str) -> None:
    """Raises ConfigError for an unknown name. Our own environments are not imported: that would import transformers. A user's
    class is tried out when the task is loaded."""
    if name not in ENVIRONMENTS and not is_user_code(name):
        find_environment(name)
