from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from asyncrl_cli.job.ray import reaper, reaper_handle

ENDS_WITHIN_S = 60.0

TELLING = """
import sys, time
from asyncrl_cli.job.ray import reaper

def told(call):
    def tell(*arguments):
        began_s = time.monotonic()
        found = call(*arguments)
        print(call.__name__, began_s, found, flush=True)
        return found
    return tell

for call in (reaper.name_of, reaper.shared_memory_of, reaper.first_gone):
    setattr(reaper, call.__name__, told(call))
reaper.LOOK_EVERY_S = 0.2
reaper.main(int(sys.argv[1]), sys.argv[2], map(int, sys.argv[3:]))
"""
"""A reaper that prints its calls: name, time of the beginning (of a clock that all processes share), and
result."""

HOLD_SHARED_MEMORY = """
import subprocess, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

if sys.argv[2:]:
    memory, foreign = SharedMemory(create=True, size=64), SharedMemory(name=sys.argv[1])
    for one in (memory, foreign):  # nobody tidies up: as if the tracker were killed, too
        resource_tracker.unregister(one._name, "shared_memory")
    print(memory.name, flush=True)
    time.sleep(1000)
sys.stdin.readline()
subprocess.run([sys.executable, __file__, sys.argv[1], "child"])
"""


MAKES_AGAIN = """
import os, sys, time
while True:
    os.makedirs(f"{sys.argv[1]}/ray/logs", exist_ok=True)
    print("made", flush=True)
    time.sleep(0.01)
"""


@pytest.fixture
def foreign() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=64)
    yield memory
    memory.close()
    memory.unlink()


def test_what_cannot_be_removed_keeps_nothing_else():
    """A directory in the place of a file: to unlink it is an error for every user."""
    memory = SharedMemory(create=True, size=64)
    resource_tracker.unregister(f"/{memory.name}", "shared_memory")
    memory.close()
    file = Path("/dev/shm") / memory.name
    directory = Path(tempfile.mkdtemp(prefix="psm_", dir="/dev/shm"))
    try:
        reaper.remove_shared_memory({str(directory), str(file), f"{file}-gone"})
        assert directory.exists()
        assert not file.exists()
    finally:
        directory.rmdir()


def test_shared_memory_that_only_the_last_look_meets_is_told(foreign, monkeypatch, tmp_path):
    program = tmp_path / "driver.py"
    program.write_text(HOLD_SHARED_MEMORY)
    driver = subprocess.Popen(
        [sys.executable, str(program), foreign.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout is not None
        memory = f"/dev/shm/{driver.stdout.readline().strip()}"
        with open(os.devnull) as closed:  # its end is there at once: no look comes before the last one
            monkeypatch.setattr(sys, "stdin", closed)
            _, seen, shared = reaper.watch(driver.pid)
    finally:
        children = psutil.Process(driver.pid).children()
        for process in (*children, driver):
            process.kill()
        driver.communicate(timeout=ENDS_WITHIN_S)
        Path(memory).unlink()
    assert children[0] in seen  # Python's resource tracker may be another
    assert shared == {memory, f"/dev/shm/{foreign.name}"}


@pytest.mark.slow
def test_shared_memory_of_a_killed_drivers_processes_goes_with_them(tmp_path, foreign):
    program, directory = tmp_path / "driver.py", tmp_path / "ray"
    program.write_text(HOLD_SHARED_MEMORY)
    directory.mkdir()
    driver = subprocess.Popen(
        [sys.executable, str(program), foreign.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    watching = telling(driver, directory)
    try:
        assert driver.stdin is not None
        driver.stdin.write("\n")  # what it starts now is the session's
        driver.stdin.flush()
        assert driver.stdout is not None
        memory = Path("/dev/shm") / driver.stdout.readline().strip()
        assert memory.exists()
        wait_for(watching, "shared_memory_of", str(memory))
    finally:
        driver.kill()
        watching.communicate(timeout=ENDS_WITHIN_S)  # closes its pipe, and waits
        driver.communicate(timeout=ENDS_WITHIN_S)
    assert not memory.exists()
    assert not directory.exists()
    assert (Path("/dev/shm") / foreign.name).exists()


def telling(driver: subprocess.Popen[str], directory: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", TELLING, str(driver.pid), str(directory)]
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(watching: subprocess.Popen[str], call: str, found: str, after_s: float = 0.0) -> None:
    """Wait until the reaper has found `found` by a call that began after `after_s`."""
    assert watching.stdout is not None
    said = (line.split(maxsplit=2) for line in watching.stdout)
    assert any(words[0] == call and found in words[-1] and float(words[1]) > after_s for words in said), (
        "the reaper has ended"
    )


TWO_CHILDREN = """
import subprocess, sys

def start():
    words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(120)"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE)
    child.stdout.readline()  # it is older, by more than the kernel's clock tick, than what starts after it
    print(child.pid, flush=True)

start()
sys.stdin.readline()
start()
sys.stdin.readline()
"""


@pytest.mark.slow
def test_what_the_driver_had_before_the_session_outlives_it(tmp_path):
    directory = tmp_path / "ray"
    directory.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", TWO_CHILDREN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    children = [psutil.Process(int(driver.stdout.readline()))]
    watching = subprocess.Popen(
        [sys.executable, "-P", reaper.__file__, str(driver.pid), str(directory), str(children[0].pid)],
        stdin=subprocess.PIPE,
    )
    try:
        driver.stdin.write("\n")
        driver.stdin.flush()
        children.append(psutil.Process(int(driver.stdout.readline())))
        watching.communicate(timeout=ENDS_WITHIN_S)  # the session ends, the driver does not
        assert [child.status() == psutil.STATUS_ZOMBIE for child in children] == [False, True]
    finally:
        for child in children:
            if child.is_running():
                child.kill()
        driver.kill()
        driver.communicate(timeout=ENDS_WITHIN_S)


RAYLET = """
import ctypes, signal, subprocess, sys, time

PR_SET_PDEATHSIG = 1
end_with_me = lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # as Ray has its daemons do
raylet = subprocess.Popen([sys.argv[1], "600"], stdout=subprocess.DEVNULL, preexec_fn=end_with_me)
print(raylet.pid, flush=True)
sys.stdin.readline()
raylet.kill()
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["raylet", "driver"])
def test_only_a_raylet_that_has_ended_before_the_driver_is_blamed(tmp_path, killed):
    """A process of that name stands for the raylet. The pipe of a driver that is killed closes last: after
    its raylet's end."""
    raylet = shutil.copy(shutil.which("sleep") or "", tmp_path / "raylet")
    driver = subprocess.Popen(
        [sys.executable, "-c", RAYLET, str(raylet)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    watching = telling(driver, tmp_path / "ray")
    assert driver.stdin is not None
    assert driver.stdout is not None
    try:
        daemon = psutil.Process(int(driver.stdout.readline()))
        wait_for(watching, "name_of", "raylet")
        if killed == "raylet":
            driver.stdin.write("\n")
            driver.stdin.flush()
            wait_for(watching, "first_gone", "raylet")
        else:
            driver.kill()
            wait_until_ended(daemon)
            wait_for(watching, "first_gone", "", after_s=time.monotonic())
    finally:
        driver.kill()
        driver.communicate(timeout=ENDS_WITHIN_S)
        _, told = watching.communicate(timeout=ENDS_WITHIN_S)
    error, hint = told.splitlines()
    expected = {"raylet": "ray's raylet has ended, and with it this run's process", "driver": reaper.KILLED}
    assert error == f"error: {expected[killed]}"
    assert "asyncrl status" in hint


def wait_until_ended(process: psutil.Process) -> None:
    """Ended, though not necessarily waited for by its parent."""
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    while reaper.living([process]):
        assert time.monotonic() < deadline_s, process
        time.sleep(0.01)


@pytest.mark.parametrize("last_word", [b"", reaper.GOODBYE])
def test_a_driver_that_ends_without_a_goodbye_has_its_last_word_said(tmp_path, last_word):
    driver = subprocess.Popen(["sleep", "60"])
    words = [sys.executable, "-P", reaper.__file__, str(driver.pid), str(tmp_path / "ray")]
    driver.kill()
    told = subprocess.run(
        words, input=last_word, stderr=subprocess.PIPE, timeout=ENDS_WITHIN_S, check=True
    ).stderr.decode()
    driver.wait()  # not earlier: another process could get its pid
    if last_word:
        assert told == ""
    else:
        error, hint = told.splitlines()
        assert error.startswith("error: ")
        assert "asyncrl status" in hint


def test_a_worker_that_no_look_has_seen_does_not_make_the_directory_again(tmp_path):
    """As Ray's do that were started just before the session's end; who only reads there goes on."""
    directory = tmp_path / "session"
    token = {"RAY_AUTH_TOKEN_PATH": str(directory / "token")}
    words = [sys.executable, "-c", MAKES_AGAIN, str(directory)]
    reader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", str(directory)])
    worker = subprocess.Popen(words, env={**os.environ, **token}, stdout=subprocess.PIPE)
    with worker, reader:
        try:
            assert worker.stdout is not None
            worker.stdout.readline()
            reaper.remove_directory(str(directory), {os.getpid()})
            assert worker.wait(ENDS_WITHIN_S) == -9
            assert not directory.exists()
            assert reader.poll() is None
        finally:
            worker.kill()
            reader.kill()


def test_a_reaper_that_does_not_end_in_time_leaves_no_directory(tmp_path, monkeypatch):
    """As on a machine that is busy with what a hostile reward has forked."""
    directory = tmp_path / "session"
    directory.mkdir()
    reaping = reaper_handle.Reaper(directory)
    os.kill(reaping.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(reaper_handle, "END_TIMEOUT_S", 0.1)
    reaping.end()
    assert not directory.exists()
