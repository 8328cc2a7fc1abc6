"""Loads by vLLM's own weight transfer engines, `nccl` and `ipc`: rank 0 is asked for the bytes while the engine is paused.

    nccl   join: both ends meet.   turn: rank 0 is free.   load: rank 0 broadcasts, while vLLM's processes receive and load
    ipc    join: vLLM is told what comes.   load: rank 0 fills its buffer -> vLLM loads it -> the next part ...

If a transfer fails or is late, rank 0 is told, and ends its side. vLLM's processes that wait for bytes hear nothing else, so
the engine (vllm_engine.py) fails with the transfer's error and ends them: nobody waits for them any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl_cli.engines.vllm.processes import answer, told
from asyncrl_cli.errors import AsyncrlError, ExecutorFailed
from asyncrl_cli.weights.buckets import Spec
from asyncrl_cli.weights.direct import AnnouncedWeights, Meeting, RankZero, loaded_as
from asyncrl_cli.weights.limits import KEY, WORKER_MARGIN_S

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


class Way(Protocol):
    """One of the two transports, for one engine."""

    async def join(self, llm: AsyncLLM) -> None:
        """Once for each start of the engine, before the first `bring`."""

    async def turn(self) -> None:
        """Before vLLM is paused: returns when rank 0 is free for this worker. ExecutorFailed if that takes too long."""

    async def bring(self, llm: AsyncLLM, version: int, chosen: list[tuple[str, Spec]]) -> None:
        """These tensors into vLLM's model, between the start and the end of an update."""

    async def done(self) -> None:
        """The update has ended well."""


def way_of(backend: str, rank_zero: RankZero, *, wire_bytes: int, timeout_s: float) -> Way:
    return NcclWay(rank_zero, wire_bytes, timeout_s) if backend == "nccl" else IpcWay(rank_zero, timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A version that rank 0 will send when it is asked."""

    way: Way
    chosen: list[tuple[str, Spec]]

    @classmethod
    def of(cls, weights: AnnouncedWeights, required: Collection[str], way: Way) -> Incoming:
        return cls(way=way, chosen=loaded_as(weights.specs, required))

    async def update(self, llm: AsyncLLM, version: int) -> None:
        """See `vllm_weights.update`."""
        await answer(llm, llm.start_weight_update())
        await self.way.bring(llm, version, self.chosen)
        await answer(llm, llm.finish_weight_update(weight_version=str(version)))
        await self.way.done()


class NcclWay:
    """`wire_bytes`: of each of the two buffers at both ends, but for a last tensor that may exceed it."""

    def __init__(self, rank_zero: RankZero, wire_bytes: int, timeout_s: float) -> None:
        self._rank_zero = rank_zero
        self._wire_bytes = wire_bytes
        self._timeout_s = timeout_s

    async def join(self, llm: AsyncLLM) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        host, port = await self._rank_zero.meeting_point()
        world_size = 1 + llm.vllm_config.parallel_config.world_size
        meeting = Meeting(host=host, port=port, world_size=world_size, wire_bytes=self._wire_bytes)
        request = WeightTransferInitRequest(init_info=nccl_init_info(meeting))
        what = f"the meeting by NCCL at {host}:{port}"
        await self._both(llm, self._rank_zero.join(meeting), llm.init_weight_transfer_engine(request), what)

    async def turn(self) -> None:
        try:
            await self._rank_zero.turn()
        except AsyncrlError as error:
            raise _failure("the wait until rank 0 sends to this worker", error, [], self._timeout_s) from error

    async def bring(self, llm: AsyncLLM, version: int, chosen: list[tuple[str, Spec]]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        names = {spec.name: name for name, spec in chosen}
        request = WeightTransferUpdateRequest(update_info=nccl_update_info(chosen))
        what = f"the transfer of version {version} by NCCL"
        await self._both(llm, self._rank_zero.broadcast(version, names), llm.update_weights(request), what)

    async def done(self) -> None:
        """The group stays for the next version."""

    async def _both(self, llm: AsyncLLM, sends: Coroutine[Any, Any, None], receives: Coroutine[Any, Any, None], what: str) -> None:
        """Neither end can be interrupted from outside: where one fails or is late, both are ended.

        Rank 0, which bounds its end by `timeout_s` itself, says so if vLLM's processes do not come: it has the margin to be heard.
        """
        ends = {"rank 0": asyncio.ensure_future(sends), "vLLM's processes": asyncio.ensure_future(answer(llm, receives))}
        late, outcomes = list(ends), []
        try:
            await asyncio.wait(ends.values(), timeout=self._timeout_s + WORKER_MARGIN_S, return_when=asyncio.FIRST_EXCEPTION)
            late = [name for name, task in ends.items() if not task.done()]
        finally:
            for task in ends.values():
                task.cancel()
            outcomes = await asyncio.gather(*ends.values(), return_exceptions=True)
            failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            if late or failed:
                await leave(self._rank_zero)
        if late or failed:
            raise _failure(what, failed[0] if failed else None, late, self._timeout_s)


class IpcWay:
    def __init__(self, rank_zero: RankZero, timeout_s: float) -> None:
        self._rank_zero = rank_zero
        self._timeout_s = timeout_s
        self._waits_for = ""

    async def join(self, llm: AsyncLLM) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await answer(llm, llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"packed": True})))

    async def turn(self) -> None:
        """There is one worker."""

    async def bring(self, llm: AsyncLLM, version: int, chosen: list[tuple[str, Spec]]) -> None:
        what = f"the transfer of version {version} by CUDA IPC"
        error: Exception | None = None
        whole = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._parts(llm, version, {spec.name: name for name, spec in chosen})
            whole = True
        except Exception as failure:
            error = failure
        finally:
            if not whole:
                await leave(self._rank_zero)
        if not whole:
            late = [self._waits_for] if isinstance(error, TimeoutError) else []
            raise _failure(what, None if late else error, late, self._timeout_s)

    async def done(self) -> None:
        """vLLM has closed the buffer: rank 0's GPU gets it back."""
        await leave(self._rank_zero)

    async def _parts(self, llm: AsyncLLM, version: int, names: dict[str, str]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        part, self._waits_for = 0, "rank 0"
        while (update_info := await self._rank_zero.export(version, names, part)) is not None:
            self._waits_for = "vLLM's processes"
            await answer(llm, llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))
            part, self._waits_for = part + 1, "rank 0"


def nccl_init_info(meeting: Meeting) -> dict[str, Any]:
    """vLLM's NCCLWeightTransferInitInfo: its processes come behind rank 0."""
    return {
        "master_address": meeting.host,
        "master_port": meeting.port,
        "rank_offset": 1,
        "world_size": meeting.world_size,
        "packed": True,
        "packed_buffer_size_bytes": meeting.wire_bytes,
        "packed_num_buffers": meeting.num_wires,
    }


def nccl_update_info(chosen: list[tuple[str, Spec]]) -> dict[str, Any]:
    """vLLM's NCCLWeightTransferUpdateInfo: what comes, in this order."""
    return {
        "names": [name for name, _ in chosen],
        "dtype_names": [spec.dtype for _, spec in chosen],
        "shapes": [list(spec.shape) for _, spec in chosen],
    }


async def leave(rank_zero: RankZero) -> None:
    """Ends rank 0's side of a transfer. That it cannot be told is no second failure: it bounds its waits itself."""
    try:
        await rank_zero.leave()
    except AsyncrlError as error:
        logger.warning("rank 0 was not told that this worker takes no more weights: %s", error.message)


def _failure(what: str, error: BaseException | None, late: list[str], timeout_s: float) -> ExecutorFailed:
    """`late`: who has not answered. Where both ends have not, it is rank 0, the first: it tells when it waits for the other."""
    if error is None:
        return ExecutorFailed(f"{what} took longer than {KEY} = {timeout_s:g} s: still waiting for {late[0]}")
    failure = ExecutorFailed(f"{what} failed: {error.message if isinstance(error, AsyncrlError) else told(error)}")
    failure.__cause__ = error
    return failure
