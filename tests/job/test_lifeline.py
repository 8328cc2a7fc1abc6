"""A daemon of the session dies: whoever waits for Ray hears of it. With processes of a kind that needs no
Ray."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from ray.exceptions import RayActorError

from asyncrl_cli.base.errors import SessionLost
from asyncrl_cli.job.ray import lifeline as module
from asyncrl_cli.job.ray.calls import Limit, answer
from asyncrl_cli.job.ray.lifeline import ended_daemons, lifeline, lost_session

NEVER_S = 300.0
"""Longer than any limit of a test: a call that waits this long fails its test."""


@pytest.fixture(autouse=True)
def _no_end_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lifeline ends a process whose event loop does not react for `DEAF_S`. Here that would be pytest, if
    it gets no core."""
    monkeypatch.setattr(module, "DEAF_S", NEVER_S)


@pytest.fixture
def daemons() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    processes = {name: subprocess.Popen(["sleep", "60"]) for name in ("gcs_server", "raylet")}
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


def watched(daemons: dict[str, subprocess.Popen[bytes]], mend: Any = lambda: None) -> Any:
    return lifeline(partial(ended_daemons, daemons), mend, [daemon.pid for daemon in daemons.values()])


async def ask(*, patient: bool) -> None:
    """The call fails for the loss of the session, and before its own limit."""
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(SessionLost) as lost:
        await answer(never, executor="trainer-0", call="a step", limit=Limit(30.0), patient=patient)
    assert "SIGKILL" in str(lost.value)


async def ask_both() -> None:
    await asyncio.gather(ask(patient=False), ask(patient=True))


async def only_the_impatient() -> None:
    patient = asyncio.ensure_future(ask(patient=True))
    await ask(patient=False)
    assert not patient.done()
    patient.cancel()
    await asyncio.wait([patient])


def test_a_dead_raylet_fails_every_call_at_once_and_by_its_name(daemons, monkeypatch):
    monkeypatch.setattr(module, "CHECKPOINT_S", NEVER_S)
    with watched(daemons):
        assert lost_session() is None
        daemons["raylet"].kill()
        asyncio.run(ask_both())
        assert "raylet" in str(lost_session(patient=True))
    assert lost_session() is None


def test_an_actor_that_ends_because_its_raylet_is_ending_is_not_blamed(daemons):
    """Ray tells of the actor before the raylet's process is gone."""

    async def fails() -> None:
        asyncio.get_running_loop().call_later(0.3, daemons["raylet"].kill)
        raise RayActorError(
            error_msg="The actor is dead because its owner has died. Owner worker exit type: SYSTEM_ERROR"
        )

    with watched(daemons), pytest.raises(SessionLost, match="ray's raylet has ended"):
        asyncio.run(answer(fails(), executor="trainer-0", call="a step", limit=Limit(30.0), patient=True))


@pytest.mark.slow
def test_a_head_that_takes_no_connections_is_lost_after_a_while_and_one_that_comes_back_is_not(monkeypatch):
    monkeypatch.setattr(module, "HEAD_S", 0.3)
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    monkeypatch.setattr(module, "CHECKPOINT_S", NEVER_S)
    with socket.socket() as kept:  # keeps the port from others, and does not listen
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        head = module.ClusterHead(f"127.0.0.1:{port}")
        for is_there in (False, True, False):
            with socket.create_server(("127.0.0.1", port)) if is_there else nullcontext():
                head.look()
                time.sleep(0.2)
        assert not head.dead
        with lifeline(lambda: head.dead, head.look):
            while (lost := lost_session()) is None:
                time.sleep(0.01)
            assert lost_session(patient=True) is None, "the trainer has time for a checkpoint"
    assert str(lost) == (
        f"the cluster's head has not answered at 127.0.0.1:{port} for 0.3 s, and with it this session"
    )


@pytest.mark.slow
def test_without_its_gcs_server_the_trainer_has_time_for_a_checkpoint(daemons, monkeypatch):
    monkeypatch.setattr(module, "CHECKPOINT_S", NEVER_S)
    with watched(daemons):
        daemons["gcs_server"].kill()
        asyncio.run(only_the_impatient())
        assert lost_session(patient=True) is None
    monkeypatch.setattr(module, "CHECKPOINT_S", 1.0)
    began_s = time.monotonic()
    with watched(daemons):  # it is dead from the first look on
        asyncio.run(ask(patient=True))
        assert time.monotonic() - began_s >= 1.0
        daemons["raylet"].kill()
        daemons["raylet"].wait()
        assert "gcs_server" in str(lost_session()), "who died first is to blame"


def test_a_call_that_is_answered_is_not_disturbed(daemons):
    async def main() -> str:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(2 * module.LOOK_EVERY_S, future.set_result, "done")
        return str(await answer(future, executor="trainer-0", call="a step", limit=Limit(30.0)))

    mended: list[float] = []
    with watched(daemons, lambda: mended.append(time.monotonic())):
        assert asyncio.run(main()) == "done"
    assert mended


DRIVER = """
import asyncio, subprocess, sys, threading, time
from asyncrl_cli.job.ray import lifeline

lifeline.LOOK_EVERY_S, lifeline.CHECKPOINT_S, lifeline.DEAF_S = 0.05, 0.1, 0.2
wake, until_s = lifeline.Lifeline._wake, time.monotonic() + 20

def woken(line):
    '''Wait for a loop that runs to hear of it: it may get a core late.'''
    wake(line)
    while sys.argv[1] == "awake" and not line.is_heard and time.monotonic() < until_s:
        time.sleep(0.01)

lifeline.Lifeline._wake = woken
daemon = subprocess.Popen(["sleep", "60"])
with lifeline.lifeline(lambda: lifeline.ended_daemons({"gcs_server": daemon}), lambda: None):
    async def wait():
        async with asyncio.timeout(30) as limit:
            with lifeline.session_wait(limit):
                daemon.kill()
                await asyncio.sleep(60)

    if sys.argv[1] == "awake":
        try:
            asyncio.run(wait())
        except (TimeoutError, lifeline.SessionLost):
            pass
    daemon.kill()
    for thread in threading.enumerate():
        if thread.name == "lifeline":  # it may have ended already
            thread.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "exit_code"), [("awake", 0), ("deaf", 1)])
def test_a_driver_that_cannot_hear_of_a_daemons_end_is_ended_and_one_that_can_is_not(how, exit_code):
    """A driver in a call of Ray's that blocks would wait for a gcs_server for a minute."""
    done = subprocess.run([sys.executable, "-c", DRIVER, how], capture_output=True, timeout=60, check=False)
    assert done.returncode == exit_code, done.stderr
    assert (b"error: ray's gcs_server has ended (SIGKILL)" in done.stderr) is (how == "deaf")
