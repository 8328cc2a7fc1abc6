"""A load in vLLM's words: pause, three steps of an update, resume."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from asyncrl_cli.loop.ports import Interrupt
from asyncrl_cli.rollout.vllm_processes import answer

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


@asynccontextmanager
async def paused(llm: AsyncLLM, interrupt: Interrupt) -> AsyncIterator[None]:
    """No forward pass runs inside; without `keep-kv` all caches are empty at the end. A dead engine is not resumed."""
    try:
        mode = "wait" if interrupt == "drain" else "keep"
        await answer(llm, llm.pause_generation(mode=mode, clear_cache=interrupt != "keep-kv"))
        yield
    finally:
        if not llm.errored:
            await answer(llm, llm.resume_generation())


async def update(llm: AsyncLLM, announced: dict[str, Any], version: int) -> None:
    """`announced`: `SharedWeights.describe`. If it raises, layers may be of either version."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await answer(llm, llm.start_weight_update())
    await answer(llm, llm.update_weights(WeightTransferUpdateRequest(update_info=announced)))
    await answer(llm, llm.finish_weight_update(weight_version=str(version)))
