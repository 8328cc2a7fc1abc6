"""In the rollout worker's process: brings a version's weights into vLLM's processes while they are paused.
One class for each kind of `weights.transport`; rank 0's end is rank_zero.py.

    object-store, disk  SharedMemory: the worker has received the version; vLLM's processes map its memory
    nccl                Nccl    join: both ends meet.  turn: rank 0 is free.  bring: it broadcasts, vLLM loads
    ipc                 Ipc     join: vLLM is set up.  bring: rank 0 fills its buffer -> vLLM loads it -> ...

If a transfer fails or is late, this worker tells rank 0 to end its side. While vLLM's processes wait for
bytes they react to nothing else, so the engine fails with the transfer's error and kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Literal

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, timeout
from asyncrl_cli.engines.vllm.engine_processes import answer, message_of
from asyncrl_cli.profile.rollout_sections import WeightsSection
from asyncrl_cli.profile.schema import Interrupt
from asyncrl_cli.weights.buckets import BYTES_PER_MB, Spec
from asyncrl_cli.weights.receivers import AnnouncedWeights, SharedWeights
from asyncrl_cli.weights.versions import TIMEOUT_KEY, WORKER_MARGIN_S, Meeting, RankZero, UpdateInfo

if TYPE_CHECKING:
    import torch
    from vllm.v1.engine.async_llm import AsyncLLM

Weights = Mapping[str, "torch.Tensor"]
logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def paused(llm: AsyncLLM, interrupt: Interrupt) -> AsyncIterator[None]:
    """Pause generation for the block; unless `interrupt` is `keep-kv`, all caches are cleared.

    If the pause fails or is cancelled, generation continues. If the block raises, the engine has failed and
    is not resumed.
    """
    mode: Literal["wait", "keep"] = "wait" if interrupt == "drain" else "keep"
    try:
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
        """Set up the transport. Called once for each start of the engine, before the first load."""

    async def turn(self) -> None:
        """Wait, before vLLM is paused, until rank 0 is free for this worker. ExecutorFailed if that takes too
        long."""

    async def bring(self, llm: AsyncLLM, weights: Weights, version: int, required: Collection[str]) -> None:
        """Load the `required` tensors of `weights` into vLLM, which is paused."""
        assert isinstance(weights, SharedWeights)
        await _load(llm, weights.describe(required))

    async def leave(self) -> None:
        """Called after each load, also a failed one: what rank 0 holds for it may go."""


class Direct(SharedMemory):
    """Base class of the transports whose bytes come from rank 0's GPU."""

    def __init__(self, rank_zero: RankZero, weights: WeightsSection) -> None:
        self._rank_zero = rank_zero
        self._timeout_s = weights.timeout_s
        self._wire_bytes = weights.load_bucket_size_mb * BYTES_PER_MB


class Nccl(Direct):
    """Each end has two wire buffers of the size of a load bucket, which the last tensor in a buffer may
    exceed."""

    async def join(self, llm: AsyncLLM) -> None:
        host, port = await self._rank_zero.meeting_point()
        world_size = 1 + llm.vllm_config.parallel_config.world_size
        meeting = Meeting(host=host, port=port, world_size=world_size, wire_bytes=self._wire_bytes)
        what = f"the meeting by NCCL at {host}:{port}"
        await self._both(self._rank_zero.join(meeting), _set_up(llm, nccl_init_info(meeting)), what)

    async def turn(self) -> None:
        try:
            await self._rank_zero.turn()
        except AsyncrlError as error:
            raise _failure("the wait until rank 0 sends to this worker", error) from error

    async def bring(self, llm: AsyncLLM, weights: Weights, version: int, required: Collection[str]) -> None:
        assert isinstance(weights, AnnouncedWeights)
        chosen = weights.chosen(required)
        sends = self._rank_zero.broadcast(version, {spec.name: name for name, spec in chosen})
        receives = _load(llm, nccl_update_info(chosen))
        await self._both(sends, receives, f"the transfer of version {version} by NCCL")

    async def _both(
        self, sends: Coroutine[None, None, None], receives: Coroutine[None, None, None], what: str
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
            await _end_rank_zeros_side(self._rank_zero)
            if isinstance(error, TimeoutError):
                late = next(name for name, task in ends.items() if task.cancelled())
                raise _too_late(what, self._timeout_s, late) from None
            if isinstance(error, ExceptionGroup):
                raise _failure(what, error.exceptions[0]) from error.exceptions[0]
            raise


class Ipc(Direct):
    """Parts pass through one buffer on the GPU that rank 0 and vLLM share. There is only one worker, so no
    turns."""

    async def join(self, llm: AsyncLLM) -> None:
        await _set_up(llm, {"packed": True})

    async def bring(self, llm: AsyncLLM, weights: Weights, version: int, required: Collection[str]) -> None:
        assert isinstance(weights, AnnouncedWeights)
        what = f"the transfer of version {version} by CUDA IPC"
        names = {spec.name: name for name, spec in weights.chosen(required)}
        part, waits_for = 0, "rank 0"
        try:
            async with timeout(self._timeout_s):
                while (update_info := await self._rank_zero.export(version, names, part)) is not None:
                    waits_for = "vLLM's processes"
                    await _load(llm, update_info)
                    part, waits_for = part + 1, "rank 0"
        except TimeoutError:
            raise _too_late(what, self._timeout_s, waits_for) from None
        except Exception as error:  # of rank 0, of vLLM or of its processes
            raise _failure(what, error) from error

    async def leave(self) -> None:
        # vLLM has closed the buffer or never will: rank 0 frees it
        await _end_rank_zeros_side(self._rank_zero)


DIRECT: dict[str, type[Direct]] = {"nccl": Nccl, "ipc": Ipc}
"""Class of each direct transport, by `weights.transport`."""


def nccl_init_info(meeting: Meeting) -> UpdateInfo:
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


def nccl_update_info(chosen: list[tuple[str, Spec]]) -> UpdateInfo:
    """vLLM's NCCLWeightTransferUpdateInfo: the tensors that will be sent, in order."""
    return {
        "names": [name for name, _ in chosen],
        "dtype_names": [spec.dtype for _, spec in chosen],
        "shapes": [list(spec.shape) for _, spec in chosen],
    }


async def _set_up(llm: AsyncLLM, init_info: UpdateInfo) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    await answer(llm, llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))


async def _load(llm: AsyncLLM, update_info: UpdateInfo) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await answer(llm, llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))


async def _end_rank_zeros_side(rank_zero: RankZero) -> None:
    """If rank 0 does not answer, only log a warning, because rank 0 bounds its own waits."""
    try:
        await rank_zero.leave()
    except AsyncrlError as error:
        logger.warning("rank 0 could not be told to end this worker's transfer: %s", error.message)


def _too_late(what: str, timeout_s: float, waits_for: str) -> ExecutorFailed:
    """`waits_for` is rank 0 if neither end has answered: rank 0 would have reported that it waits for vLLM's
    processes."""
    late = f"longer than {TIMEOUT_KEY} = {timeout_s:g} s"
    return ExecutorFailed(f"{what} took {late}: still waiting for {waits_for}")


def _failure(what: str, error: BaseException) -> ExecutorFailed:
    return ExecutorFailed(f"{what} failed: {message_of(error)}")
