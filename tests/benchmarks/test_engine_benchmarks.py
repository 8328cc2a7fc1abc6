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
MANY = """
import contextlib, io, json, runpy, sys
ended = {}
for name, *arguments in json.loads(sys.argv[1]):
    sys.argv, said, code = [f"{name}.py", *arguments], io.StringIO(), 0
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_module(name, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    ended[" ".join([name, *arguments[:1]])] = code, said.getvalue()
print(json.dumps(ended))
"""
INFLIGHT = ["--slots", "4", "--tokens", "16", "--steps", "4", "--warm-s", "0.2", "--repeat", "1", "--k", "2"]
ENGINES = ["--model", "builtin", "--sequences", "1", "2", "--tokens", "8", "--repeat", "1", "--json"]
WEIGHT_SYNC = ["--mb", "1", "--repeat", "1", "--json"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment,
        check=False,
    )


@pytest.fixture(scope="module")
def plot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inflight") / "plot.png"


@pytest.fixture(scope="module")
def embedded(plot: Path) -> dict[str, tuple[int, str]]:
    """Exit code and stdout of all that need no vLLM, one after the other in one process: their imports take
    seconds."""
    commands = [
        *([name, "--help"] for name in NAMES),
        ["engines", "--no-vllm", *ENGINES],
        ["weight_sync", "--engine=transformers", *WEIGHT_SYNC],
        ["inflight", "--engine=transformers", *INFLIGHT, "--json", "--plot", str(plot)],
    ]
    ended = python("-c", MANY, json.dumps(commands))
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def figures(stdout: str) -> dict[str, object]:
    """vLLM's processes log to stdout: the figures are its last line."""
    found = json.loads(stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_every_benchmark_says_how_it_is_run(embedded: dict[str, tuple[int, str]]) -> None:
    for name in NAMES:
        code, stdout = embedded[f"{name} --help"]
        assert code == 0
        assert f"usage: {name}" in stdout
        assert f"python benchmarks/{name}.py" in stdout


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


def test_engines_makes_a_rate_for_each_side_of_the_embedded_engine(
    embedded: dict[str, tuple[int, str]],
) -> None:
    found = figures(embedded["engines --no-vllm"][1])
    rates = found["builtin"]["rates"]  # type: ignore[index]
    assert list(rates) == ["1", "2"]
    assert all(rate > 0 for by_side in rates.values() for rate in by_side["transformers"][0].values())


def test_weight_sync_times_every_phase(embedded: dict[str, tuple[int, str]]) -> None:
    """The benchmark itself fails if the engine's logprobs are not the trainer's after a load."""
    assert_every_phase_is_timed(figures(embedded["weight_sync --engine=transformers"][1]), "transformers")


@needs_vllm
def test_weight_sync_times_every_phase_of_vllm() -> None:
    ended = python(str(BENCHMARKS / "weight_sync.py"), "--engine=vllm", *WEIGHT_SYNC)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert_every_phase_is_timed(figures(ended.stdout), "vllm")


def assert_every_phase_is_timed(found: dict[str, object], engine: str) -> None:
    (result,) = found["results"]  # type: ignore[misc]
    (seconds,) = result["seconds"]
    phases = {
        "gather",
        "send",
        "load",
        "stall",
        "zero",
        "memcpy",
        "packing",
        "fingerprint",
        "probe",
        "trainer",
        "naive",
    }
    assert phases <= seconds.keys()
    assert 0 < seconds["load"] <= seconds["stall"]
    assert 0 < seconds["fingerprint"] < seconds["send"]
    assert seconds["probe"] > 0
    assert seconds["trainer"] >= seconds["gather"] > 0
    assert (seconds["packing"] > 0) == (engine == "vllm")


def test_inflight_makes_the_syncs_it_counts_and_a_plot(
    embedded: dict[str, tuple[int, str]], plot: Path
) -> None:
    """With the engine that starts in a second; how vLLM is started and loaded here is `weight_sync`'s
    test."""
    found = figures(embedded["inflight --engine=transformers"][1])
    (stretches,) = found["stretches"]["transformers"]  # type: ignore[index]
    synced = [stretch for stretch in stretches if stretch["interrupt"]]
    assert [stretch["interrupt"] for stretch in synced] == ["recompute-kv", "keep-kv", "drain"]
    assert all(
        stretch["k"] == 2 and stretch["tokens"] > 0 and 1 <= stretch["syncs"] <= 2 for stretch in synced
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
