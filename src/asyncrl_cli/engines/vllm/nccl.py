"""Rank 0's end of `weights.transport = "nccl"`: one NCCL group with each rollout worker's vLLM processes.

    group of a worker    rank 0: this process;  1, 2, ...: the worker's tensor-parallel ranks
    join                 rank 0 and vLLM's processes meet at an address, at the start and after each restart of the worker
    turn                 reserve rank 0 for one worker; the turn is lost if no broadcast begins within `weights.timeout_s`
    broadcast            a version's tensors, packed by vLLM's own producer into wire buffers of a fixed size

With one group per worker, each worker swaps weights independently. Rank 0 broadcasts to one worker at a time,
because broadcasts share its GPU's memory and bus anyway. A worker waits for its `turn` before it pauses its
vLLM, for up to `weights.timeout_s` per worker of the job. So a transfer that hangs fails only its own worker,
and the next in line gets its turn.

A call into NCCL cannot be interrupted and waits for its peers forever, so each call gets its own thread. If
the worker leaves or time runs out, the group is destroyed, which ends the call.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed
from asyncrl_cli.weights.senders import HeldVersions
from asyncrl_cli.weights.versions import TIMEOUT_KEY, Meeting, turn_s

T = TypeVar("T")
LOOK_S = 0.2
"""How often a waiting call checks whether its worker has left."""


class NcclGroup:
    """Rank 0's end of one worker's group, with vLLM's own communicator and packing. The constructor waits
    until all have joined."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        torch.cuda.set_device(device)  # per thread; vLLM uses the current device
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._meeting = meeting
        where = {
            "master_address": meeting.host,
            "master_port": meeting.port,
            "world_size": meeting.world_size,
        }
        self._communicator = trainer_init(where)
        if not self._communicator.available:
            raise AsyncrlError(
                "vLLM found no NCCL library beside this torch", hint="--set weights.transport=object-store"
            )

    def broadcast(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send all tensors in this order; returns when they are sent. Returns or raises soon after
        `destroy`."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(self._device)
        packed_nccl_broadcast_producer(
            iterator=tensors,
            group=self._communicator,
            src=0,
            # in the stream that packs and broadcasts the tensor
            post_iter_func=lambda item: item[1].to(self._device),
            buffer_size_bytes=self._meeting.wire_bytes,
            num_buffers=self._meeting.num_wires,
        )

    def destroy(self) -> None:
        """End the group. May be called in any thread, also while `broadcast` waits. Returns within
        seconds."""
        self._communicator.destroy()


class _Link:
    """A worker's group. Exists from the request on, before the group does. `ended`: the group must no longer
    be used."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.group: Future[NcclGroup] = Future()
        self.ended = threading.Event()
        self._ends_once = threading.Lock()

    def end(self) -> None:
        """Destroy the group now, or as soon as it is made."""
        self.ended.set()
        if self._ends_once.acquire(blocking=False):
            self.group.add_done_callback(lambda made: None if made.exception() else made.result().destroy())


class NcclLinks:
    """The groups of all workers, by name. Calls for different workers may come in different threads."""

    def __init__(
        self,
        held: HeldVersions,
        open_group: Callable[[Meeting], NcclGroup],
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` bounds each meeting and each transfer; the wait for a turn is bounded by `timeout_s`
        per worker."""
        self._held = held
        self._open_group = open_group
        self._timeout_s = timeout_s
        self._clock = clock
        self._links: dict[str, _Link] = {}
        self._turn_changed = threading.Condition()
        self._turn_of: _Link | None = None
        self._begins_by_s = math.inf

    def join(self, worker: str, meeting: Meeting) -> None:
        """Make a group with the worker. AsyncrlError if its processes do not join in time, or the worker
        leaves meanwhile."""
        self.leave(worker)
        link = self._links[worker] = _Link(worker)
        self._bounded(
            link,
            link.group,
            lambda: self._open_group(meeting),
            f"for {worker}'s vLLM processes to meet it by NCCL",
        )

    def broadcast(self, worker: str, version: int, names: Mapping[str, str]) -> None:
        """Send a version's tensors to the worker. A failed broadcast ends the group.

        Raises AsyncrlError as `join` does, ValueError if the version is not held.
        """
        tensors = self._held.tensors(version, names)
        link, sent = self._joined(worker), Future[None]()
        group, waits = link.group.result(), f"for {worker}'s vLLM processes to take version {version}"
        self._take_turn(link, begins_in_s=math.inf)
        try:
            self._bounded(link, sent, lambda: group.broadcast(tensors), waits)
        finally:
            self._give_turn(link)

    def turn(self, worker: str) -> None:
        """Wait for the worker's turn. ExecutorFailed if other workers take too long; the group stays
        usable."""
        self._take_turn(self._joined(worker), begins_in_s=self._timeout_s)

    def leave(self, worker: str) -> None:
        link = self._links.pop(worker, None)
        if link is not None:
            link.ended.set()
            self._give_turn(link)
            threading.Thread(target=link.end, name=f"end the group with {worker}", daemon=True).start()

    def _joined(self, worker: str) -> _Link:
        link = self._links.get(worker)
        if link is None or link.ended.is_set() or not link.group.done():
            raise AsyncrlError(f"rank 0 has no NCCL group with {worker}")
        return link

    def _take_turn(self, link: _Link, *, begins_in_s: float) -> None:
        """Wait for the turn. A holder that does not begin to broadcast within `begins_in_s` loses the turn to
        a waiting worker."""
        came_s = self._clock()
        with self._turn_changed:
            while (
                (holder := self._turn_of) is not None
                and holder is not link
                and self._clock() <= self._begins_by_s
            ):
                workers = len(self._links)
                is_late = self._clock() - came_s > turn_s(self._timeout_s, workers)
                if link.ended.is_set() or is_late:
                    how = self._how_it_ended(link, f" for each of {workers} workers")
                    raise ExecutorFailed(
                        f"{link.worker} waited for rank 0, which was sending to {holder.worker}: {how}"
                    )
                self._turn_changed.wait(LOOK_S)
            if link.ended.is_set():
                raise ExecutorFailed(f"{link.worker} waited for rank 0: {self._how_it_ended(link)}")
            self._turn_of, self._begins_by_s = link, self._clock() + begins_in_s

    def _give_turn(self, link: _Link) -> None:
        with self._turn_changed:
            if self._turn_of is link:
                self._turn_of = None
            self._turn_changed.notify_all()  # wakes waiting workers, including those that have left

    def _how_it_ended(self, link: _Link, each: str = "") -> str:
        return (
            f"{link.worker} has left"
            if link.ended.is_set()
            else (f"longer than {TIMEOUT_KEY} = {self._timeout_s:g} s{each}")
        )

    def _bounded(self, link: _Link, made: Future[T], call: Callable[[], T], waits: str) -> None:
        """Run `call` in a thread and put its result into `made`. If it fails or takes too long, end the link
        and raise."""
        ends_s = self._clock() + self._timeout_s
        threading.Thread(
            target=_make, args=(made, call), name=f"nccl with {link.worker}", daemon=True
        ).start()
        while not (made.done() or link.ended.is_set() or self._clock() > ends_s):
            wait([made], timeout=LOOK_S)
        error: BaseException | None = AsyncrlError(f"rank 0 waited {waits}: {self._how_it_ended(link)}")
        if made.done() and not link.ended.is_set():
            error = made.exception()
        if error is not None:
            link.end()
            raise error


def _make(made: Future[T], call: Callable[[], T]) -> None:
    try:
        made.set_result(call())
    except Exception as error:  # `made.result()` raises it
        made.set_exception(error)
