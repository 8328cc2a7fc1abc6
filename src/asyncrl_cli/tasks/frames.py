"""What a reward pool and its child process say to each other, and how.

    pool -> child (stdin)     Hello, then lists of (id, item, response)
    child -> pool (stdout)    Ready, then lists of (id, reward or the reason of its failure)
    board (shared memory)     which id is running in the child, and since when

A frame is a length and a pickle: both ends are ours and of one version. Many requests share a frame, and many results:
the cost of a reward is not that of a system call. That is why there is a board: if the child hangs or dies, results
that it had not sent yet are lost, and only the board tells which reward was the culprit. It is written before each
reward (half a microsecond), and stays readable when the child is stuck in C code or gone.
"""

from __future__ import annotations

import asyncio
import io
import mmap
import pickle
import struct
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

HEADER = struct.Struct("<I")
IDLE = 0
_ENTRY = struct.Struct("<Qd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First frame to the child: a `RewardSpec`, and how long an awaiting reward may take."""

    spec: Any
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """First frame from the child; `failure` says why it cannot score ("" if it can). `module_file` is where it found a function of
    the user's; `at_once`: how many rewards it awaits together."""

    failure: str
    module_file: str = ""
    at_once: int = 1


def pack(value: Any) -> bytes:
    body = pickle.dumps(value, protocol=5)
    return HEADER.pack(len(body)) + body


def read_frame(source: BinaryIO | bytes) -> Any:
    """The value of the first frame; None if there is no whole one."""
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
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


class Board:
    """16 bytes shared by pool and child: the id that is running (0: none) and when it began (system-wide clock)."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _ENTRY.size)

    def enter(self, request_id: int) -> None:
        _ENTRY.pack_into(self._memory, 0, request_id, time.monotonic())

    def leave(self) -> None:
        _ENTRY.pack_into(self._memory, 0, IDLE, time.monotonic())

    def read(self) -> tuple[int, float]:
        """(id, seconds it has run). A read may fall between the two halves of a write: read twice, then act."""
        request_id, since_s = _ENTRY.unpack_from(self._memory, 0)
        return request_id, time.monotonic() - since_s
