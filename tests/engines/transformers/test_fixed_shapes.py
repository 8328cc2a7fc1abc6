"""In a deterministic run, a response is the same whatever runs beside it, to the last bit."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.engines.transformers import batched_model
from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine
from tests.engines.made import made_for, prompts, sampling, transformers_engine

NUM_TOKENS = 90
"""Prompt and response grow past FIXED_KEYS."""
OWN = prompts(9)
OTHERS = prompts(60)[9:]


async def alone(engine: TransformersEngine, number: int, **so_far: Any) -> Completion:
    return await engine.generate(f"own {number}", OWN[number], sampling(NUM_TOKENS), number, **so_far)


async def beside_others(engine: TransformersEngine, seed: int) -> list[Completion]:
    """The same, in an order and among others that `seed` draws; some others are aborted."""
    rng, found = random.Random(seed), dict[int, Completion]()

    async def own(number: int) -> None:
        await asyncio.sleep(rng.random() * 0.05)
        found[number] = await alone(engine, number)

    async def other(number: int) -> None:
        name, length = f"other {number}", rng.randint(1, NUM_TOKENS)
        await asyncio.sleep(rng.random() * 0.1)
        running = asyncio.create_task(engine.generate(name, OTHERS[number], sampling(length), number))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.02)
            await engine.abort(name)
        await running

    tasks = [*(own(number) for number in range(len(OWN))), *(other(number) for number in range(len(OTHERS)))]
    rng.shuffle(tasks)
    await asyncio.gather(*tasks)
    return [found[number] for number in range(len(OWN))]


@pytest.mark.slow
async def test_a_response_does_not_depend_on_the_batch(model_dir: Path) -> None:
    async with transformers_engine(model_dir, slots=24, deterministic=True) as engine:
        expected = [await alone(engine, number) for number in range(len(OWN))]
        for seed in range(3):
            assert await beside_others(engine, seed) == expected
        # one that goes on from the tokens that it had repeats what is done at a logical load
        halves = [await engine.generate(f"half {n}", OWN[n], sampling(30), n) for n in range(len(OWN))]
        first = [await alone(engine, number, so_far=half) for number, half in enumerate(halves)]
        again = [alone(engine, number, so_far=half) for number, half in enumerate(halves)]
        assert await asyncio.gather(*again) == first


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (31, 128), (32, 384), (70, 576)])
def test_fixed_linear_is_the_layer(rows: int, width: int) -> None:
    layer, x = torch.nn.Linear(width, 48), torch.randn(2, rows, width)
    assert torch.allclose(batched_model.fixed_linear(layer, x), layer(x), atol=1e-5)


async def test_a_cache_that_is_too_small_is_refused(model_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(batched_model, "CACHE_SHARE_OF_MEMORY", 1e-9)
    engine = TransformersEngine(*made_for(model_dir, slots=8, max_response_tokens=64, deterministic=True))
    with pytest.raises(PreflightError, match=r"a cache for all slots"):
        await engine.start()
    await engine.close()
