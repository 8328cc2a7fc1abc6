"""What gives rewards and plays episodes: resolves `task.reward` or `task.agent` to a RewardSpec,
`task.environment` to a ToolClass.

User code is tried out before the run begins. `run_dir` is set for a resumed run: see `try_out`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from asyncrl_cli.base.errors import ConfigError, did_you_mean
from asyncrl_cli.builtin.builtin_tasks import environment_of
from asyncrl_cli.contracts.reward_spec import RewardPart, RewardSpec
from asyncrl_cli.contracts.user_code import UserCode, is_user_code
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.agents import load_agent
from asyncrl_cli.tasks.code_records import Notes, try_out
from asyncrl_cli.tasks.reward_functions import load_function
from asyncrl_cli.tasks.tool_class import ToolClass, check_reward, inspect_class

BUILT_IN = ("auto", "dataset", "exact-match", "math-verify", "none")
EXPECTED = (
    "the function must take (item, response), or have the parameters of TRL's rewards or of verl's "
    "compute_score"
)
IMPORT_LIMIT_S = 30.0
"""Minimum time allowed for importing a class. It includes the import of transformers, which describes the
tools."""


def resolve_reward(profile: Profile, spec: RewardSpec, run_dir: Path | None) -> tuple[RewardSpec, Notes]:
    """Return `spec` with the kind of the profile's rewards or agent, and notes for the user. Raises
    ConfigError.

    `spec` describes the items; its own `kind` is ignored.
    """
    agent, rewards = profile.task.agent, profile.task.rewards
    if agent:
        if not is_user_code(agent):
            raise ConfigError(
                f'task.agent = "{agent}" is not of the form module:function',
                hint='for example "my_agent:episode"',
            )
        expects = "the agent must be an async function of (client, item)"
        code, _, notes = try_out(profile, run_dir, "agent", agent, load_agent, expects)
        return replace(spec, kind="agent", function=code), notes
    spec = replace(spec, answer_key=profile.task.answer_key)
    if has_tool_class(profile):  # it calls the user's functions itself, in TRL's signature
        rewards = {
            name: weight for name, weight in rewards.items() if name != "auto" and not is_user_code(name)
        }
        if not rewards:
            return replace(spec, kind="episode"), ()
    if isinstance(profile.task.reward, str):
        return _resolved(profile, spec, profile.task.reward, run_dir)
    parts, notes = list[RewardPart](), Notes()
    for name, weight in rewards.items():
        one, more = _resolved(profile, spec, name, run_dir)
        parts.append(RewardPart(name=name, weight=weight, spec=one))
        notes = (*notes, *more)
    return replace(spec, kind="several", parts=tuple(parts)), notes


def _resolved(
    profile: Profile, spec: RewardSpec, reward: str, run_dir: Path | None
) -> tuple[RewardSpec, Notes]:
    """`spec` with the kind of one reward."""
    if reward == "auto":
        of_items = "dataset" if spec.dataset and spec.adapter == "plain" else "exact-match"
        reward = of_items if profile.reward_model.path is None else "none"
    if reward == "dataset" and not spec.dataset:
        raise ConfigError(
            'task.reward = "dataset" is for the verifier of a reasoning-gym dataset, and this task.source '
            "has none",
            hint='task.reward = "exact-match", "math-verify" or "module:function"',
        )
    if (
        profile.task.answer_format != "final"
        and reward != "math-verify"
        and "math-verify" not in profile.task.rewards
    ):
        raise ConfigError(
            f'task.answer_format = "{profile.task.answer_format}" is for task.reward = "math-verify", not '
            f'for "{reward}"',
            hint="leave it out",
        )
    if reward in BUILT_IN:
        return replace(spec, kind=cast(Any, reward), answer_format=profile.task.answer_format), ()
    if not is_user_code(reward):
        raise ConfigError(
            f'task.reward = "{reward}" is not one of {", ".join(BUILT_IN)}, and not of the form '
            "module:function",
            hint=did_you_mean(reward, BUILT_IN, 'for example task.reward = "my_rewards:score"'),
        )
    limit_key, record = "task.reward_timeout_s", reward_record(profile, reward)
    code, _, notes = try_out(
        profile, run_dir, "reward", reward, load_function, EXPECTED, limit_key=limit_key, record=record
    )
    return replace(spec, kind="function", function=code), notes


def reward_record(profile: Profile, name: str) -> str:
    """The name of the record of a reward function: `reward`, and `reward-2` and so on for further ones."""
    number = [reward for reward in profile.task.rewards if is_user_code(reward)].index(name) + 1
    return "reward" if number == 1 else f"reward-{number}"


def has_tool_class(profile: Profile) -> bool:
    """Whether a tool class plays the episodes: the user's, or a builtin task's own."""
    return not profile.task.agent and is_user_code(environment_of(profile.task))


def import_limit_s(profile: Profile) -> float:
    """How long the import of the class may take, when it is tried out and in every rollout worker."""
    return max(IMPORT_LIMIT_S, profile.env.tool_timeout_s)


def resolve_tool_class(profile: Profile, run_dir: Path | None) -> tuple[ToolClass, Notes]:
    """The class that plays the episodes, and notes for the user. Raises ConfigError if it or its reward
    cannot be used."""
    name, notes, rewards = environment_of(profile.task), Notes(), list[RewardPart]()
    if is_user_code(profile.task.environment):
        expects = (
            "it takes no arguments and has `reset`; its public methods are tools, with type hints and "
            "docstrings"
        )
        code, found, notes = try_out(
            profile, run_dir, "environment", name, inspect_class, expects, at_least_s=IMPORT_LIMIT_S
        )
    else:  # a builtin task's own class
        code = UserCode(name=name)
        found = inspect_class(code)
    tools, has_reward = found
    for named, weight in profile.task.rewards.items():
        if is_user_code(named):
            expects, record = "the function must take TRL's arguments by name", reward_record(profile, named)
            reward, _, more = try_out(
                profile,
                run_dir,
                "reward",
                named,
                check_reward,
                expects,
                at_least_s=IMPORT_LIMIT_S,
                record=record,
            )
            rewards.append(
                RewardPart(name=named, weight=weight, spec=RewardSpec(kind="function", function=reward))
            )
            notes = (*notes, *more)
    if profile.task.reward == "auto" and not has_reward:
        raise ConfigError(
            f'task.environment = "{name}" has no method get_reward, and task.reward = "auto": nothing gives '
            "the reward",
            hint='add `def get_reward(self) -> float`, or set task.reward = "module:function" (TRL\'s '
            'signature) or "exact-match"',
        )
    return ToolClass(code=code, tools=tuple(tools), rewards=tuple(rewards)), notes
