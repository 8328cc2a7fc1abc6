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
from asyncrl_cli.job.ray.endings import ProcessStart, end_processes, starts_of
from asyncrl_cli.job.ray.reaper import families

from .crew import nodes, small_profile

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_stopped_process_has_gone_after_the_call_and_a_reused_pid_is_left_alone_also_if_the_clock_is_set(
    monkeypatch,
):
    with subprocess.Popen(SLEEPS) as one, subprocess.Popen(SLEEPS) as other:
        os.kill(one.pid, signal.SIGSTOP)
        (mine, (pid, start_ticks)) = starts_of(map(psutil.Process, (one.pid, other.pid)))
        # psutil adds it to the ticks, and a step of the clock changes it
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)
        end_processes([mine, (pid, start_ticks - 1)], 10.0)
        assert psutil.Process(one.pid).status() == psutil.STATUS_ZOMBIE
        assert one.wait(0) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


def test_a_process_that_does_not_go_is_named(monkeypatch):
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)
    with subprocess.Popen(SLEEPS) as one:
        began_s = time.monotonic()
        with pytest.raises(ExecutorFailed, match=f"still be in use by process {one.pid}$"):
            end_processes(starts_of([psutil.Process(one.pid)]), 0.05)
        assert time.monotonic() - began_s < 5.0
        os.kill(one.pid, signal.SIGKILL)


class Stuck:
    """An actor that starts a process in a session of its own, which outlives it, and answers no more."""

    def start(self) -> tuple[str, str, list[ProcessStart]]:
        subprocess.Popen(SLEEPS, start_new_session=True)
        me = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return *me, starts_of(families([os.getpid()]))


@pytest.mark.slow
def test_a_worker_that_is_ended_leaves_no_process_behind():
    from asyncrl_cli.job.ray.session import ray_session

    profile = small_profile()

    async def ended() -> list[ProcessStart]:
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
