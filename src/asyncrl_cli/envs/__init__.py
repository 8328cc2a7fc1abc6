"""Environments and the groups that run in them: prompts become rewarded trajectories. This room does not
import Ray.

    chat.py              messages -> ids by the model's chat template, first prompts and further turns
    answers.py           ids -> messages
    conversation.py      the growing segments of one trajectory
    episode.py           plays one trajectory: an environment and a model take turns
    group_runner.py      groups and evals: n trajectories at once on one engine
    slots.py             which trajectories may generate
    tool_environment.py  runs a user's class as an environment; logs its tool calls before they run
    gateway/             OpenAI's API for users' agents

What an environment is stands in contracts/environment.py: one object per trajectory, asked for turns until it
ends with a reward.

`task.environment` names one. A new one is a file here and a line in `ENVIRONMENTS`; or an entry point
`asyncrl.environments` of another package, a class or function that takes the task's rewards and returns an
`Environment`; or a user's class.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl_cli.base.named_code import find_plugin, is_user_code
from asyncrl_cli.contracts.environment import Environment, Rewards

Factory = Callable[[Rewards], Environment]
ENVIRONMENTS = {
    "one-turn": "asyncrl_cli.contracts.environment:OneTurn",
    "guess": "asyncrl_cli.builtin.builtin_tasks:Guess",
}


def find_environment(name: str) -> Factory:
    """The class or function that makes an environment. Raises ConfigError for an unknown name."""
    also = "a class of yours as module:Class"
    make: Callable[[Rewards], Environment] = find_plugin(
        "task.environment", name, ENVIRONMENTS, "asyncrl.environments", also=also
    )
    return make


def check_environment(name: str) -> None:
    """Raises ConfigError for an unknown name. Our own environments are not imported: that would import
    transformers. A user's class is tried out when the task is loaded."""
    if name not in ENVIRONMENTS and not is_user_code(name):
        find_environment(name)
