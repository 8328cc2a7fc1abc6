"""Who goes when a process of a vLLM engine is killed, and two that share a model. An engine of its own for each test."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from transformers import Qwen3ForCausalLM

from asyncrl_cli.errors import ExecutorFailed
from tests.engines.needs import needs_vllm
from tests.engines.vllm.vllm_world import MAX_RESPONSE_TOKENS, World, sampling, world

pytestmark = [
    pytest.mark.slow,
    needs_vllm,
    pytest.mark.filterwarnings("default"),  # vLLM's imports warn
    pytest.mark.timeout(300),
]
FAILS_WITHIN_S = 30.0
"""Where two share a model, vLLM gives the survivor 5 s to end by itself and 4 s to heed a SIGTERM; and the machine may be busy."""
GONE_WITHIN_S = 20.0

HOLD_AN_ENGINE = """
import asyncio, sys
from asyncrl_cli.engines.port import Sampling
from asyncrl_cli.engines.vllm.engine import VllmEngine
from tests.engines.made import made_for

async def main():
    engine = VllmEngine(*made_for(sys.argv[1], slots=2, max_prompt_tokens=8, max_response_tokens=900))
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
    """vLLM's, by the names that they give themselves: VLLM::EngineCore, and VLLM::Worker_TP0 where several share a model."""
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
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, str(program), str(model_dir)]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
    try:
        assert owner.stdout is not None
        assert "generating\n" in owner.stdout  # vLLM writes its warnings there too
        processes = psutil.Process(owner.pid).children(recursive=True)
        assert list(engine_processes(owner.pid)) == ["VLLM::EngineCore"]
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
    too_small = {"kv_cache_memory_bytes": 1000}
    with (
        pytest.raises(ExecutorFailed, match=r"vLLM did not start: ValueError: No available memory for the cache blocks"),
        world(model, model_dir, engine_args=too_small),
    ):
        pass


@pytest.mark.usefixtures("log_file")
def test_a_killed_engine_fails_all_that_wait_for_it(model: Qwen3ForCausalLM, model_dir: Path) -> None:
    with world(model, model_dir) as there:
        there.run(lambda: kill_and_expect(there, "VLLM::EngineCore", "EngineCore with SIGKILL"))


@pytest.mark.usefixtures("log_file")
def test_processes_that_share_a_model_sample_what_plain_forwards_score_and_die_together(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    """`rollout.tensor_parallel_size = 2`, before and after a load; then one of the two is killed."""
    with world(model, model_dir, tensor_parallel_size=2) as there:

        async def body() -> None:
            prompt, version = [5, 6, 7], there.newer()
            first = await there.generate(prompt, sampling(32))
            await there.load(version, "drain")
            second = await there.generate(prompt, sampling(32))
            assert (set(first.versions), set(second.versions)) == ({0}, {version})
            assert first.logprobs == pytest.approx(there.plain(0, prompt, first), abs=1e-4)
            assert second.logprobs == pytest.approx(there.plain(version, prompt, second), abs=1e-4)
            # Or the survivor, whose collective failed, was heard first.
            await kill_and_expect(there, "VLLM::Worker_TP1", "VllmWorker-1 with SIGKILL|.*gloo")

        there.run(body)


async def kill_and_expect(there: World, victim: str, how_it_ended: str) -> None:
    how = sampling(MAX_RESPONSE_TOKENS, temperature=0.1)
    began = there.engine.version
    waits = [asyncio.create_task(there.generate([5, 6, 7], how)) for _ in range(8)]
    await there.sampled(20)
    version = there.newer()
    waits.append(asyncio.create_task(there.load(version, "drain")))
    await asyncio.sleep(0)
    waits.append(asyncio.create_task(there.generate([5, 6, 7], how)))  # behind the gate that the drain has closed
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
