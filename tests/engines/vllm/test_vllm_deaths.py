"""Who goes when a process of a vLLM engine is killed, and two that share a model. An engine of its own for
each test; that of test_vllm_engine.py is killed at the end."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from transformers import Qwen3ForCausalLM

from asyncrl_cli.base.errors import ConfigError, ExecutorFailed
from tests.engines.made import sampling
from tests.engines.needs import runs_vllm
from tests.engines.vllm.vllm_kills import GONE_WITHIN_S, kill_and_expect
from tests.engines.vllm.vllm_processes import engine_processes
from tests.engines.vllm.vllm_world import world

pytestmark = runs_vllm

HOLD_AN_ENGINE = """
import asyncio, sys
from asyncrl_cli.engines.port import Sampling
from asyncrl_cli.engines.vllm.vllm_engine import VllmEngine
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


def test_a_killed_owner_takes_its_engines_processes_along(model_dir: Path, tmp_path: Path) -> None:
    program = tmp_path / "hold.py"
    program.write_text(HOLD_AN_ENGINE)
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, str(program), str(model_dir)]
    owner = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    try:
        assert owner.stdout is not None
        assert "generating\n" in owner.stdout  # vLLM writes its warnings there too
        processes = psutil.Process(owner.pid).children(recursive=True)
        assert list(engine_processes(owner.pid)) == ["EngineCore"]
    finally:
        owner.kill()
        owner.communicate(timeout=GONE_WITHIN_S)  # ends only when nobody holds its stdout any more
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    assert alive == []


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[None]:
    """Our stdout is a file, as a rollout worker's is: vLLM's processes inherit it. (Where pytest captures it,
    it is one anyway.)"""
    ours, file = os.dup(1), os.open(tmp_path / "rollout-0.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    yield
    os.dup2(ours, 1)
    os.close(ours)
    os.close(file)


@pytest.mark.usefixtures("log_file")
def test_a_start_that_fails_in_another_process_is_told_with_its_error(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    too_small = {"kv_cache_memory_bytes": 1000}
    with (
        pytest.raises(
            ExecutorFailed, match=r"vLLM did not start: ValueError: No available memory for the cache blocks"
        ),
        world(model, model_dir, engine_args=too_small),
    ):
        pass


def test_settings_that_vllm_refuses_are_told_with_its_reason_which_can_be_sent(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    """By its own checks, before it starts a process."""
    with (
        pytest.raises(ConfigError, match="vLLM refuses its settings: cache_dtype: input") as refused,
        world(model, model_dir, engine_args={"kv_cache_dtype": "nonsense"}),
    ):
        pass
    assert pickle.loads(pickle.dumps(refused.value)).message == refused.value.message


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
            await kill_and_expect(
                there, "Worker_TP1", "VllmWorker-1 with (SIGKILL|an unknown exit code)|.*gloo"
            )

        there.run(body)
