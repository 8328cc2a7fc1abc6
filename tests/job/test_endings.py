"""The processes of a worker that is ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import ray
from benchmarks.local_store import LocalStore

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.job.driver_rollout import RayRolloutWorker
from asyncrl_cli.job.ray.endings import Began, end_processes
from asyncrl_cli.job.ray.reaper import families

from .crew import nodes, small_profile

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


def began(pid: int) -> Began:
    return pid, psutil.Process(pid).create_time()


def test_a_stopped_process_has_gone_when_the_call_returns_and_a_reused_pid_is_left_alone():
    with subprocess.Popen(SLEEPS) as one, subprocess.Popen(SLEEPS) as other:
        os.kill(one.pid, signal.SIGSTOP)
        mine, (pid, began_s) = began(one.pid), began(other.pid)
        end_processes([mine, (pid, began_s - 1.0)], 10.0)
        assert psutil.Process(one.pid).status() == psutil.STATUS_ZOMBIE
        assert one.wait(0) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


def test_a_process_that_does_not_go_is_named(monkeypatch):
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)
    with subprocess.Popen(SLEEPS) as one:
        began_s = time.monotonic()
        with pytest.raises(ExecutorFailed, match=f"still be in use by process {one.pid}$"):
            end_processes([began(one.pid)], 0.05)
        assert time.monotonic() - began_s < 5.0
        os.kill(one.pid, signal.SIGKILL)


class Stuck:
    """An actor that starts a process in a session of its own, which outlives it, and answers no more."""

    def start(self) -> tuple[str, str, list[Began]]:
        subprocess.Popen(SLEEPS, start_new_session=True)
        me = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return *me, [(one.pid, one.create_time()) for one in families([os.getpid()])]


@pytest.mark.slow
def test_a_worker_that_is_ended_leaves_no_process_behind():
    from asyncrl_cli.job.ray.session import ray_session

    profile = small_profile()

    async def ended() -> list[Began]:
        worker = RayRolloutWorker("rollout-1", ray.remote(Stuck).remote, profile, LocalStore(), is_lent=True)
        await worker.start()
        assert all(map(psutil.pid_exists, dict(worker._processes)))
        await worker.end()
        return worker._processes

    with ray_session(profile, cluster=nodes((2, 0), elastic_cpus=True)):
        processes = asyncio.run(ended())
        assert len(processes) == 2
        left = [psutil.Process(pid) for pid in dict(processes) if psutil.pid_exists(pid)]
        assert {process.status() for process in left} <= {psutil.STATUS_ZOMBIE}
