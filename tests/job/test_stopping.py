"""Requests to end a run: what each of them does in which part of a run, and who hears of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ExecutorFailed, Interrupted
from asyncrl_cli.base.storage import appearing_directory, remove_unfinished
from asyncrl_cli.job.driver_preparation import interruptible
from asyncrl_cli.job.driver_process import NOTICES, SIGNALS, StopRequests, blocked
from asyncrl_cli.job.driver_run import Run

from .crew import small_profile


@pytest.fixture(autouse=True)
def _handlers_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_requests_do_one_thing_after_the_other_and_the_last_again_and_again():
    done: list[str] = []
    requests = StopRequests(lambda: done.append("never"))
    requests.set_actions(
        lambda: done.append("stop"), lambda: done.append("abort"), lambda: done.append("out")
    )
    for _ in range(4):
        requests.request()
    assert done == ["stop", "abort", "out", "out"]


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_is_a_request_and_goes_back_to_whoever_had_it(number):
    heard: list[int] = []
    signal.signal(number, lambda *_: heard.append(0))
    requests = StopRequests(lambda: heard.append(1))
    with requests.on_signals(), requests.on_signals():
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    assert heard == [1, 0]


def test_all_notices_of_machines_are_one_request_and_only_people_insist():
    """A shutdown sends SIGTERM and SIGHUP, SLURM SIGUSR1 and later SIGTERM: that must not abort the step that
    is being finished."""
    done: list[str] = []
    requests = StopRequests(lambda: done.append("stop"), lambda: done.append("abort"))
    with requests.on_signals():
        for number in (*NOTICES, *NOTICES, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert done == ["stop", "abort"]


def test_a_running_loop_says_how_long_a_stop_may_take():
    requests = StopRequests(lambda: None)
    requests.allow(lambda: 0.0)  # nothing limits this process
    requests.request()
    with requests.within(60.0):
        requests.allow(lambda: 3600.0)
        assert requests._limit is None
        requests.request()
        assert requests._limit is not None
        assert requests._limit.interval == 3600.0


HANGING = """
import time
from asyncrl_cli.job.driver_process import StopRequests
requests = StopRequests(lambda: None)
with requests.within(0.3):
    requests.request()
    time.sleep(60)
"""


def test_a_process_that_hangs_after_a_request_is_ended_and_says_so():
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 130
    assert done.stderr.startswith("0.3 s after the stop request the run is ended at once")


def test_a_signal_that_is_ignored_from_the_start_stays_ignored():
    """As SIGHUP under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    heard: list[int] = []
    with StopRequests(lambda: heard.append(1)).on_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [1]


def test_what_is_started_while_hangups_are_blocked_survives_one_and_we_hear_it_afterwards():
    heard: list[int] = []
    with StopRequests(lambda: heard.append(1)).on_signals():
        with blocked(signal.SIGHUP):
            child = subprocess.Popen(["sleep", "100"])
            # To this thread: any other that a test before has left may take a signal to the process.
            signal.pthread_kill(threading.get_ident(), signal.SIGHUP)
            assert heard == []
        assert heard == [1]
    try:
        child.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_cancelled_preparation_is_not_waited_for():
    """An import cannot be interrupted; it ends by itself, or with the process."""
    started, goes_on, looked = threading.Event(), threading.Event(), threading.Event()

    async def main() -> None:
        def work(look: object) -> None:
            started.set()
            goes_on.wait(100)
            try:
                look()  # type: ignore[operator]
            except Interrupted:
                looked.set()
                raise

        preparing = asyncio.ensure_future(interruptible(work))
        await asyncio.to_thread(started.wait, 50)
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing

    began_s = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began_s < 50
    goes_on.set()
    assert looked.wait(50)


@pytest.mark.slow
def test_a_request_while_the_run_starts_ends_it_and_leaves_nothing(tmp_path, monkeypatch):
    """By signal and by file; seen from the start: a status that says what is being done, and a log."""
    seen: list[str] = []

    async def hangs(run: Run) -> None:
        from asyncrl_cli.job import driver_run as module

        async def prepare(profile: object, say: object, *_: object) -> None:
            say("warm start", 120, 500)  # type: ignore[operator]
            assert (tmp_path / "otter/logs/latest/driver.log").exists()
            seen.append((tmp_path / "otter/status.json").read_text())
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(60)

        monkeypatch.setattr(module, "prepare", prepare)
        await run.run()

    with pytest.raises(Interrupted, match="no step was trained"):
        asyncio.run(hangs(Run(small_profile(), runs_dir=tmp_path, name="otter", ui="none")))
    assert '"phase": "starting"' in seen[0]
    assert '"doing": "warm start  120/500  24%"' in seen[0]
    assert list(tmp_path.iterdir()) == []


def test_a_failure_whose_clean_up_is_interrupted_stays_the_runs_failure(tmp_path, monkeypatch):
    from asyncrl_cli.job import driver_run as module

    async def prepare(*_: object) -> None:
        try:
            raise ExecutorFailed("rollout-0 failed: out of memory")
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)

    monkeypatch.setattr(module, "prepare", prepare)
    with pytest.raises(ExecutorFailed, match="out of memory"):
        asyncio.run(Run(small_profile(), runs_dir=tmp_path, name="otter", ui="none").run())


LEAVER = """
import sys, threading
from pathlib import Path
from asyncrl_cli.base.storage import appearing_directory
from asyncrl_cli.cli import app

def build():
    with appearing_directory(Path(sys.argv[1]) / "tiny") as directory:
        (directory / "model.safetensors").write_bytes(b"half")
        is_half_written.set()
        threading.Event().wait()

is_half_written = threading.Event()
threading.Thread(target=build, daemon=True).start()
is_half_written.wait()
app.run = lambda: 130
app.main()
"""


@pytest.mark.slow
def test_a_process_that_leaves_a_thread_behind_takes_its_half_written_directory_along(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LEAVER, str(tmp_path)], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"")
    assert list(tmp_path.iterdir()) == []


def test_an_end_right_after_a_directory_was_made_takes_it_along(tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def made(path: Path, *args: object, **options: object) -> None:
        mkdir(path, *args, **options)  # type: ignore[arg-type]
        remove_unfinished()

    monkeypatch.setattr(Path, "mkdir", made)
    with suppress(KeyboardInterrupt), appearing_directory(tmp_path / "tiny"):
        assert list(tmp_path.iterdir()) == []
        raise KeyboardInterrupt


def test_a_directory_that_was_finished_stays(tmp_path):
    with appearing_directory(tmp_path / "tiny"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
