"""Checkpoints that are kept in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.contracts.ports import LoopSnapshot
from asyncrl_cli.loop.run_state import ResumeFrom


def resume_from(snapshot: LoopSnapshot, state: Mapping[str, Any]) -> ResumeFrom:
    """What a checkpoint gives back: its arrays, and those of what running groups had."""
    payloads = [*snapshot.payloads, *((f"{key}/so-far",) for key in snapshot.partial_groups)]
    return ResumeFrom(loop_state=state, payloads=payloads)


class MemoryCheckpoints:
    """Implements `contracts.ports.CheckpointWriter` in memory: the snapshots as they would be read back from
    JSON."""

    def __init__(self, write_s: float = 0.0) -> None:
        self.snapshots: list[Any] = []
        self._write_s = write_s

    async def write(self, snapshot: Any) -> Path:
        state = json.loads(json.dumps(snapshot.loop_state))
        await asyncio.sleep(self._write_s)
        self.snapshots.append((snapshot, state))
        return Path(f"step-{snapshot.step:06d}")
