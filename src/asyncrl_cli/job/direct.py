"""Rank 0 as a rollout worker asks it for weights (`nccl`, `ipc`): calls from actor to actor, past the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asyncrl_cli.job.calls import Limit, answer
from asyncrl_cli.weights.transports import AT_ONCE_S, CALL_MARGIN_S, TIMEOUT_KEY, turn_s

if TYPE_CHECKING:
    from asyncrl_cli.weights.direct import Meeting


class RayRankZero:
    """`weights.direct.RankZero` on the trainer's first actor, for one worker.

    Rank 0 bounds its own work by `timeout_s`, and a turn by that for each of `workers`; the wait for it is longer, so that
    its words come first.
    """

    def __init__(self, actor: Any, worker: str, timeout_s: float, workers: int) -> None:
        self._actor = actor
        self._worker = worker
        self._timeout_s = timeout_s
        self._workers = workers

    async def meeting_point(self) -> tuple[str, int]:
        ref = self._actor.meeting_point.remote()
        address = await answer(ref, executor="trainer-0", call="an address", limit=Limit(AT_ONCE_S))
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return host, int(port)

    async def join(self, meeting: Meeting) -> None:
        await self._direct("join", self._timeout_s, meeting)

    async def turn(self) -> None:
        await self._direct("turn", turn_s(self._timeout_s, self._workers))

    async def broadcast(self, version: int, names: Mapping[str, str]) -> None:
        await self._direct("broadcast", self._timeout_s, version, names)

    async def export(self, version: int, names: Mapping[str, str], part: int) -> dict[str, Any] | None:
        return await self._direct("export", self._timeout_s, version, names, part)

    async def leave(self) -> None:
        await leave(self._actor, self._worker)

    async def _direct(self, call: str, limit_s: float, *args: Any) -> Any:
        """`limit_s`: rank 0's own."""
        ref = self._actor.direct.remote(call, self._worker, *args)
        limit = Limit(limit_s + CALL_MARGIN_S, TIMEOUT_KEY, self._timeout_s)
        return await answer(ref, executor="trainer-0", call=f"{call} for {self._worker}", limit=limit)


async def leave(rank_zero_actor: Any, worker: str) -> None:
    """Rank 0 ends what it does for this worker."""
    ref = rank_zero_actor.leave.remote(worker)
    await answer(ref, executor="trainer-0", call=f"the leave of {worker}", limit=Limit(AT_ONCE_S))
