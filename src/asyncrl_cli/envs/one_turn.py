"""The environment of tasks with one prompt and one response: the task's reward ends it."""

from __future__ import annotations

from asyncrl_cli.envs.port import End, Rewards, Turn
from asyncrl_cli.envs.rendering import prompt_of
from asyncrl_cli.tasks.item import Item


class OneTurn:
    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    async def start(self, item: Item) -> Turn:
        self._item = item
        return Turn(messages=prompt_of(item), is_last=True)

    async def step(self, response: str) -> End:
        return End(reward=await self._rewards.score(self._item, response))
