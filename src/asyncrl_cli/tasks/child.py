"""What our child processes share: how they start, that they die with their parent, and pipes nobody else can reach.

    reward_worker   scores responses, as long as its pool lives
    gym_worker      makes a dataset's items once

In processes of their own, because foreign code hangs, prints, exits, imports the world, and iterates over sets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from asyncrl_cli.tasks.frames import pack, read_frame

PR_SET_PDEATHSIG = 1
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ChildFailed(Exception):
    """A child gave no answer; `str(error)` says why."""


class ChildTimedOut(ChildFailed):
    pass


def command(module: str, *arguments: str) -> list[str]:
    # -P: the working directory is no place to import from, unless a spec says so.
    return [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments]


def environment(**variables: str) -> dict[str, str]:
    """This process's, so that the child finds our package and does not start a pool of compute threads; without Ray's token."""
    root = str(Path(__file__).resolve().parents[2])
    search = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = {name: os.environ.get(name, "1") for name in THREAD_VARIABLES}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**inherited, **threads, "PYTHONPATH": os.pathsep.join(search), **variables}


def call_once(module: str, request: Any, *arguments: str, timeout_s: float, **variables: str) -> Any:
    """Start `module`, send one frame, return the value of the frame it answers with. Raises ChildFailed.

    Whatever the child has started ends with it. Files and not pipes: a pipe ends only when nobody whom it has started holds it.
    """
    with TemporaryFile() as asked, TemporaryFile() as answered, TemporaryFile() as said:
        asked.write(pack(request))
        asked.seek(0)
        child = subprocess.Popen(
            command(module, *arguments),
            stdin=asked,
            stdout=answered,
            stderr=said,
            env=environment(**variables),
            start_new_session=True,
        )
        try:
            returncode = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildTimedOut(f"it took longer than {timeout_s:g} s") from None
        finally:
            kill_group(child.pid)
            child.wait()
        answered.seek(0)
        said.seek(0)
        return _answer(read_frame(answered), said.read().decode(errors="replace").strip(), returncode)


def _answer(answer: Any, words: str, returncode: int) -> Any:
    if answer is None:
        last_words = words.rpartition("\n")[2] or "it said nothing"
        raise ChildFailed(f"its process ended with {how_it_ended(returncode)}: {last_words}")
    if words:
        print(words, file=sys.stderr)
    return answer


def kill_group(pid: int) -> None:
    """A child that leads a process group, with everything that it has started there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def how_it_ended(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return signal.Signals(-returncode).name
    return f"exit code {returncode}"


def become_child(parent_pid: int) -> tuple[BinaryIO, BinaryIO]:
    """Called first in the child. Returns the pipe of requests and that of results, out of the reach of foreign code:
    what it prints goes to stderr, and its stdin is empty. The kernel kills us with our parent, whatever we do then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent of this process is gone")
    requests, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, results
