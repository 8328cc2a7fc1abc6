"""Why an engine process has ended, read from what vLLM writes. Lines are vLLM 0.32.0's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl_cli.engines.vllm.engine_processes import EngineLog

Log = tuple[EngineLog, Callable[[str], None]]
KILLED = (
    "(EngineCore pid=19573) ERROR 11-21 20:46:27 [multiproc_executor.py:315] Worker proc VllmWorker-0 died "
    "unexpectedly (exit code: -9), shutting down executor.\n"
)
FAILED = """\
(EngineCore pid=19573) WARNING 11-21 20:46:23 [vllm.py:1703] Enforce eager set, disabling torch.compile.
(EngineCore pid=19573) ERROR 11-21 20:46:23 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=19573) ERROR 11-21 20:46:23 [core.py:1510]     raise ValueError(
(EngineCore pid=19573) ERROR 11-21 20:46:23 [core.py:1510] ValueError: No available memory for the cache.
(EngineCore pid=19573) ERROR [executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: 0), x
Process EngineCore:
Traceback (most recent call last):
    raise ValueError(
ValueError: No available memory for the cache.
Exception: WorkerProc failed due to an exception in a background process. See stack trace for root cause.
"""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A log that has an error of a process before, opened for writing only, as a rollout worker's is."""
    descriptor = os.open(tmp_path / "rollout-0.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, KILLED.encode() + b"ValueError: of the process before\n")
    yield EngineLog(descriptor), lambda text: os.write(descriptor, text.encode()) and None
    os.close(descriptor)


def test_what_was_written_before_is_not_this_engines(log: Log) -> None:
    assert (log[0].why(), log[0].killed_worker()) == ("", "")


def test_a_killed_worker_process_is_named_with_its_signal(log: Log) -> None:
    engine_log, write = log
    write(FAILED + KILLED)
    assert engine_log.killed_worker() == engine_log.why() == "VllmWorker-0 with SIGKILL"


def test_a_killed_worker_whose_exit_code_came_too_late_is_the_cause_of_the_errors_after_it(log: Log) -> None:
    engine_log, write = log
    write(
        KILLED.replace("-9", "None") + "(EngineCore pid=19573) ERROR 11-21 20:46:27 [core.py:1512] "
        "RuntimeError: cancelled\n"
    )
    assert engine_log.killed_worker() == engine_log.why() == "VllmWorker-0 with an unknown exit code"


@pytest.mark.parametrize("exit_code", ["0", "None"], ids=["known", "came too late"])
def test_the_last_error_that_does_not_point_elsewhere_is_the_cause(log: Log, exit_code: str) -> None:
    """A worker that failed is not taken for killed."""
    engine_log, write = log
    write(FAILED.replace("(exit code: 0)", f"(exit code: {exit_code})"))
    assert engine_log.why() == "ValueError: No available memory for the cache."
    assert engine_log.killed_worker() == ""


def test_a_long_error_is_cut_and_an_old_one_is_found_far_up(log: Log) -> None:
    engine_log, write = log
    write(f"torch.AcceleratorError: {'x' * 1000}\n" + "INFO something\n" * 10_000)
    assert engine_log.why() == f"torch.AcceleratorError: {'x' * 376}..."


def test_a_pipe_cannot_be_read_again() -> None:
    reading, writing = os.pipe()
    try:
        engine_log = EngineLog(writing)
        os.write(writing, KILLED.encode())
        assert engine_log.why() == ""
    finally:
        os.close(reading)
        os.close(writing)
