"""Episodes that an agent plays (`task.agent`): a session of the gateway for each, and the user's function in a child process.

    Episode ─> AgentEnvironment.play ─> a session ─> RewardPool (child processes): episode(client, item) ─> reward ─> End
                                            ^                                         │
                                            └───── requests of the client, HTTP <─────┘

Who waits for whom: `play` for the child, which the pool ends if it blocks (`env.tool_timeout_s`) or takes too long
(`env.episode_timeout_s`), and for the engine's failure. The client's requests wait for the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl_cli.envs.episode import Episode
from asyncrl_cli.envs.gateway.server import Gateway
from asyncrl_cli.envs.port import End, EpisodeFailed, SelfPlayed
from asyncrl_cli.tasks.agents import Access
from asyncrl_cli.tasks.rewards import RewardFailed

MAX_STARTS = 3
"""How often an episode may begin, if each time another episode has cost it its process."""
KINDS = {"timed-out": "episode-timeout", "blocked": "tool-timeout", "died": "tool-died", "lost": "tool-died"}
"""Kinds of failed trajectories, by the pool's; others are `agent`: it raised, or returned no number."""


class Agents(Protocol):
    def score(self, item: Any, access: Access) -> Awaitable[float]:
        """Have the agent play the item; its reward. Raises RewardFailed."""


class AgentEnvironment(SelfPlayed):
    """The environment of one episode that an agent plays."""

    def __init__(self, gateway: Gateway, agents: Agents) -> None:
        self._gateway = gateway
        self._agents = agents

    async def play(self, episode: Episode) -> End:
        for start in range(1, MAX_STARTS + 1):
            try:
                reward = await self._played(episode)
                break
            except RewardFailed as failed:
                if failed.kind != "lost" or start == MAX_STARTS:
                    raise EpisodeFailed(KINDS.get(failed.kind, "agent"), f"agent of {episode.id}: {failed}") from None
        if not episode.conversation.num_sampled:
            raise EpisodeFailed("agent", f"agent of {episode.id}: it ended without an answer of the model")
        return End(reward=reward)

    async def _played(self, episode: Episode) -> float:
        """One start of the agent, with a new conversation. Raises RewardFailed, and what the engine raises."""
        episode.begin_anew()
        waiting = _Waiting(episode)
        session = self._gateway.session(episode.id, episode.conversation, episode.sampling, episode.seed, waiting.on_running)
        playing = asyncio.ensure_future(self._agents.score(episode.item, self._gateway.open_session(session)))
        waiting.on_running(0)
        try:
            await asyncio.wait({playing, session.failed}, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                session.failed.result()
            return await playing
        finally:
            playing.cancel()
            waiting.on_running(1)
            episode.finish_reason = session.finish_reason
            await self._gateway.close_session(session)


@dataclass(slots=True, eq=False)
class _Waiting:
    """Measures how long an episode has no request running: it waits for its agent."""

    episode: Episode
    since_s: float | None = None

    def on_running(self, running: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if running and self.since_s is not None:
            self.episode.tool_s += now_s - self.since_s
            self.since_s = None
            self.episode.means.on_waiting(self.episode.id, "")
        elif not running and self.since_s is None:
            self.since_s = now_s
            self.episode.means.on_waiting(self.episode.id, "agent")
