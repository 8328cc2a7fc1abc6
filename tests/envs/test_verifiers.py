"""Environments made with the package verifiers: their prompts, and episodes that they play over the
gateway."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.envs.episode import Episode, Means
from asyncrl_cli.envs.gateway.server import AgentEnvironment
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.sandbox.parent_rewards import RewardPool
from asyncrl_cli.tasks.task import Task, load_task
from tests.envs.gateways import CHAT, LIMITS, SAMPLING, gateway, text_of
from tests.envs.test_agent_episodes import outcome

PYTHON = os.environ.get("VERIFIERS_PYTHON", sys.executable)
HUB = str(Path(__file__).parent / "hub")


def task_of(name: str, *sets: str, python: str = PYTHON) -> Task:
    wanted = [f"task.source=verifiers:{name}", f"task.python={python}", "eval.prompts=1", *sets]
    return load_task(load("on-policy-pipeline", sets=wanted, environ={}).profile)


@functools.cache
def has_verifiers() -> bool:
    return not subprocess.run([PYTHON, "-c", "import verifiers"], check=False, capture_output=True).returncode


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_verifiers():
        pytest.skip(f"{PYTHON} does not have verifiers (VERIFIERS_PYTHON names another one)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HUB, os.environ.get("PYTHONPATH", "")]))


async def played(task: Task, says: Callable[[str], str]) -> list[Episode]:
    """An episode of each training item, with a model that `says` something to each prompt."""
    pool = RewardPool(task.reward, timeout_s=120.0, block_s=60.0)
    await pool.start()
    async with gateway(says) as served:
        engine: Any = served.engine
        means = Means(
            engine, CHAT, lambda: AgentEnvironment(served.gateway, pool), LIMITS, Slots(8, hold=True)
        )
        episodes = [Episode(f"e{index}", item, 5, means, SAMPLING) for index, item in enumerate(task.train)]
        try:
            await asyncio.gather(*(episode.play() for episode in episodes))
        finally:
            await pool.close()
    return episodes


def says(prompt: str) -> str:
    """Looks up the price of pears and nuts, and guesses the rest."""
    if "<tool>" in prompt:
        return prompt.rpartition("<tool>")[2].partition("\n")[0]
    thing = prompt.rpartition("of a ")[2].partition("?")[0]
    return {"pear": '!price{"thing": "pear"}', "nut": '!price{"thing": "nut"}', "fig": "5"}.get(thing, "3")


@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_prompts_tools_and_rewards_are_the_environments_and_the_tokens_are_those_that_were_sampled() -> None:
    task = task_of("little-hub", "task.params.num_sums=5")
    assert task.notes == ("verifiers:little-hub: left out 2 rows that repeat an earlier one",)
    # one question in three rows
    assert [item["answer"] for item in task.train] == ["2", "3", "4", "3", "5", "?"]
    assert len({item["uid"] for item in task.train}) == 6
    assert [item["prompt"][-1]["content"] for item in task.eval] == ["2+2"]
    episodes = asyncio.run(played(task, says))
    # looked up, guessed, there are no nuts
    assert [outcome(episode) for episode in episodes] == [0.0, 1.0, 0.0, 1.0, 0.5, 0.0]
    assert [episode.conversation.num_turns for episode in episodes] == [1, 1, 1, 2, 1, 2]
    first, looked = (episodes[index].conversation.segments() for index in (0, 3))
    assert [text_of(segment["tokens"]) for segment in first] == [
        "<system>Answer with a number.\n<user>1+1\n<assistant>3\n"
    ]
    called = '<assistant>!price{"thing": "pear"}\n<tool>3\n<assistant>3\n'
    assert [text_of(segment["tokens"]) for segment in looked] == ["[price]<user>price of a pear?\n" + called]
    assert looked[0]["mask"].sum() == len('!price{"thing": "pear"}\n3\n')


@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_a_rubric_that_compares_rollouts_is_refused() -> None:
    with pytest.raises(ConfigError, match="its rubric judges the rollouts of a prompt together"):
        task_of("little_hub", "task.params.together=true")


def test_a_python_without_verifiers_is_refused_with_what_to_install(tmp_path: Path) -> None:
    # its own library and nothing else: what the child imports of ours needs no more
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ConfigError, match="does not have the package verifiers") as without:
        task_of("any", python=str(bare))
    assert "asyncrl-cli[verifiers]" in str(without.value.hint)
    with pytest.raises(ConfigError, match="is not a program"):
        task_of("any", python=str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["task.source=verifiers:x", "task.agent=m:f"], "plays its episodes itself"),
        (["task.source=verifiers:x", "task.reward=math-verify"], "the agent's own result is the reward"),
        (["task.python=/usr/bin/python3"], "only environments of the package verifiers"),
    ],
)
def test_keys_that_do_not_go_with_it_are_refused(sets: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load("on-policy-pipeline", sets=sets, environ={})
