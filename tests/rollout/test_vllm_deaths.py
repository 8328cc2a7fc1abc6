"""Who goes when a process of a vLLM engine is killed. An engine of its own for each test."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from transformers import Qwen3ForCausalLM

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.rollout.vllm_settings import VllmOptions
from tests.engines import needs_vllm
from tests.rollout.vllm_world import MAX_RESPONSE_TOKENS, sampling, world

pytestmark = [
    pytest.mark.slow,
    needs_vllm,
    pytest.mark.filterwarnings("default"),  # vLLM's imports warn
    pytest.mark.timeout(300),
]
FAILS_WITHIN_S = 10.0
GONE_WITHIN_S = 20.0  # vLLM gives its worker 4 s; and the machine may be busy

HOLD_AN_ENGINE = """
import asyncio, sys
from asyncrl_cli.rollout.engine import Sampling
from asyncrl_cli.rollout.vllm_engine import VllmEngine
from asyncrl_cli.rollout.vllm_settings import VllmSetup

async def main():
    engine = VllmEngine(VllmSetup(model_dir=sys.argv[1], slots=2, max_prompt_tokens=8, max_response_tokens=900))
    await engine.start()
    how = Sampling(temperature=0.1, max_response_tokens=900)
    running = asyncio.create_task(engine.generate("a", [5, 6], how, 0))
    while engine.sampled_tokens == 0:
        await asyncio.sleep(0.01)
    print("generating", flush=True)
    await running
    await asyncio.sleep(1000)

if __name__ == "__main__":
    asyncio.run(main())
"""


def engine_processes(pid: int) -> dict[str, psutil.Process]:
    """vLLM's, by the names that they give themselves: VLLM::EngineCore, VLLM::Worker."""
    named = {_name_of(child): child for child in psutil.Process(pid).children(recursive=True)}
    return {name: process for name, process in named.items() if name.startswith("VLLM::")}


def _name_of(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:  # a child that another test has left, dead and not waited for
        return ""


def test_a_killed_owner_takes_its_engines_processes_along(model_dir: Path, tmp_path: Path) -> None:
    program = tmp_path / "hold.py"
    program.write_text(HOLD_AN_ENGINE)
    owner = subprocess.Popen([sys.executable, str(program), str(model_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert "generating\n" in owner.stdout  # vLLM writes its warnings there too
        processes = psutil.Process(owner.pid).children(recursive=True)
        assert len(engine_processes(owner.pid)) == 2
    finally:
        owner.kill()
        owner.communicate(timeout=GONE_WITHIN_S)  # ends only when nobody holds its stdout any more
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    assert alive == []


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[None]:
    """Our stdout is a file, as a rollout worker's is: vLLM's processes inherit it. (Where pytest captures it, it is one anyway.)"""
    ours, file = os.dup(1), os.open(tmp_path / "rollout-0.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    yield
    os.dup2(ours, 1)
    os.close(ours)
    os.close(file)


@pytest.mark.usefixtures("log_file")
def test_a_start_that_fails_in_another_process_is_told_with_its_error(model: Qwen3ForCausalLM, model_dir: Path) -> None:
    too_small = VllmOptions(engine_args={"kv_cache_memory_bytes": 1000})
    with (
        pytest.raises(ExecutorFailed, match=r"vLLM did not start: ValueError: No available memory for the cache blocks"),
        world(model, model_dir, options=too_small),
    ):
        pass


@pytest.mark.usefixtures("log_file")
@pytest.mark.parametrize(("victim", "name"), [("VLLM::EngineCore", "EngineCore"), ("VLLM::Worker", "VllmWorker-0")])
def test_a_killed_engine_fails_all_that_wait_for_it(model: Qwen3ForCausalLM, model_dir: Path, victim: str, name: str) -> None:
    with world(model, model_dir) as there:

        async def body() -> None:
            how = sampling(MAX_RESPONSE_TOKENS, temperature=0.1)
            waits = [asyncio.create_task(there.generate([5, 6, 7], how)) for _ in range(8)]
            await there.sampled(20)
            version = there.newer()
            waits.append(asyncio.create_task(there.engine.load(there.weights[version], version, "drain")))
            await asyncio.sleep(0)
            waits.append(asyncio.create_task(there.generate([5, 6, 7], how)))  # behind the gate that the drain has closed
            await asyncio.sleep(0)
            processes = engine_processes(os.getpid())
            killed_s = time.monotonic()
            processes[victim].send_signal(signal.SIGKILL)
            errors = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), FAILS_WITHIN_S)
            print(f"{victim}: all failed in {time.monotonic() - killed_s:.2f} s with {errors[0]!r}")
            assert all(isinstance(error, ExecutorFailed) for error in errors), errors
            assert {str(error) for error in errors} == {str(errors[0])}
            assert str(errors[0]) == f"vLLM's engine process has ended ({name} with SIGKILL)"
            for later in (there.generate([5], how), there.engine.score([[5, 6]], 1.0)):
                with pytest.raises(ExecutorFailed, match="engine process has ended"):
                    await later
            _, alive = psutil.wait_procs(list(processes.values()), timeout=GONE_WITHIN_S)
            assert alive == []

        there.run(body)
