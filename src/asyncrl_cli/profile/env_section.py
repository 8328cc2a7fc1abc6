"""The keys of `[env]`: the limits of an episode and of its tools. They hold for every environment and agent."""

from __future__ import annotations

from asyncrl_cli.profile.fields import PositiveFloat, PositiveInt, Section


class EnvSection(Section):
    """Limits of an episode, which may have many turns and tools."""

    tool_timeout_s: PositiveFloat = 60.0
    """Seconds that a tool call, an environment's `reset` or its reward may take, or an agent without awaiting. What takes longer is
    killed with its process, and its trajectory counts as failed (`tool-timeout`; `environment` for a reset, `reward` for a reward).
    Importing the environment's module may take as long, at least 30 s; an agent's, at least 10 s."""
    max_turns: PositiveInt = 16
    """Responses of one episode. After the last one the episode ends, with the reward for what it has reached, and counts as
    truncated."""
    episode_timeout_s: PositiveFloat = 600.0
    """Seconds from an episode's start to its end, waiting for a slot included. A longer one counts as failed
    (`episode-timeout`)."""
    max_context_tokens: PositiveInt | None = None
    """Longest token sequence of an episode: prompt, responses and all that tools and environment add. An episode that fills it
    ends as truncated. rollout.max_prompt_tokens + rollout.max_response_tokens if not given, which suits one turn."""
