"""Episodes that an agent plays (`task.agent`): each has a session of the gateway, and the user's function
runs in a child.

    Episode ─> AgentEnvironment.play ─> a session ─> RewardPool (child processes): episode(client, item) ─> reward ─> End
                                            ^                                         │
                                            └───── requests of the client, HTTP <─────┘

Who waits for whom: `play` waits for the agent or for a failure of the engine. The pool ends an agent that
blocks (`env.tool_timeout_s`) or takes too long (`env.episode_timeout_s`). The client's requests wait for the
engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from asyncrl_cli.contracts.environment import End, EpisodeFailed, Rewards, SelfPlayed
from asyncrl_cli.envs.episode import Episode
from asyncrl_cli.envs.gateway.server import Gateway
from asyncrl_cli.sandbox.parent_rewards import RewardFailed

MAX_STARTS = 3
"""How often an episode may start, if each time another episode kills the process that they share."""
KINDS = {"timed-out": "episode-timeout", "blocked": "tool-timeout", "died": "tool-died", "lost": "tool-died"}
"""Kinds of EpisodeFailed by those of RewardFailed. All others become `agent`: it raised, or returned no
number."""


@dataclass(eq=False)
class AgentEnvironment(SelfPlayed):
    """The environment of one episode that an agent plays: `agents.score(item, access)` runs the agent and
    returns its reward."""

    gateway: Gateway
    agents: Rewards

    async def play(self, episode: Episode) -> End:
        for start in range(1, MAX_STARTS + 1):
            try:
                reward = await self._played(episode)
                break
            except RewardFailed as failed:
                if failed.kind != "lost" or start == MAX_STARTS:
                    raise EpisodeFailed(
                        KINDS.get(failed.kind, "agent"), f"agent of {episode.id}: {failed}"
                    ) from None
        if not episode.conversation.num_sampled:
            raise EpisodeFailed("agent", f"agent of {episode.id}: it ended without an answer from the model")
        return End(reward=float(reward))

    async def _played(self, episode: Episode) -> float:
        """Run the agent once, with a new conversation. Raises RewardFailed, and the engine's errors."""
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
