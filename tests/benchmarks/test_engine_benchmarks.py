"""The engine benchmarks start, say what they are for, and run at their smallest size."""

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
NAMES = ("weight_sync", "engines", "inflight", "gpu_smoke")
ALL_HELP = """
import contextlib, runpy, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    sys.argv = [name, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_module(name, run_name="__main__")
"""
"""In one process: their imports take seconds."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def ran(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(str(BENCHMARKS / f"{name}.py"), *arguments)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=500, env=environment, check=False)


def figures_of(name: str, *arguments: str) -> dict[str, object]:
    ended = ran(name, *arguments, "--json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    # vLLM's processes log to stdout: the figures are its last line.
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_every_benchmark_says_how_it_is_run() -> None:
    ended = python("-c", ALL_HELP, str(BENCHMARKS), *NAMES)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for name in NAMES:
        assert f"usage: {name} " in ended.stdout
        assert f"python benchmarks/{name}.py" in ended.stdout


def test_no_gpu_is_said_and_is_no_failure() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    ended = ran("gpu_smoke")
    assert (ended.returncode, ended.stdout.count("\n")) == (0, 1)
    assert ended.stdout.startswith("skipped: ")


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
    phases = {"gather", "send", "load", "stall", "zero", "memcpy", "packing", "fingerprint", "probe", "trainer", "naive"}
    assert phases <= seconds.keys()
    assert 0 < seconds["load"] <= seconds["stall"]
    assert 0 < seconds["fingerprint"] < seconds["send"]
    assert seconds["probe"] > 0
    assert seconds["trainer"] >= seconds["gather"] > 0
    assert (seconds["packing"] > 0) == (engine == "vllm")


def test_inflight_makes_the_syncs_it_counts_and_a_plot(tmp_path: Path) -> None:
    """With the engine that starts in a second; how vLLM is started and loaded here is `weight_sync`'s test."""
    sizes = ["--slots", "4", "--tokens", "16", "--steps", "4", "--warm-s", "0.2", "--repeat", "1", "--k", "2"]
    found = figures_of("inflight", "--engine", "transformers", *sizes, "--plot", str(tmp_path / "plot.png"))
    (stretches,) = found["stretches"]["transformers"]  # type: ignore[index]
    synced = [stretch for stretch in stretches if stretch["interrupt"]]
    assert [stretch["interrupt"] for stretch in synced] == ["recompute-kv", "keep-kv", "drain"]
    assert all(stretch["k"] == 2 and stretch["tokens"] > 0 and 1 <= stretch["syncs"] <= 2 for stretch in synced)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
