"""gpu_smoke.py's checks of weights sent from GPU memory to GPU memory: `ipc` on one GPU, `nccl` from the first to the second."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from engine_kit import RandomModel
from gpu_smoke_engine import LOAD_BUCKET_BYTES, TIMEOUT_S, engine_on_gpu, load_in_flight
from gpu_smoke_kit import DEVICE, Skipped
from gpu_smoke_trainer import trained

from asyncrl_cli.engines.vllm.ipc import IpcExports, produce_on
from asyncrl_cli.engines.vllm.nccl import NcclGroup, NcclLinks
from asyncrl_cli.weights.buckets import Bucket
from asyncrl_cli.weights.held import AnnouncedWeights, HeldVersions
from asyncrl_cli.weights.sending import send
from asyncrl_cli.weights.versions import Manifest, RankZero

WORKER = "smoke"
NCCL_PORT = 29_561


class ThisProcess(RankZero):
    """Rank 0 in this process, as an engine asks it; vLLM's processes are others."""

    def __init__(self, end: Any) -> None:
        self._end = end

    async def meeting_point(self) -> tuple[str, int]:
        return "127.0.0.1", NCCL_PORT

    async def leave(self) -> None:
        self._end.leave(WORKER)

    async def ask(self, call: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self._end, call), WORKER, *args)


def check_ipc(model: RandomModel, _: argparse.Namespace) -> str:
    with trained(model) as (manifest, buckets, _detail):
        return asyncio.run(_load(model, manifest, buckets, "ipc"))


def check_nccl(model: RandomModel, _: argparse.Namespace) -> str:
    if torch.cuda.device_count() < 2:
        raise Skipped(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    with trained(model) as (manifest, buckets, _detail), _second_gpu_only():
        return asyncio.run(_load(model, manifest, buckets, "nccl"))


async def _load(model: RandomModel, manifest: Manifest, buckets: list[Bucket], transport: str) -> str:
    held, device = HeldVersions(), torch.device(DEVICE)
    layouts = send(held, manifest, buckets)
    end: Any = IpcExports(held, partial(produce_on, device), buffer_bytes=LOAD_BUCKET_BYTES)
    if transport == "nccl":
        end = NcclLinks(held, lambda meeting: NcclGroup(meeting, device), timeout_s=TIMEOUT_S)
    async with engine_on_gpu(model, transport) as engine:
        await engine.connect(ThisProcess(end))
        return await load_in_flight(engine, model, manifest, lambda: AnnouncedWeights(layouts))


@contextmanager
def _second_gpu_only() -> Iterator[None]:
    """For the processes that are started meanwhile; this one has its GPUs already."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = before.split(",") if before else [str(index) for index in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[1]
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
