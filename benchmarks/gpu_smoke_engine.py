"""gpu_smoke.py's checks of vLLM's engine: weights in flight, and sleep."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import torch
from engine_kit import MB, PROMPT_TOKENS, RandomModel, pack, prompts_of
from gpu_smoke_kit import DEVICE, GPU_SHARE, RESPONSE_TOKENS, Wrong
from gpu_smoke_trainer import trained

from asyncrl_cli.engines.port import Sampling
from asyncrl_cli.profile.schema import ModelSection, Place, Profile, RolloutSection, WeightsSection
from asyncrl_cli.weights.buckets import Bucket
from asyncrl_cli.weights.versions import Manifest, mean_abs_diff

if TYPE_CHECKING:
    from asyncrl_cli.engines.vllm.engine import VllmEngine

SLOTS = 32
LARGEST_DIFFERENCE = 0.05
"""Of mean logprobs: trainer and engine both round to bfloat16, in different kernels."""
LOAD_BUCKET_BYTES = 128 * MB
TIMEOUT_S = 60.0


@asynccontextmanager
async def engine_on_gpu(model: RandomModel, transport: str = "object-store", **engine_args: Any) -> AsyncIterator[VllmEngine]:
    from asyncrl_cli.engines.vllm.engine import VllmEngine

    lengths = {"max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": RESPONSE_TOKENS}
    profile = Profile(
        model=ModelSection(dtype="bfloat16"),
        rollout=RolloutSection(slots=SLOTS, gpu_memory_utilization=GPU_SHARE, engine_args=engine_args, **lengths),
        weights=WeightsSection(transport=transport, timeout_s=TIMEOUT_S),
    )
    engine = VllmEngine(profile, Place(model_dir=str(model.directory), device=DEVICE.partition(":")[0]))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def difference_of(engine: VllmEngine, manifest: Manifest) -> float:
    scores = await engine.score([list(tokens) for tokens in manifest.probe_tokens], manifest.temperature)
    return mean_abs_diff(scores.logprobs, manifest.probe_logprobs)


def check_buckets(model: RandomModel, _: argparse.Namespace) -> str:
    with trained(model) as (manifest, buckets, _detail):
        return asyncio.run(_load_buckets(model, manifest, buckets))


async def _load_buckets(model: RandomModel, manifest: Manifest, buckets: list[Bucket]) -> str:
    async with engine_on_gpu(model) as engine:
        return await load_in_flight(engine, model, manifest, lambda: engine.receive(buckets))


async def load_in_flight(
    engine: VllmEngine, model: RandomModel, manifest: Manifest, receive: Callable[[], Mapping[str, torch.Tensor]]
) -> str:
    """The version is loaded while all slots generate; then the engine's logprobs of the probes must be the trainer's."""
    before = await difference_of(engine, manifest)
    sampling = Sampling(temperature=1.0, max_response_tokens=RESPONSE_TOKENS)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(engine.generate(f"running-{row}", prompt, sampling, row))
            for row, prompt in enumerate(prompts_of(model, SLOTS))
        ]
        while engine.sampled_tokens == 0:  # noqa: ASYNC110  (it is counted where the tokens come in)
            await asyncio.sleep(0.001)
        weights = await asyncio.to_thread(receive)
        report = await engine.load(weights, manifest.version, "recompute-kv")
    versions = {version for task in running for version in task.result().versions}
    after = await difference_of(engine, manifest)
    if not (after <= LARGEST_DIFFERENCE and before >= 2 * after):
        raise Wrong(f"logprobs differ from the trainer's by {after:.4f} after the load, by {before:.4f} before")
    pause = f"pause {1e3 * report.pause_s:.0f} ms, load {1e3 * report.load_s:.0f} ms"
    return f"{pause}, |logprob| off by {after:.4f} (before {before:.4f}), versions sampled {sorted(versions)}"


def check_sleep_1(model: RandomModel, _: argparse.Namespace) -> str:
    return asyncio.run(_sleep_and_wake(model, 1))


def check_sleep_2(model: RandomModel, _: argparse.Namespace) -> str:
    return asyncio.run(_sleep_and_wake(model, 2))


async def _sleep_and_wake(model: RandomModel, level: int) -> str:
    """Level 1 keeps the weights in host memory; after level 2 they come again by a load, while the cache is still asleep."""
    from safetensors.torch import load_file

    greedy = Sampling(temperature=0.0, max_response_tokens=RESPONSE_TOKENS)
    prompt = prompts_of(model, 1)[0]
    async with engine_on_gpu(model, enable_sleep_mode=True) as engine:
        llm = engine._running_llm()
        expected = await engine.generate("before", prompt, greedy, 0)
        used = used_bytes()
        began_s = time.perf_counter()
        await llm.sleep(level, mode="wait")
        asleep_s, asleep = time.perf_counter() - began_s, used_bytes()
        began_s = time.perf_counter()
        if level == 1:
            await llm.wake_up()
        else:
            await llm.wake_up(tags=["weights"])
            weights = {name: tensor.bfloat16() for name, tensor in load_file(model.directory / "model.safetensors").items()}
            await engine.load(engine.receive(pack(weights, 2**28)), 1, "keep-kv")
            await llm.wake_up(tags=["kv_cache"])
        awake_s = time.perf_counter() - began_s
        if await llm.is_sleeping():
            raise Wrong("the engine still sleeps after wake_up")
        found = await engine.generate("after", prompt, greedy, 0)
        if found.tokens != expected.tokens:
            raise Wrong("the greedy response after waking up is another one")
        if asleep > used - 100 * MB:
            raise Wrong(f"{used / MB:,.0f} MiB of the GPU were in use, {asleep / MB:,.0f} MiB still are asleep")
        memory = f"{used / MB:,.0f} -> {asleep / MB:,.0f} -> {used_bytes() / MB:,.0f} MiB in use"
        return f"{memory}, asleep in {1e3 * asleep_s:.0f} ms, awake in {1e3 * awake_s:.0f} ms"


def used_bytes() -> int:
    """Of the whole GPU, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free
