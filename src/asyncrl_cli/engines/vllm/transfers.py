"""Brings a version's weights into vLLM's processes while they are paused: one class for each kind of
transport.

    object-store, disk  SharedMemory: the worker has received the version, and vLLM's processes map its memory
    nccl                Nccl    join: both ends meet.  turn: rank 0 is free.  _bring: rank 0 broadcasts, vLLM receives and loads
    ipc                 Ipc     join: vLLM is set up.  _bring: rank 0 fills its buffer -> vLLM loads it -> the next part ...

If a transfer fails or is late, this worker tells rank 0 to end its side. While vLLM's processes wait for
bytes they react to nothing else, so the engine fails with the transfer's error and kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed
from asyncrl_cli.base.timeouts import timeout
from asyncrl_cli.engines.vllm.processes import answer, told
from asyncrl_cli.profile.rollout_sections import WeightsSection
from asyncrl_cli.profile.schema import Interrupt
from asyncrl_cli.weights.buckets import BYTES_PER_MB
from asyncrl_cli.weights.versions import TIMEOUT_KEY, WORKER_MARGIN_S, Meeting, RankZero

if TYPE_CHECKING:
    import torch
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def paused(llm: AsyncLLM, interrupt: Interrupt) -> AsyncIterator[None]:
    """Pause generation for the block; unless `interrupt` is `keep-kv`, all caches are cleared.

    If the pause fails or is cancelled, generation continues. If the block raises, the engine has failed and
    is not resumed.
    """
    try:
        mode = "wait" if interrupt == "drain" else "keep"
        await answer(llm, llm.pause_generation(mode=mode, clear_cache=interrupt != "keep-kv"))
    except BaseException:
        if not llm.errored:
            await answer(llm, llm.resume_generation())
        raise
    yield
    await answer(llm, llm.resume_generation())


class SharedMemory:
    """vLLM's processes map the buffer that the worker has received, and BucketEngine loads it. Base class of
    the other kinds."""

    async def join(self, llm: AsyncLLM) -> None:
        """Set up the transport. Called once for each start of the engine, before the first update."""

    async def turn(self) -> None:
        """Wait, before vLLM is paused, until rank 0 is free for this worker. ExecutorFailed if that takes too
        long."""

    async def update(
        self, llm: AsyncLLM, weights: Mapping[str, torch.Tensor], version: int, required: Collection[str]
    ) -> None:
        """Load the `required` tensors of `weights`. Call it within `paused`. If it raises, layers may be of
        either version."""
        await answer(llm, llm.start_weight_update())
        await self._bring(llm, weights, version, required)
        await answer(llm, llm.finish_weight_update(weight_version=str(version)))

    async def _bring(self, llm: AsyncLLM, weights: Any, version: int, required: Collection[str]) -> None:
        await _updated(llm, weights.describe(required))


class Nccl(SharedMemory):
    """Each end has two wire buffers of the size of a load bucket, which the last tensor in a buffer may
    exceed."""

    def __init__(self, rank_zero: RankZero, weights: WeightsSection) -> None:
        self._rank_zero = rank_zero
        self._timeout_s = weights.timeout_s
        self._wire_bytes = weights.load_bucket_size_mb * BYTES_PER_MB

    async def join(self, llm: AsyncLLM) -> None:
        host, port = await self._rank_zero.meeting_point()
        world_size = 1 + llm.vllm_config.parallel_config.world_size
        meeting = Meeting(host=host, port=port, world_size=world_size, wire_bytes=self._wire_bytes)
        what = f"the meeting by NCCL at {host}:{port}"
        await self._both(self._rank_zero.join(meeting), _joined(llm, nccl_init_info(meeting)), what)

    async def turn(self) -> None:
        try:
            await self._rank_zero.turn()
        except AsyncrlError as error:
            raise _failure("the wait until rank 0 sends to this worker", error) from error

    async def _bring(self, llm: AsyncLLM, weights: Any, version: int, required: Collection[str]) -> None:
        chosen = weights.chosen(required)
        sends = self._rank_zero.broadcast(version, {spec.name: name for name, spec in chosen})
        await self._both(
            sends, _updated(llm, nccl_update_info(chosen)), f"the transfer of version {version} by NCCL"
        )

    async def _both(
        self, sends: Coroutine[Any, Any, None], receives: Coroutine[Any, Any, None], what: str
    ) -> None:
        """Run both ends. Neither can be interrupted from outside, so if one fails or is late, both are ended.

        Rank 0 bounds its end by `timeout_s` and reports if vLLM's processes do not join. The margin lets that
        report arrive first.
        """
        ends: dict[str, asyncio.Task[None]] = {}
        try:
            async with timeout(self._timeout_s + WORKER_MARGIN_S), asyncio.TaskGroup() as both:
                ends = {"rank 0": both.create_task(sends), "vLLM's processes": both.create_task(receives)}
        except BaseException as error:
            await _leave(self._rank_zero)
            if isinstance(error, TimeoutError):
                late = next(name for name, task in ends.items() if task.cancelled())
                raise _too_late(what, self._timeout_s, late) from None
            if isinstance(error, ExceptionGroup):
                raise _failure(what, error.exceptions[0]) from error.exceptions[0]
            raise


class Ipc(SharedMemory):
    """Parts pass through one buffer on the GPU that rank 0 and vLLM share. There is only one worker, so no
    turns."""

    def __init__(self, rank_zero: RankZero, weights: WeightsSection) -> None:
        self._rank_zero = rank_zero
        self._timeout_s = weights.timeout_s
        self._waits_for = ""

    async def join(self, llm: AsyncLLM) -> None:
        await _joined(llm, {"packed": True})

    async def update(
        self, llm: AsyncLLM, weights: Mapping[str, torch.Tensor], version: int, required: Collection[str]
    ) -> None:
        try:
            await super().update(llm, weights, version, required)
        finally:
            await _leave(self._rank_zero)  # vLLM has closed the buffer or never will: rank 0 frees it

    async def _bring(self, llm: AsyncLLM, weights: Any, version: int, required: Collection[str]) -> None:
        what, names = (
            (f"the transfer of version {version} by CUDA IPC"),
            {spec.name: name for name, spec in weights.chosen(required)},
        )
        try:
            async with timeout(self._timeout_s):
                await self._parts(llm, version, names)
        except TimeoutError:
            raise _too_late(what, self._timeout_s, self._waits_for) from None
        except Exception as error:
            raise _failure(what, error) from error

    async def _parts(self, llm: AsyncLLM, version: int, names: dict[str, str]) -> None:
        part, self._waits_for = 0, "rank 0"
        while (update_info := await self._rank_zero.export(version, names, part)) is not None:
            self._waits_for = "vLLM's processes"
            await _updated(llm, update_info)
            part, self._waits_for = part + 1, "rank 0"


DIRECT = {"nccl": Nccl, "ipc": Ipc}
"""Class of each direct transport, by `weights.transport`."""


def nccl_init_info(meeting: Meeting) -> dict[str, Any]:
    """vLLM's NCCLWeightTransferInitInfo: vLLM's processes have ranks 1, 2, ... in the group."""
    return {
        "master_address": meeting.host,
        "master_port": meeting.port,
        "rank_offset": 1,
        "world_size": meeting.world_size,
        "packed": True,
        "packed_buffer_size_bytes": meeting.wire_bytes,
        "packed_num_buffers": meeting.num_wires,
    }


def nccl_update_info(chosen: list[tuple[str, Any]]) -> dict[str, Any]:
    """vLLM's NCCLWeightTransferUpdateInfo: the tensors that will be sent, in order."""
    return {
        "names": [name for name, _ in chosen],
        "dtype_names": [spec.dtype for _, spec in chosen],
        "shapes": [list(spec.shape) for _, spec in chosen],
    }


async def _joined(llm: AsyncLLM, init_info: dict[str, Any]) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    await answer(llm, llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))


async def _updated(llm: AsyncLLM, update_info: dict[str, Any]) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await answer(llm, llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))


async def _leave(rank_zero: RankZero) -> None:
    """End rank 0's side of a transfer. If rank 0 does not answer, only log a warning, because rank 0 bounds
    its own waits."""
    try:
        await rank_zero.leave()
    except AsyncrlError as error:
        logger.warning("rank 0 could not be told to end this worker's transfer: %s", error.message)


def _too_late(what: str, timeout_s: float, waits_for: str) -> ExecutorFailed:
    """`waits_for` is rank 0 if neither end has answered: rank 0 would have reported that it waits for vLLM's
    processes."""
    return ExecutorFailed(
        f"{what} took longer than {TIMEOUT_KEY} = {timeout_s:g} s: still waiting for {waits_for}"
    )


def _failure(what: str, error: BaseException) -> ExecutorFailed:
    return ExecutorFailed(f"{what} failed: {told(error)}")
