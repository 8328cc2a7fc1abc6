"""Child processes for foreign code, which may hang, print, exit, fork, import anything or depend on the order
of sets.

    parent -> child (stdin)     (role, arguments), then whatever the role reads
    child -> parent (stdout)    whatever the role writes

A role is a function `role(requests, results, *arguments)` that runs in the child. The parent sends pickles:
both ends run the same version of our code. A child dies with its parent. It leads its own process group, so
everything it started can be killed with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from asyncrl_cli.base.errors import AsyncrlError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
PR_SET_PDEATHSIG = 1
REMOTE_TOKEN = "ASYNCRL_REMOTE_TOKEN"
SECRETS = ("RAY_", REMOTE_TOKEN)
MAX_SHOWN_BYTES, MAX_REASON_CHARS = 2000, 400
"""How much is shown of what a child has printed, and of its last line in an error."""
PACKAGE = Path(__file__).resolve().parents[1]
IN_ANOTHER_PYTHON = """
import sys, types
package = sys.modules["asyncrl_cli"] = types.ModuleType("asyncrl_cli")
package.__path__ = [sys.argv.pop(1)]
from asyncrl_cli.base.child_process import main
main()
"""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ChildFailed(Exception):
    """A child gave no answer; `str(error)` says why."""


class ChildTimedOut(ChildFailed):
    pass


def command(function: Callable[..., object], python: str = "", name: str = "") -> list[str]:
    """The command line of a child. It ends with the function's module, and a name, only to show them in `ps`.

    `python`: another Python, 3.11 or newer, that needs neither our package nor its dependencies. Only our
    package becomes importable there, not the directory that holds it, which may hold all packages of this
    Python.
    """
    # -P: do not import from the working directory, unless a spec says so.
    ours = ["-m", "asyncrl_cli.base.child_process"] if not python else ["-c", IN_ANOTHER_PYTHON, str(PACKAGE)]
    return [python or sys.executable, "-P", *ours, str(os.getpid()), f"{function.__module__} {name}".strip()]


def environment(python: str = "", **variables: str) -> dict[str, str]:
    """The child's environment variables: ours without tokens and Ray's. Our package is importable; one thread
    by default; what is printed appears at once."""
    search = [] if python else [str(PACKAGE.parent)]
    search += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    threads = {name: os.environ.get(name, "1") for name in THREAD_VARIABLES}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
    ours = {"PYTHONPATH": os.pathsep.join(search), "PYTHONUNBUFFERED": "1"}
    return {**inherited, **threads, **ours, **variables}


def call_once(
    function: Callable[..., T], *arguments: object, timeout_s: float, python: str = "", **variables: str
) -> T:
    """Call `function(*arguments)` in a child with these environment variables, and return its result.
    `python`: see `command`.

    Raises ChildFailed, or the AsyncrlError that the function raised. The child's stdin and stdout are files:
    a pipe would stay open as long as any process that the function started holds it.
    """
    with TemporaryFile() as asked, TemporaryFile() as answered, TemporaryFile() as printed:
        pickle.dump((_answer_once, (function, arguments)), asked)
        asked.seek(0)
        child = subprocess.Popen(
            command(function, python),
            stdin=asked,
            stdout=answered,
            stderr=printed,
            env=environment(python, **variables),
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
        content = answered.read()
        num_bytes = printed.seek(0, os.SEEK_END)
        left_out = printed.seek(max(0, num_bytes - MAX_SHOWN_BYTES))
        words = printed.read(MAX_SHOWN_BYTES).decode(errors="replace").strip()
        if left_out:
            words = f"(left out the first {left_out:,} bytes that it printed)\n{words}"
    if returncode != 0 or not content:
        last_words = words.rpartition("\n")[2][:MAX_REASON_CHARS] or "it printed nothing"
        raise ChildFailed(f"its process ended with {how_it_ended(returncode)}: {last_words}")
    if words:
        print(words, file=sys.stderr)
    answer: T | Exception = pickle.loads(content)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer_once(
    requests: BinaryIO, results: BinaryIO, function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    try:
        answer = function(*arguments)
    except (AsyncrlError, ChildFailed) as error:
        answer = error
    pickle.dump(answer, results)
    results.flush()
    os._exit(0)  # without waiting for threads that foreign code has started


def pickles(requests: BinaryIO) -> Iterator[Any]:
    """The objects that the parent sends, until it closes the pipe."""
    while True:
        try:
            yield pickle.load(requests)
        except EOFError:
            return


def write_line(results: BinaryIO, answer: object) -> None:
    """Send the parent a line of JSON."""
    results.write(json.dumps(answer).encode() + b"\n")
    results.flush()


def send(writer: asyncio.StreamWriter, words: bytes) -> None:
    """Write to a child, which may have died: then nothing is written, and the caller finds out when it reads.
    On a closed pipe asyncio writes nothing, but uvloop, which Ray's actors use, raises."""
    if not writer.is_closing():
        writer.write(words)


def kill_group(pid: int) -> None:
    """Kill a child and everything that it has started in its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def how_it_ended(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return signal.Signals(-returncode).name
    return f"exit code {returncode}"


def main() -> None:
    """The child's entry point. Foreign code cannot reach the pipes: its prints go to stderr, and its stdin is
    empty."""
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


def end_with_parent() -> None:
    """Kill this process when its parent ends for any reason. Works only for children of `multiprocessing`.

    A thread waits for the parent *process*. The kernel's own signal (PR_SET_PDEATHSIG) comes when the
    parent's *thread* that started this process ends, and vLLM is started from a pool's thread.
    """
    import multiprocessing  # other children do without it

    parent = multiprocessing.parent_process()

    def end_after_parent() -> None:
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    if parent is not None:
        threading.Thread(target=end_after_parent, name="end-with-parent", daemon=True).start()


if __name__ == "__main__":
    main()
