"""Episodes that an agent plays (`task.agent`): a session of the gateway for each, and the user's function in a child process.

    Episode ─> AgentEnvironment.play ─> a session ─> RewardPool (child processes): episode(client, item) ─> reward ─> End
                                            ^                                         │
                                            └───── requests of the client, HTTP <─────┘

Who waits for whom: `play` for the child, which the pool ends if it blocks (`env.tool_timeout_s`) or takes too long
(`env.episode_timeout_s`), and for the engine's failure. The client's requests wait for the engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from asyncrl_cli.envs.episode import Episode
from asyncrl_cli.envs.gateway.server import Gateway
from asyncrl_cli.envs.port import End, EpisodeFailed, Rewards, SelfPlayed
from asyncrl_cli.tasks.rewards import RewardFailed

MAX_STARTS = 3
"""How often an episode may begin, if each time another episode has cost it its process."""
KINDS = {"timed-out": "episode-timeout", "blocked": "tool-timeout", "died": "tool-died", "lost": "tool-died"}
"""Kinds of failed trajectories, by the pool's; others are `agent`: it raised, or returned no number."""


@dataclass(eq=False)
class AgentEnvironment(SelfPlayed):
    """The environment of one episode that an agent plays: `agents.score(item, access)` has it play, and gives its reward."""

    gateway: Gateway
    agents: Rewards

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

        def on_running(running: int) -> None:
            episode.waits_for("" if running else "agent")

        of_episode = episode.id, episode.conversation, episode.sampling, episode.seed
        session, access = self.gateway.open_session(*of_episode, on_running)
        playing = asyncio.ensure_future(self.agents.score(episode.item, access))
        episode.waits_for("agent")
        try:
            await asyncio.wait({playing, session.failed}, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                session.failed.result()
            return await playing
        finally:
            playing.cancel()
            episode.waits_for("")
            episode.finish_reason = session.finish_reason
            await self.gateway.close_session(session)
