"""Episodes of agents in their processes, against a real gateway: what becomes of agents that answer, raise,
hang, block or die."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.contracts.environment import RewardSpec
from asyncrl_cli.envs.episode import Episode, Means
from asyncrl_cli.envs.gateway.server import AgentEnvironment
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.sandbox.parent_rewards import RewardPool
from tests.envs.gateways import CHAT, LIMITS, SAMPLING, gateway, text_of
from tests.waiting import until

AGENT = """
    import asyncio, os, time
    from pathlib import Path

    answered = []

    async def episode(client, item):
        messages = [{"role": "user", "content": item["prompt"]}]
        answer = await client.chat.completions.create(model=client.model, messages=messages)
        answered.append(item["prompt"])
        if item["prompt"] == "raise":
            raise KeyError("nothing here")
        if item["prompt"] == "hang":
            await asyncio.Event().wait()
        if item["prompt"] == "thread":
            await asyncio.to_thread(time.sleep, 600)
        if item["prompt"] in ("block", "die"):
            while len(answered) < 3:  # until the others have begun
                await asyncio.sleep(0.005)
            Path(__file__).with_name("ended").write_text(item["prompt"])
        if item["prompt"] == "block":
            time.sleep(600)
        if item["prompt"] == "die":
            os._exit(3)
        if item["prompt"] == "text":
            return "much"
        if item["prompt"] == "twice":
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "more"})
            await client.chat.completions.create(model=client.model, messages=messages)
        if item["prompt"] == "post":
            url = str(client.base_url).removesuffix("v1/") + "reward"
            await client.post(url, body={"reward": 0.75}, cast_to=object)
            return None
        if item["prompt"] == "slow":
            while not Path(__file__).with_name("ended").exists():
                await asyncio.sleep(0.005)
        return 0.5

    async def silent(client, item):
        return 1.0
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    (tmp_path / "my_agent.py").write_text(textwrap.dedent(AGENT))
    return tmp_path


async def play(
    agent: Path, prompts: list[str], name: str = "episode", stopped: str = "", **limits: float
) -> list[Episode]:
    code = UserCode(name=f"my_agent:{name}", import_path=str(agent))
    pool = RewardPool(
        RewardSpec(kind="agent", function=code), **({"timeout_s": 60.0, "block_s": 30.0} | limits)
    )
    waiting: set[str] = set()

    def on_waiting(episode: str, for_what: str) -> None:
        waiting.add(episode) if for_what else waiting.remove(episode)

    async with gateway() as served:
        engine: Any = served.engine
        environment = lambda: AgentEnvironment(served.gateway, pool)  # noqa: E731
        means = Means(engine, CHAT, environment, LIMITS, Slots(8, hold=True), on_waiting)
        episodes = [
            Episode(f"e{index}", {"prompt": prompt}, 5, means, SAMPLING)
            for index, prompt in enumerate(prompts)
        ]
        try:
            await pool.start()
            stops = [stop_answered(episodes[0], stopped)] if stopped else []
            await asyncio.gather(*(episode.play() for episode in episodes), *stops)
            pids = pool.child_pids
        finally:
            await pool.close()
    assert waiting == set()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    return episodes


async def stop_answered(episode: Episode, kind: str) -> None:
    await until(lambda: episode.conversation.num_sampled > 0)
    await episode.stop(kind, "")


def outcome(episode: Episode) -> float | str:
    if episode.end is not None:
        return episode.end.reward
    return episode.failure.kind if episode.failure else "nothing"


@pytest.mark.slow
def test_episodes_end_with_the_agents_reward_or_fail_by_kind(agent: Path) -> None:
    episodes = asyncio.run(play(agent, ["twice", "post", "raise", "text", "fine"]))
    assert [outcome(episode) for episode in episodes] == [0.5, 0.75, "agent", "agent", 0.5]
    (segment,) = episodes[0].conversation.segments()
    assert text_of(segment["tokens"]) == "<user>twice\n<assistant>fine\n<user>more\n<assistant>fine\n"
    meta = episodes[0].meta()
    assert (meta.num_turns, meta.response_tokens, meta.finish_reason) == (2, 10, "stop")
    assert meta.tool_s > 0
    assert "KeyError: 'nothing here' (my_agent.py:" in episodes[2].failure.text  # type: ignore[union-attr]


@pytest.mark.slow
def test_agents_that_never_end_fail_after_their_time(agent: Path) -> None:
    episodes = asyncio.run(play(agent, ["hang", "thread"], timeout_s=1.0))
    assert [outcome(episode) for episode in episodes] == ["episode-timeout"] * 2


@pytest.mark.slow
def test_an_agent_that_blocks_or_dies_fails_alone_and_the_others_begin_anew(agent: Path) -> None:
    for culprit, kind in (("block", "tool-timeout"), ("die", "tool-died")):
        (agent / "ended").unlink(missing_ok=True)
        episodes = asyncio.run(
            play(agent, ["slow", culprit, "slow"], **({"block_s": 1.0} if culprit == "block" else {}))
        )
        assert (agent / "ended").read_text() == culprit
        assert [outcome(episode) for episode in episodes] == [0.5, kind, 0.5]
        assert all(episode.conversation.num_sampled == 5 for episode in episodes)
        # of the starts that the culprit has ended
        assert [episode.lost_tokens for episode in episodes] == [5, 0, 5]


@pytest.mark.slow
def test_a_stopped_episode_cancels_its_agent_whose_place_is_free_again(agent: Path) -> None:
    episodes = asyncio.run(play(agent, ["hang"], stopped="aborted", timeout_s=600.0))
    assert outcome(episodes[0]) == "aborted"


@pytest.mark.slow
def test_an_episode_without_an_answer_of_the_model_fails(agent: Path) -> None:
    (episode,) = asyncio.run(play(agent, ["x"], "silent"))
    assert outcome(episode) == "agent"
