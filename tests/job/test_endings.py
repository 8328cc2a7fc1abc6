"""The processes of a worker that is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.job.ray.endings import began, end_processes

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_stopped_process_has_gone_when_the_call_returns_and_a_reused_pid_is_left_alone():
    with subprocess.Popen(SLEEPS) as one, subprocess.Popen(SLEEPS) as other:
        os.kill(one.pid, signal.SIGSTOP)
        (mine, (pid, began_s)) = began(map(psutil.Process, (one.pid, other.pid)))
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
            end_processes(began([psutil.Process(one.pid)]), 0.05)
        assert time.monotonic() - began_s < 5.0
        os.kill(one.pid, signal.SIGKILL)
