"""Checkpoints that are kept in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.contracts.ports import Cut
from asyncrl_cli.loop.run_state import ResumeFrom


def resume_from(cut: Cut, state: Mapping[str, Any]) -> ResumeFrom:
    """What a checkpoint gives back: its arrays, and those of what running groups had."""
    payloads = [*cut.payloads, *((f"so far of {key}",) for key in cut.partial_groups)]
    return ResumeFrom(loop_state=state, payloads=payloads)


class MemoryCheckpoints:
    """Implements `contracts.ports.CheckpointWriter` in memory: the cuts as they would be read back from
    JSON."""

    def __init__(self, write_s: float = 0.0) -> None:
        self.cuts: list[Any] = []
        self._write_s = write_s

    async def write(self, cut: Any) -> Path:
        state = json.loads(json.dumps(cut.loop_state))
        await asyncio.sleep(self._write_s)
        self.cuts.append((cut, state))
        return Path(f"step-{cut.step:06d}")
