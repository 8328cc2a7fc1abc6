"""The daemons of a local session. Sessions themselves: test_session.py."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from asyncrl_cli.base.errors import SessionLost
from asyncrl_cli.job import local_ray
from asyncrl_cli.job.local_ray import AGENT, agents_of

CHILDREN = """
import subprocess, sys

children = [subprocess.Popen(words.split(), stdin=subprocess.PIPE) for words in sys.argv[1:]]
sys.stdin.readline()
for child in children:
    child.kill()
    child.wait()
"""


@pytest.mark.parametrize("num_agents", [2, 1])
def test_the_raylets_agents_are_waited_for_and_told_from_its_other_children(
    num_agents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts them after the call."""
    words = [sys.executable, "-c", CHILDREN, "sleep 60", *[AGENT] * num_agents]
    raylet = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        if num_agents == 2:
            found = agents_of(raylet)
            assert [agent.cmdline() for agent in found] == [[AGENT], [AGENT]]
            assert {agent.ppid() for agent in found} == {raylet.pid}
        else:
            monkeypatch.setattr(local_ray, "AGENTS_TIMEOUT_S", 0.5)
            with pytest.raises(SessionLost, match=r"has not started its 2 agents within 0\.5 s"):
                agents_of(raylet)
    finally:
        raylet.communicate(b"\n", timeout=30)


def test_a_raylet_that_ends_at_its_start_is_a_lost_session() -> None:
    raylet = subprocess.Popen(["sleep", "60"])
    raylet.kill()
    psutil.Process(raylet.pid).wait(10)
    with pytest.raises(SessionLost, match="ray's raylet has ended"):
        agents_of(raylet)
