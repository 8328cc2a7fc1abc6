"""Kills a process of a running vLLM engine, and looks at all who wait for it."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import psutil
import pytest

from asyncrl_cli.base.errors import ExecutorFailed
from tests.engines.made import sampling
from tests.engines.vllm.vllm_processes import engine_processes
from tests.engines.vllm.vllm_world import MAX_RESPONSE_TOKENS, World

FAILS_WITHIN_S = 90.0
"""Where two share a model, vLLM gives the survivor 5 s to end by itself and 4 s to heed a SIGTERM; and the
machine may be busy."""
GONE_WITHIN_S = 60.0


async def kill_and_expect(there: World, victim: str, how_it_ended: str) -> None:
    how = sampling(MAX_RESPONSE_TOKENS, temperature=0.1)
    began = there.engine.version
    waits = [asyncio.create_task(there.generate([5, 6, 7], how)) for _ in range(8)]
    await there.sampled(20)
    version = there.newer()
    waits.append(asyncio.create_task(there.load(version, "drain")))
    await asyncio.sleep(0)
    # behind the gate that the drain has closed
    waits.append(asyncio.create_task(there.generate([5, 6, 7], how)))
    await asyncio.sleep(0)
    processes = engine_processes(os.getpid())
    processes[victim].send_signal(signal.SIGKILL)
    errors = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), FAILS_WITHIN_S)
    (told,) = {str(error) for error in errors}
    assert re.match(rf"vLLM's engine process has ended \(({how_it_ended})", told)
    assert all(isinstance(error, ExecutorFailed) for error in errors), errors
    for later in (there.generate([5], how), there.engine.score([[5, 6]], 1.0)):
        with pytest.raises(ExecutorFailed, match="engine process has ended"):
            await later
    assert there.engine.version == began
    _, alive = psutil.wait_procs(list(processes.values()), timeout=GONE_WITHIN_S)
    assert alive == []
