"""A tied model: the head must follow the embedding, and if it did not, the probes would say so; and loads that fail. An engine of
its own, whose functions are replaced in vLLM's worker process."""

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


def replaced(worker: Any, name: str, how: str) -> None:
    """Runs in vLLM's worker: a function of `weights/vllm_twin.py` does otherwise from here on."""
    from asyncrl_cli.weights import vllm_twin

    def fails(*args: Any) -> None:
        raise MemoryError("no memory for packing")

    original = vars(vllm_twin).setdefault(f"original_{name}", getattr(vllm_twin, name))
    ways = {"original": original, "does nothing": lambda *args: None, "is false": lambda *args: False, "fails": fails}
    setattr(vllm_twin, name, ways[how])


async def replace(there: World, name: str, how: str) -> None:
    assert there.engine._llm is not None
    await there.engine._llm.collective_rpc(replaced, args=(name, how))


def packed_matrices(worker: Any) -> int:
    """Runs in vLLM's worker: how many it holds, of all versions that it has loaded."""
    import gc

    from vllm._custom_ops import CPUDNNLGEMMHandler

    return sum(isinstance(one, CPUDNNLGEMMHandler) for one in gc.get_objects())


async def check_that_the_head_follows(tied: World) -> None:
    before = tied.engine.version
    requests = prompts(8)
    generating = asyncio.create_task(tied.all_of(requests, sampling(100, temperature=0.8)))
    await tied.sampled(100)
    version = await load_newer(tied)
    assert await probe_diff(tied, version) < 1e-4
    completions = await generating
    assert any(set(completion.versions) == {before, version} for completion in completions)
    for prompt, completion in zip(requests, completions, strict=True):
        plain = {v: tied.plain(v, prompt, completion, 0.8) for v in (before, version)}
        expected = [plain[v][i] for i, v in enumerate(completion.versions)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


async def check_that_the_probes_tell_of_a_head_left_behind(tied: World) -> None:
    await replace(tied, "pack_tied_layers", "does nothing")
    diff = await probe_diff(tied, await load_newer(tied))
    print(f"probes without packing the tied head: {diff:.3f}")
    assert diff > 100 * ALARM
    await replace(tied, "pack_tied_layers", "original")
    assert await probe_diff(tied, await load_newer(tied)) < 1e-4


def test_a_tied_head_follows_its_embedding(tied: World) -> None:
    tied.run(lambda: check_that_the_head_follows(tied))


def test_the_probes_tell_of_a_head_that_was_left_behind(tied: World) -> None:
    tied.run(lambda: check_that_the_probes_tell_of_a_head_left_behind(tied))


def test_loads_in_a_row_hold_one_versions_layers_and_leave_the_collector_nothing_to_do(tied: World) -> None:
    async def body() -> None:
        assert tied.engine._llm is not None
        await load_newer(tied)
        given_up = tied.newer()
        await tied.engine.prepare(tied.weights[given_up], given_up)
        prepared = (await tied.engine._llm.collective_rpc(packed_matrices))[0]
        for _ in range(3):
            await load_newer(tied)
        held = prepared
        while held > prepared / 2:  # what a version held goes in a thread, just after the next one's load
            held = (await tied.engine._llm.collective_rpc(packed_matrices))[0]
        assert held > 0

    tied.run(body)


def test_a_preparation_that_fails_leaves_the_old_version_serving(tied: World) -> None:
    async def body() -> None:
        await replace(tied, "pack_tied_layers", "fails")
        before = tied.engine.version
        how = sampling(MAX_RESPONSE_TOKENS, temperature=0.8)
        running = asyncio.create_task(tied.generate([5, 6, 7], how))
        await tied.sampled(5)
        for _ in range(2):
            with pytest.raises(ExecutorFailed, match="could not prepare the next weights: MemoryError: no memory for packing"):
                await load_newer(tied)
        completion = await running
        assert set(completion.versions) == {before}
        assert completion.logprobs == pytest.approx(tied.plain(before, [5, 6, 7], completion, 0.8), abs=1e-4)
        assert tied.engine.version == before
        await replace(tied, "pack_tied_layers", "original")
        assert await probe_diff(tied, await load_newer(tied)) < 1e-4

    tied.run(body)


def test_layers_that_cannot_be_exchanged_are_overwritten_in_place(tied: World) -> None:
    """As on GPUs. From here on: vLLM keeps the loaders of a model that was loaded in place, and no twin can have them."""

    async def body() -> None:
        await replace(tied, "is_exchangeable", "is false")
        await replace(tied, "exchange", "fails")
        await check_that_the_head_follows(tied)
        await check_that_the_probes_tell_of_a_head_left_behind(tied)

    tied.run(body)


def test_a_load_that_fails_half_way_ends_the_engine_rather_than_mix_versions(tied: World) -> None:
    """The module's last test: it ends the engine."""

    async def body() -> None:
        await replace(tied, "is_exchangeable", "is false")
        await replace(tied, "pack_tied_layers", "fails")
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
