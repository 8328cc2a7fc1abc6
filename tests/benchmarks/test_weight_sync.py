"""weight_sync.py runs at its smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALLEST = ("--mb", "4", "--syncs", "1", "--probes", "2", "--json")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_ranks_and_workers_sync_and_each_phase_has_its_figures() -> None:
    """The benchmark itself fails if a worker has other weights, or other logprobs, than the trainer."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = ("--cells", "2x1", "--encoding", "delta", *SMALLEST)
    command = [sys.executable, str(BENCHMARKS / "weight_sync.py"), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    (result,) = json.loads(ended.stdout.strip().splitlines()[-1])["results"]
    assert all(result[key] > 0 for key in ("stall", "rank CPU", "send", "worker CPU", "pause", "memcpy"))
    assert 0 < result["fetched"] < 0.02 * 4 * 2**20
