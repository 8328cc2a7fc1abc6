"""Child processes for foreign code, which hangs, prints, exits, forks, imports the world and iterates over sets.

    parent -> child (stdin)     (role, arguments), then whatever the role reads
    child -> parent (stdout)    whatever the role writes

A role is a function `role(requests, results, *arguments)`. A message is a frame, a length and a pickle: both ends are ours and of
one version. A child dies with its parent, and with it ends all that it has started: it leads a process group of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

HEADER = struct.Struct("<I")
PR_SET_PDEATHSIG = 1
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ChildFailed(Exception):
    """A child gave no answer; `str(error)` says why."""


class ChildTimedOut(ChildFailed):
    pass


def command(function: Callable[..., Any]) -> list[str]:
    """`function`: what the child is for; its module is named for whoever reads a list of processes."""
    # -P: the working directory is no place to import from, unless a spec says so.
    return [sys.executable, "-P", "-m", "asyncrl_cli.tasks.child", str(os.getpid()), function.__module__]


def environment(**variables: str) -> dict[str, str]:
    """This process's, so that the child finds our package and does not start a pool of compute threads; without Ray's token."""
    root = str(Path(__file__).resolve().parents[2])
    search = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = {name: os.environ.get(name, "1") for name in THREAD_VARIABLES}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**inherited, **threads, "PYTHONPATH": os.pathsep.join(search), **variables}


def pack(value: Any) -> bytes:
    body = pickle.dumps(value, protocol=5)
    return HEADER.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Any:
    """The value of the next frame; None if there is no whole one."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    num_bytes = HEADER.unpack(header)[0]
    body = stream.read(num_bytes)
    return pickle.loads(body) if len(body) == num_bytes else None


async def read_frame_async(stream: asyncio.StreamReader) -> Any:
    """Like `read_frame`."""
    try:
        header = await stream.readexactly(HEADER.size)
        return pickle.loads(await stream.readexactly(HEADER.unpack(header)[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_frame(stream: BinaryIO, value: Any) -> None:
    stream.write(pack(value))
    stream.flush()


def call_once(function: Callable[..., Any], *arguments: Any, timeout_s: float, **variables: str) -> Any:
    """What `function(*arguments)` returns, called in a child with these environment variables. Raises ChildFailed.

    The child's stdin and stdout are files: a pipe would end only when no process that the function has started holds it.
    """
    with TemporaryFile() as asked, TemporaryFile() as answered, TemporaryFile() as said:
        asked.write(pack((_answer_once, (function, arguments))))
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
        answer, words = read_frame(answered), said.read().decode(errors="replace").strip()
    if answer is None:
        last_words = words.rpartition("\n")[2] or "it said nothing"
        raise ChildFailed(f"its process ended with {how_it_ended(returncode)}: {last_words}")
    if words:
        print(words, file=sys.stderr)
    return answer


def _answer_once(requests: BinaryIO, results: BinaryIO, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    write_frame(results, function(*arguments))
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
    """The child. Its pipes are out of the reach of foreign code: what that prints goes to stderr, and its stdin is empty."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent of this process is gone")
    requests, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if (first := read_frame(requests)) is not None:
        role, arguments = first
        role(requests, results, *arguments)


if __name__ == "__main__":
    main()
