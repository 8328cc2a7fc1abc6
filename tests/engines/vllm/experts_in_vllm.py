"""Real vLLM that returns experts, on a CPU: what the field `routed_experts` has, against plain forward passes
of transformers. `test_vllm_experts.py` runs these tests, in a process that has a Triton for CPUs
(interpreted_triton.py). One engine for all, of a model whose second layer is dense."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl_cli.data.sample_fields import ROUTED_EXPERTS
from asyncrl_cli.engines.port import Completion
from tests.engines import tiny
from tests.engines.made import sampling, transformers_engine
from tests.engines.needs import runs_vllm
from tests.engines.vllm.vllm_world import World, world
from tests.train.test_router_replay import LAYERS, TOP_K, Given, by_layer, conversation_of, make_model

pytestmark = runs_vllm
PAGE_TOKENS, PAGES = 32, 14
"""Enough pages for eight short responses, too few for eight of 56 tokens."""
SIZES = dict(num_hidden_layers=LAYERS + 1, mlp_only_layers=[1], head_dim=32, moe_intermediate_size=64)
PROMPTS = [[3 + (7 * i + 11 * k + i * k) % 60 for k in range(40)] for i in range(2)]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    model = make_model(**SIZES)
    directory = tiny.save(model, tmp_path_factory.mktemp("experts"))
    bytes_per_token = 2 * SIZES["num_hidden_layers"] * 2 * SIZES["head_dim"] * 4  # type: ignore[operator]
    cache = {"block_size": PAGE_TOKENS, "kv_cache_memory_bytes": PAGES * PAGE_TOKENS * bytes_per_token}
    with world(model, directory, engine_args=cache, router_replay=True) as running:
        yield running


def plain_experts(model: Any, segment: Any) -> np.ndarray:
    """Of all tokens but the last, in ascending order, by a forward pass that chooses freely."""
    plain = Given(model)
    with torch.no_grad():
        plain.logprobs(segment)
    return torch.stack(plain.seen, dim=1).sort(-1).values.numpy()


def experts_of(prompt: list[int], completion: Completion) -> tuple[Any, np.ndarray]:
    """The segment, and its experts in ascending order. The last token was no input."""
    segment = conversation_of(prompt, completion)
    found = np.sort(by_layer(segment), -1)
    assert (found[-1] == -1).all()
    return segment, found[:-1]


async def loaded(there: World, model: Any, interrupt: Any) -> int:
    version = there.engine.version + 1
    await there.load_these(there.engine.form.to_files(model.state_dict()), version, interrupt)
    return version


async def test_they_are_those_of_a_plain_forward_pass(there: World) -> None:
    """Of prompts, too, whose keys responses share in vLLM's cache, and after preemptions for lack of
    cache."""
    requests = [prompt for prompt in PROMPTS for _ in range(4)]
    for tokens in (12, 56):
        before = there.engine.counters().sums
        completions = await there.all_of(requests, sampling(tokens))
        for prompt, completion in zip(requests, completions, strict=True):
            segment, found = experts_of(prompt, completion)
            np.testing.assert_array_equal(found, plain_experts(there.model, segment))
        after = there.engine.counters().sums
        assert after["cached_prompt_tokens"] > before["cached_prompt_tokens"]
        assert (after["preemptions"] > before["preemptions"]) == (tokens == 56)


async def test_they_are_what_the_other_engine_records_of_the_same_tokens(there: World) -> None:
    (prompt, *_), how = PROMPTS, sampling(12)
    ours = await there.generate(prompt, how)
    directory = Path(there.engine._place.model_dir)
    async with transformers_engine(directory, router_replay=True) as engine:
        tokens = [*prompt, *ours.tokens[:-1]]
        theirs = (await engine.generate("r", tokens, sampling(1), 0)).prompt_fields[ROUTED_EXPERTS]
    rows = [*ours.prompt_fields[ROUTED_EXPERTS], *ours.fields[ROUTED_EXPERTS][:-1]]
    assert {(row.dtype, row.shape) for row in rows} == {(np.dtype("int16"), (LAYERS * TOP_K,))}
    assert {(row.dtype, row.shape) for row in theirs} == {(np.dtype("int16"), (LAYERS * TOP_K,))}
    in_order = [np.sort(np.stack(one).reshape(-1, LAYERS, TOP_K), -1) for one in (rows, theirs)]
    np.testing.assert_array_equal(*in_order)


@pytest.mark.parametrize("interrupt", ["recompute-kv", "keep-kv"])
async def test_tokens_keep_those_of_the_pass_that_sampled_from_them(there: World, interrupt: Any) -> None:
    """A load in the middle; then the responses so far go on in another request, with the first weights."""
    models = [make_model(seed, **SIZES) for seed in (5, 6)]
    await loaded(there, models[0], "drain")
    requests = PROMPTS * 2
    running = [
        asyncio.create_task(there.engine.generate(f"{interrupt} {i}", prompt, sampling(48), i))
        for i, prompt in enumerate(requests)
    ]
    await there.sampled(4 * len(requests))
    second = await loaded(there, models[1], interrupt)
    await there.sampled(4 * len(requests))
    begun = [there.engine.so_far(f"{interrupt} {i}") for i in range(len(requests))]
    for i in range(len(requests)):
        await there.engine.abort(f"{interrupt} {i}")
    prompt, one, aborted = next(
        (prompt, one, aborted)
        for prompt, one, aborted in zip(requests, begun, await asyncio.gather(*running), strict=True)
        if one is not None and set(one.versions) == {second - 1, second}
    )
    # The pass that samples the first token of a version has the token before it as its input.
    boundary = len(prompt) + one.versions.count(second - 1) - 1
    (segment, found), (_, longer) = experts_of(prompt, one), experts_of(prompt, aborted)
    by_first, by_second = (plain_experts(model, segment) for model in models)
    np.testing.assert_array_equal(found[:boundary], by_first[:boundary])
    if interrupt == "recompute-kv":
        np.testing.assert_array_equal(found[boundary:], by_second[boundary:])
    np.testing.assert_array_equal(longer[: len(found)], found)
    await loaded(there, models[0], "drain")
    whole = await there.generate(prompt, sampling(64), so_far=one)
    segment, continued = experts_of(prompt, whole)
    last, afresh = len(prompt) + len(one.tokens) - 1, plain_experts(models[0], segment)
    np.testing.assert_array_equal(continued[len(prompt) : last], found[len(prompt) :])
    np.testing.assert_array_equal(continued[last:], afresh[last:])
