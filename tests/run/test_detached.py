"""A run that its terminal does not own: detached, ended by what a scheduler sends, and begun again by the
same command, which a terminal owns and takes along."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import termios
import threading
import time

import pytest

from tests.run.commands import (
    LIMIT_S,
    LONG,
    alive,
    arguments,
    command_line,
    descendants,
    finish,
    lines,
    start,
    started,
    wait_for_steps,
    wait_until_gone,
)
from tests.run.listening import assert_shut

pytestmark = pytest.mark.slow


def test_a_detached_run_ends_in_order_at_the_signals_of_a_machine_and_resumed_in_a_terminal_it_ends_with_that(
    tmp_path,
):
    words = ("--profile", "partial-rollout", "--name", "apart", "--resume", "auto")
    code, out, err = finish(start(tmp_path, "train", *words, "--detach", "--json", sets=LONG, verbose=False))
    assert code == 0, err
    assert "asyncrl watch apart" in err
    pid, run = json.loads(out)["pid"], tmp_path / "runs" / "apart"
    try:
        assert os.getsid(pid) == pid  # no terminal's SIGHUP reaches it
        until_s = time.monotonic() + LIMIT_S
        while len(lines(run / "metrics.jsonl")) < 2:
            assert alive({pid})
            assert time.monotonic() < until_s
            time.sleep(0.1)
        family = descendants(pid)
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
            os.killpg(pid, number)
        assert not wait_until_gone({pid}, 60.0)
        assert not wait_until_gone(family)
    finally:
        if alive({pid}):
            os.kill(pid, signal.SIGKILL)
    assert json.loads((run / "status.json").read_text())["phase"] == "stopped"
    steps = len(lines(run / "metrics.jsonl"))
    assert (run / "checkpoints" / f"step-{steps:06d}" / "manifest.json").exists()

    resumed_within_a_terminal(tmp_path, words, steps)
    trained = [line["step"] for line in lines(run / "metrics.jsonl")]
    assert trained == list(range(1, len(trained) + 1))
    resumed = [event["from_step"] for event in lines(run / "events.jsonl") if event["event"] == "resumed"]
    assert resumed == [steps]


def resumed_within_a_terminal(directory, words, steps):
    """The same command in the foreground, with two trainer ranks, until its terminal goes. The kernel tells
    the whole process group; what it and Ray's processes say on the terminal fails from then on."""
    terminal, screen = os.openpty()
    process = subprocess.Popen(
        arguments("train", *words, sets=(*LONG, "placement.trainer_workers=2")),
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"},
        stdin=screen,
        stdout=screen,
        stderr=screen,
        start_new_session=True,
        preexec_fn=own_terminal,
    )
    started.append(process)
    os.close(screen)
    shown: list[bytes] = []
    threading.Thread(target=drain, args=(terminal, shown), daemon=True).start()
    run = directory / "runs" / "apart"
    try:
        wait_for_steps(process, run, steps + 2)
    except AssertionError as failure:
        failure.add_note(b"".join(shown).decode(errors="replace"))
        raise
    family = descendants(process.pid)
    assert_shut({process.pid, *family})
    ours = {pid for pid in family if b"ray::" in command_line(pid)}
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in ours} == {os.getpriority(os.PRIO_PROCESS, 0)}
    os.close(terminal)
    assert process.wait(60) == 130
    assert not wait_until_gone(family)
    last = len(lines(run / "metrics.jsonl"))
    assert (run / "checkpoints" / f"step-{last:06d}" / "manifest.json").exists()
    assert json.loads((run / "status.json").read_text())["phase"] == "stopped"


def own_terminal():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def drain(terminal, shown):
    with contextlib.suppress(OSError):
        while screen := os.read(terminal, 65536):
            shown.append(screen)
