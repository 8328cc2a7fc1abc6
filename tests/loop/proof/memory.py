"""Checkpoints that are kept in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl_cli.contracts.ports import LoopSnapshot
from asyncrl_cli.loop.run_state import ResumeFrom
from tests.loop.proof.data_watch import DataWatch


def resume_from(snapshot: LoopSnapshot, state: Mapping[str, Any]) -> ResumeFrom:
    """What a checkpoint gives back: its arrays, and those of what running groups had."""
    payloads = [*snapshot.payloads, *((f"{key}/so-far",) for key in snapshot.partial_groups)]
    return ResumeFrom(loop_state=state, payloads=payloads)


class MemoryCheckpoints:
    """Implements `contracts.ports.CheckpointWriter` in memory: the snapshots as they would be read back from
    JSON."""

    def __init__(self, write_s: float = 0.0, data: DataWatch | None = None) -> None:
        """`data`: where the keys of the snapshots have to be until they are written."""
        self.snapshots: list[Any] = []
        self._write_s = write_s
        self._data = data

    async def write(self, snapshot: Any) -> Path:
        state = json.loads(json.dumps(snapshot.loop_state))
        keys = [*chain.from_iterable(snapshot.payloads), *snapshot.partial_tokens]
        with self._data.reading(keys, "a checkpoint's write") if self._data else nullcontext():
            await asyncio.sleep(self._write_s)
        self.snapshots.append((snapshot, state))
        return Path(f"step-{snapshot.step:06d}")
