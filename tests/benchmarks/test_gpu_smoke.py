"""gpu_smoke.py runs on a CPU with small models, says why it cannot run a check, and keeps the table of
docs/gpu.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("ray", "openai", "pydantic_settings", "vllm")))  # an import of these fails
import gpu_smoke_trainer, gpu_smoke_measures, gpu_smoke_engine, gpu_smoke_loop
import asyncrl_cli.profile.loaded
"""
ENDS_WITHIN_S = 20.0
BROKEN = """
import os, subprocess, time

def check_raises(machine, figures):
    figures["seen"] = 3
    raise RuntimeError("no such kernel")

def check_dies(machine, figures):
    os._exit(7)

def check_hangs(machine, figures):
    time.sleep(1000)

def check_leaves_a_process(machine, figures):
    figures["left"] = subprocess.Popen(["sleep", "1000"]).pid
"""


def gpu_smoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / "gpu_smoke.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)


def outcomes(stdout: str) -> dict[str, dict[str, object]]:
    return {outcome["check"]: outcome for outcome in map(json.loads, stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checks_run_in_processes_of_their_own_and_are_written_to_the_table(tmp_path: Path) -> None:
    ended = gpu_smoke("--device", "cpu", "--check", "attention", "memory", "--json", str(tmp_path / "gpu.md"))
    found = outcomes(ended.stdout)
    assert {name: outcome["end"] for name, outcome in found.items()} == {
        "attention": "passed",
        "memory": "skipped",
    }, ended.stderr[-2000:]
    assert ended.returncode == 0
    assert (tmp_path / "gpu.md").read_text().count("| passed |") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefixes", "modes", "resume", "engine", "loop", "bench"])
def test_a_check_that_needs_torch_and_transformers_alone_passes_on_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported both."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_smoke import CHECKS  # type: ignore[import-not-found]
    from gpu_smoke_kit import Machine  # type: ignore[import-not-found]

    check, figures = CHECKS[name], dict[str, object]()
    assert check.needs == ()
    getattr(import_module(check.module), f"check_{name}")(Machine("cpu", tmp_path), figures)
    assert figures


@pytest.mark.slow
def test_a_bare_machine_needs_no_ray_openai_or_pydantic_settings() -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    }
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_a_machine_that_can_run_nothing_is_told_why_and_exits_with_2() -> None:
    """`sleep` needs vLLM and a GPU."""
    ended = gpu_smoke("--device", "cpu", "--check", "sleep")
    assert ended.returncode == 2, ended.stderr[-2000:]
    (outcome,) = outcomes(ended.stdout).values()
    assert outcome["end"] == "skipped"
    assert outcome["detail"] in ("vllm not installed", "needs a GPU: on CPUs tests/engines/vllm covers it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limit_s", "detail"),
    [
        ("raises", 200.0, "RuntimeError: no such kernel"),
        ("dies", 200.0, "its process ended with 7"),
        ("hangs", 0.1, "it had not ended after 0.1 s"),
    ],
)
def test_a_check_that_ends_badly_is_a_failure_and_not_the_end(
    name: str, limit_s: float, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_smoke_process  # type: ignore[import-not-found]

    (tmp_path / "broken_checks.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gpu_smoke_process, "END_S", 0.1)
    outcome = gpu_smoke_process.outcome_of(name, "broken_checks", "cpu", tmp_path, limit_s)
    assert (outcome["end"], outcome["detail"]) == ("failed", detail)
    if name == "raises":
        assert outcome["figures"] == {"seen": 3}


@pytest.mark.slow
def test_processes_that_a_check_has_started_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_smoke_process

    (tmp_path / "broken_checks.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    outcome = gpu_smoke_process.outcome_of("leaves_a_process", "broken_checks", "cpu", tmp_path, 200.0)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(outcome["figures"]["left"]).wait(ENDS_WITHIN_S)  # TimeoutExpired: it lives on


def test_the_table_keeps_what_others_have_measured_and_names_what_nobody_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_smoke import BEGIN, END, write_table

    path = tmp_path / "gpu.md"
    path.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    common = {"seconds": 1.5, "card": "H100, 2.13.0, 5.19.0"}
    ran = {
        "check": "bench",
        "end": "passed",
        "detail": "",
        "figures": {"tokens_per_s": 1234.5, "of_peak": 0.4},
        **common,
    }
    failed = {"check": "loop", "end": "failed", "detail": "a | b", "figures": {}, **common}
    skipped = {"check": "engine", "end": "skipped", "detail": "no GPU", "figures": {}, **common}
    write_table(path, [ran])
    write_table(path, [failed, skipped])
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "| bench | passed | H100, 2.13.0, 5.19.0 | 1.5 | tokens_per_s 1234.5, of_peak 0.4 |" in lines
    assert "| loop | **failed**: a / b | H100, 2.13.0, 5.19.0 | 1.5 |  |" in lines
    assert "| engine | not yet run | | | |" in lines
