"""One model shared by two of vLLM's worker processes on a CPU (`rollout.tensor_parallel_size`): same logprobs, loads included."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM

from asyncrl_cli.rollout.vllm_settings import VllmOptions
from tests.engines import needs_vllm
from tests.rollout.vllm_world import sampling, world

pytestmark = [
    pytest.mark.slow,
    needs_vllm,
    pytest.mark.filterwarnings("default"),  # vLLM's imports warn
    pytest.mark.timeout(300),
]


def test_two_processes_that_share_a_model_sample_what_plain_forwards_score(model: Qwen3ForCausalLM, model_dir: Path) -> None:
    with world(model, model_dir, options=VllmOptions(tensor_parallel_size=2)) as there:

        async def body() -> None:
            prompt, version = [5, 6, 7], there.newer()
            first = await there.generate(prompt, sampling(32))
            await there.engine.load(there.weights[version], version, "drain")
            second = await there.generate(prompt, sampling(32))
            assert (set(first.versions), set(second.versions)) == ({0}, {version})
            assert first.logprobs == pytest.approx(there.plain(0, prompt, first), abs=1e-4)
            assert second.logprobs == pytest.approx(there.plain(version, prompt, second), abs=1e-4)

        there.run(body)
