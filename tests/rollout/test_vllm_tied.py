"""A tied model: the head must follow the embedding, and if it did not, the probes would say so. An engine of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.profile.schema import WeightsSection
from asyncrl_cli.weights.probes import make_probes, mean_abs_diff
from tests.engines import needs_vllm
from tests.rollout import tiny
from tests.rollout.vllm_world import MAX_RESPONSE_TOKENS, World, prompts, sampling, world

pytestmark = [
    pytest.mark.slow,
    needs_vllm,
    pytest.mark.filterwarnings("default"),  # vLLM's imports warn
    pytest.mark.timeout(600),
]
ALARM = WeightsSection().max_logprob_diff
PROBES = [list(probe) for probe in make_probes(4, 64, 0)]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions of ours run in the worker, below
        model = tiny.make_model(tied=True)
        with world(model, tiny.save(model, tmp_path_factory.mktemp("tied"))) as running:
            yield running


async def load_newer(there: World) -> int:
    version = there.newer()
    await there.engine.load(there.weights[version], version, "recompute-kv")
    return version


async def probe_diff(there: World, version: int) -> float:
    scores = await there.engine.score(PROBES, 1.0)
    plain = [tiny.plain_logprobs(there.model, there.weights[version], probe) for probe in PROBES]
    return mean_abs_diff(scores.logprobs, plain)


def sabotage(worker: Any, name: str) -> None:
    """Runs in vLLM's worker: a function of the bucket engine's module does nothing, or fails, from here on."""
    from asyncrl_cli.weights import vllm_bucket_engine

    def nothing(model: Any) -> None:
        pass

    def fails(model: Any) -> None:
        raise MemoryError("no memory for packing")

    vllm_bucket_engine.pack_tied_layers = {"nothing": nothing, "fails": fails}[name]


def test_a_tied_head_follows_its_embedding(tied: World) -> None:
    async def body() -> None:
        requests = prompts(8)
        generating = asyncio.create_task(tied.all_of(requests, sampling(100, temperature=0.8)))
        await tied.sampled(100)
        version = await load_newer(tied)
        assert await probe_diff(tied, version) < 1e-4
        completions = await generating
        assert any(set(completion.versions) == {0, version} for completion in completions)
        for prompt, completion in zip(requests, completions, strict=True):
            plain = {v: tied.plain(v, prompt, completion, 0.8) for v in (0, version)}
            expected = [plain[v][i] for i, v in enumerate(completion.versions)]
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)

    tied.run(body)


def test_the_probes_tell_of_a_head_that_was_left_behind(tied: World) -> None:
    async def body() -> None:
        assert tied.engine._llm is not None
        await tied.engine._llm.collective_rpc(sabotage, args=("nothing",))
        version = await load_newer(tied)
        diff = await probe_diff(tied, version)
        print(f"probes without packing the tied head: {diff:.3f}")
        assert diff > 100 * ALARM

    tied.run(body)


def test_a_load_that_fails_half_way_ends_the_engine_rather_than_mix_versions(tied: World) -> None:
    """The module's last test: it ends the engine."""

    async def body() -> None:
        assert tied.engine._llm is not None
        await tied.engine._llm.collective_rpc(sabotage, args=("fails",))
        before = tied.engine.version
        running = asyncio.create_task(tied.generate([5, 6, 7], sampling(MAX_RESPONSE_TOKENS, temperature=0.1)))
        await tied.sampled(5)
        with pytest.raises(ExecutorFailed, match=r"half-way.*no memory for packing"):
            await load_newer(tied)
        with pytest.raises(ExecutorFailed, match="half-way"):
            await running
        with pytest.raises(ExecutorFailed, match="half-way"):
            await tied.generate([5], sampling())
        assert tied.engine.version == before
        assert tied.engine.running == 0

    tied.run(body)
