"""A tied model: the head must follow the embedding, and if it did not, the probes would say so; and loads
that fail. An engine of its own, whose functions are replaced in the process that holds the model. A test that
ends it leaves the next one a new one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.profile.arithmetic import MAX_LOGPROB_DIFF
from asyncrl_cli.weights.versions import make_probes, mean_abs_diff
from tests.engines import tiny
from tests.engines.made import prompts, sampling
from tests.engines.needs import runs_vllm
from tests.engines.vllm.vllm_world import FUNCTIONS_MAY_BE_SENT, MAX_RESPONSE_TOKENS, World, replace, world

pytestmark = runs_vllm
LOOKS = 1000
"""At what the engine process holds, some milliseconds each: together they take much longer than
DROP_AFTER_S."""
ALARM = MAX_LOGPROB_DIFF["float32"]
PROBES = [list(probe) for probe in make_probes(4, 64, 0)]


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], World]]:
    """The engine of all tests here; another one, if it has failed for good."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as running:
        patch.setenv(*FUNCTIONS_MAY_BE_SENT)
        model = tiny.make_model(tied=True)
        directory = tiny.save(model, tmp_path_factory.mktemp("tied"))
        worlds: list[World] = []

        def world_of_a_living_engine() -> World:
            if not worlds or worlds[-1].engine.failure:
                running.close()
                worlds.append(running.enter_context(world(model, directory)))
            return worlds[-1]

        yield world_of_a_living_engine


@pytest.fixture
def tied(living: Callable[[], World]) -> World:
    return living()


async def load_newer(there: World) -> int:
    version = there.newer()
    await there.load(version, "recompute-kv")
    return version


async def probe_diff(there: World, version: int) -> float:
    scores = await there.engine.score(PROBES, 1.0)
    plain = [tiny.plain_logprobs(there.model, there.weights[version], probe) for probe in PROBES]
    return mean_abs_diff(scores.logprobs, plain)


def packed_matrices(worker: Any) -> tuple[int, int]:
    """For `in_engine`: how many there are, of all versions that it has loaded; and of the one that
    generates."""
    import gc

    from vllm._custom_ops import CPUDNNLGEMMHandler

    held = sum(isinstance(one, CPUDNNLGEMMHandler) for one in gc.get_objects())
    return held, sum("cpu_linear" in vars(layer) for layer in worker.get_model().modules())


def collector(worker: Any, is_on: bool) -> None:
    """For `in_engine`: Python's garbage collector, which runs when it likes, must not be what frees old
    layers."""
    import gc

    gc.collect()
    (gc.enable if is_on else gc.disable)()


@asynccontextmanager
async def at_the_end_one_version_is_held(tied: World) -> AsyncIterator[None]:
    await tied.in_engine(collector, False)
    try:
        yield
        for _ in range(LOOKS):  # what a version held goes in a thread, just after the next one's load
            held, of_the_model = await tied.in_engine(packed_matrices)
            if held == of_the_model:
                break
        assert held == of_the_model > 0, (
            f"{held} packed matrices after {LOOKS} looks, of which the model has {of_the_model}"
        )
    finally:
        await tied.in_engine(collector, True)


async def check_that_the_head_follows(tied: World) -> None:
    before = tied.engine.version
    version = tied.newer()
    requests = prompts(8)
    generating = asyncio.create_task(tied.all_of(requests, sampling(200, temperature=0.8)))
    await tied.sampled(100)
    await tied.load(version, "recompute-kv")
    assert await probe_diff(tied, version) < 1e-4
    completions = await generating
    assert any(set(completion.versions) == {before, version} for completion in completions)
    for prompt, completion in zip(requests, completions, strict=True):
        plain = {v: tied.plain(v, prompt, completion, 0.8) for v in (before, version)}
        expected = [plain[v][i] for i, v in enumerate(completion.versions)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


async def check_that_the_probes_tell_of_a_head_left_behind(tied: World) -> None:
    async with tied.replaced("pack_tied_layers", "does nothing"):
        diff = await probe_diff(tied, await load_newer(tied))
    print(f"probes without packing the tied head: {diff:.3f}")
    assert diff > 100 * ALARM
    assert await probe_diff(tied, await load_newer(tied)) < 1e-4


def test_a_tied_head_follows_its_embedding(tied: World) -> None:
    tied.run(lambda: check_that_the_head_follows(tied))


def test_the_probes_tell_of_a_head_that_was_left_behind(tied: World) -> None:
    tied.run(lambda: check_that_the_probes_tell_of_a_head_left_behind(tied))


async def test_loads_in_a_row_hold_one_versions_layers_and_leave_the_collector_nothing_to_do(
    tied: World,
) -> None:
    async with at_the_end_one_version_is_held(tied):
        await load_newer(tied)
        for _ in range(3):
            await load_newer(tied)


async def test_a_load_that_fails_half_way_ends_the_engine_rather_than_mix_versions(tied: World) -> None:
    """At the end of the file: a test after it would need another engine."""

    before = tied.engine.version
    running = asyncio.create_task(tied.generate([5, 6, 7], sampling(MAX_RESPONSE_TOKENS, temperature=0.1)))
    await tied.sampled(5)
    await tied.in_engine(replace, "pack_tied_layers", "fails")
    with pytest.raises(ExecutorFailed, match=r"half-way.*no memory for packing"):
        await load_newer(tied)
    with pytest.raises(ExecutorFailed, match="half-way"):
        await running
    with pytest.raises(ExecutorFailed, match="half-way"):
        await tied.generate([5], sampling())
    assert tied.engine.version == before
    assert tied.engine.running == 0
