"""Processes that end with their parent, however it ends. Nothing here needs vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PARENT = """
import multiprocessing, os, threading, time

def child(told):
    from asyncrl_cli.base.child_process import end_with_parent
    end_with_parent()
    told.send(os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    heard, told = spawn.Pipe()
    starter = threading.Thread(target=spawn.Process(target=child, args=(told,)).start)
    starter.start()
    starter.join()
    print(heard.recv(), flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_child_outlives_the_thread_that_started_it_and_ends_with_the_process(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    child.wait(timeout=60.0)
