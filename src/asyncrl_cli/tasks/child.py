"""Child processes for foreign code, which hangs, prints, exits, forks, imports the world and iterates over sets.

    parent -> child (stdin)     (role, arguments), then whatever the role reads
    child -> parent (stdout)    whatever the role writes

A role is a function `role(requests, results, *arguments)`. What a parent sends is pickled: both ends are ours and of one version.
A child dies with its parent. It leads a process group of its own, so that all that it has started ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from asyncrl_cli.errors import AsyncrlError

PR_SET_PDEATHSIG = 1
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ChildFailed(Exception):
    """A child gave no answer; `str(error)` says why."""


class ChildTimedOut(ChildFailed):
    pass


def command(function: Callable[..., Any]) -> list[str]:
    """The name of the function's module is there for people who read `ps`: it says what the child is for."""
    # -P: the working directory is no place to import from, unless a spec says so.
    return [sys.executable, "-P", "-m", "asyncrl_cli.tasks.child", str(os.getpid()), function.__module__]


def environment(**variables: str) -> dict[str, str]:
    """This process's own, without Ray's token, and such that the child finds our package and starts no pool of compute threads."""
    root = str(Path(__file__).resolve().parents[2])
    search = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = {name: os.environ.get(name, "1") for name in THREAD_VARIABLES}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**inherited, **threads, "PYTHONPATH": os.pathsep.join(search), **variables}


def call_once(function: Callable[..., Any], *arguments: Any, timeout_s: float, **variables: str) -> Any:
    """What `function(*arguments)` returns, called in a child with these environment variables.

    Raises ChildFailed, and an AsyncrlError that the function raises. The child's stdin and stdout are files: a pipe would end only
    when no process that the function has started holds it.
    """
    with TemporaryFile() as asked, TemporaryFile() as answered, TemporaryFile() as said:
        pickle.dump((_answer_once, (function, arguments)), asked)
        asked.seek(0)
        child = subprocess.Popen(
            command(function), stdin=asked, stdout=answered, stderr=said, env=environment(**variables), start_new_session=True
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
        content, words = answered.read(), said.read().decode(errors="replace").strip()
    if returncode != 0 or not content:
        last_words = words.rpartition("\n")[2] or "it said nothing"
        raise ChildFailed(f"its process ended with {how_it_ended(returncode)}: {last_words}")
    if words:
        print(words, file=sys.stderr)
    answer = pickle.loads(content)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer_once(requests: BinaryIO, results: BinaryIO, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer = function(*arguments)
    except (AsyncrlError, ChildFailed) as error:
        answer = error
    pickle.dump(answer, results)
    results.flush()
    os._exit(0)  # without waiting for threads that foreign code has started


def kill_group(pid: int) -> None:
    """A child, with everything that it has started in its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def how_it_ended(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return signal.Signals(-returncode).name
    return f"exit code {returncode}"


def main() -> None:
    """The child. Foreign code cannot reach its pipes: what that prints goes to stderr, and the stdin that it sees is empty."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent of this process is gone")
    requests, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    role, arguments = pickle.load(requests)
    role(requests, results, *arguments)


if __name__ == "__main__":
    main()
