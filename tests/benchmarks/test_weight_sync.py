"""weight_sync.py runs at its smallest size."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.needs import needs_vllm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALLEST = ("--mb", "1", "--repeat", "1", "--json")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_what_fails_beside_a_measurement_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from engine_kit import beside  # type: ignore[import-not-found]

    async def fails() -> None:
        raise ValueError("the engine is gone")

    async def measured() -> None:
        async with beside([asyncio.sleep(60), fails()]):
            await asyncio.sleep(60)

    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="the engine is gone")):
        asyncio.run(measured())


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_every_phase_is_timed(engine: str) -> None:
    """The benchmark itself fails if the engine's logprobs are not the trainer's after a load."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / "weight_sync.py"), f"--engine={engine}", *SMALLEST]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    # vLLM's processes log to stdout: the figures are its last line
    (result,) = json.loads(ended.stdout.strip().splitlines()[-1])["results"]
    (seconds,) = result["seconds"]
    own = {"gather", "send", "load", "stall", "packing", "fingerprint", "probe", "trainer"}
    assert own | {"zero", "memcpy", "naive"} <= seconds.keys()
    assert 0 < seconds["load"] <= seconds["stall"]
    assert 0 < seconds["fingerprint"] < seconds["send"]
    assert seconds["probe"] > 0
    assert seconds["trainer"] >= seconds["gather"] > 0
    assert (seconds["packing"] > 0) == (engine == "vllm")
