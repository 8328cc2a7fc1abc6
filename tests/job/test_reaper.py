from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from asyncrl_cli.job import reaper

pytestmark = pytest.mark.filterwarnings("ignore:resource_tracker")  # of this process: another test may have ended it
ENDS_WITHIN_S = 30.0

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
subprocess.run([sys.executable, __file__, sys.argv[1], "child"])
"""


@pytest.fixture
def foreign() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=64)
    yield memory
    memory.close()
    memory.unlink()


def test_shared_memory_of_a_killed_drivers_processes_goes_with_them(tmp_path: Path, foreign: SharedMemory) -> None:
    program, directory = tmp_path / "driver.py", tmp_path / "ray"
    program.write_text(HOLD_SHARED_MEMORY)
    directory.mkdir()
    driver = subprocess.Popen([sys.executable, str(program), foreign.name], stdout=subprocess.PIPE, text=True)
    watching = subprocess.Popen([sys.executable, "-I", reaper.__file__, str(driver.pid), str(directory)], stdin=subprocess.PIPE)
    try:
        assert driver.stdout is not None
        memory = Path("/dev/shm") / driver.stdout.readline().strip()
        assert memory.exists()
        with pytest.raises(subprocess.TimeoutExpired):
            watching.wait(2 * reaper.LOOK_EVERY_S)  # it looks, and does not end
    finally:
        driver.kill()
        watching.communicate(timeout=ENDS_WITHIN_S)  # closes its pipe, and waits
        driver.communicate(timeout=ENDS_WITHIN_S)
    assert not memory.exists()
    assert not directory.exists()
    assert (Path("/dev/shm") / foreign.name).exists()
