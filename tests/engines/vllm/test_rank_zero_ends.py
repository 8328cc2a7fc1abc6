"""Rank 0's ends of `nccl` and `ipc`: exactly which bytes leave, in which order, and that no wait is without
an end."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed
from asyncrl_cli.engines.vllm import rank_zero
from asyncrl_cli.engines.vllm.rank_zero import IpcExports, NcclLinks
from asyncrl_cli.weights.buckets import Layout
from asyncrl_cli.weights.receivers import AnnouncedWeights, SharedWeights
from asyncrl_cli.weights.senders import HeldVersions
from asyncrl_cli.weights.versions import Manifest, Meeting, send
from tests.engines import tiny
from tests.engines.vllm.in_process_ends import (
    POLL_S,
    WAIT_S,
    Exchange,
    InProcessChunk,
    InProcessGroup,
    InProcessMemory,
)
from tests.packed import pack

WORKER = "rollout-0"


@functools.cache
def weights_of(version: int, tied: bool = True) -> dict[str, torch.Tensor]:
    return tiny.weights_after(tiny.make_model(tied=tied), version)


def published(
    held: HeldVersions, version: int, weights: dict[str, torch.Tensor], bucket_bytes: int = 300_000
) -> list[Layout]:
    buckets = pack(weights, bucket_bytes)
    assert len(buckets) > 2
    manifest = Manifest(version=version, num_bytes=0, fingerprints=(0,) * len(buckets), temperature=1.0)
    return send(held, manifest, buckets)


def names_of(layouts: list[Layout], required: set[str]) -> dict[str, str]:
    return {spec.name: name for name, spec in AnnouncedWeights(layouts).chosen(required)}


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_announced_has_the_shapes_and_names_of_the_weights_and_no_bytes(tied: bool) -> None:
    weights = weights_of(1, tied)
    announced = AnnouncedWeights(published(HeldVersions(), 1, weights))
    assert announced.keys() == weights.keys()
    assert {name: (t.shape, t.dtype) for name, t in announced.items()} == {
        n: (t.shape, t.dtype) for n, t in weights.items()
    }
    assert {tensor.device.type for tensor in announced.values()} == {"meta"}


@pytest.mark.parametrize("required", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_tensor_travels_once_under_the_name_that_vllm_loads(required: str) -> None:
    weights = weights_of(1)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    needed = {name for name in weights if name not in ("model.embed_tokens.weight", "lm_head.weight")} | {
        required
    }
    chosen = AnnouncedWeights(published(HeldVersions(), 1, weights)).chosen(needed)
    assert [name for name, _ in chosen].count(required) == 1
    assert {name for name, _ in chosen} == needed
    told_otherwise = SharedWeights(pack(weights, 300_000)).describe(needed)["tensors"]
    assert [(name, spec.dtype, list(spec.shape)) for name, spec in chosen] == [
        tensor[:3] for tensor in told_otherwise
    ]


def test_rank_zero_holds_a_version_until_nobody_can_want_it() -> None:
    held = HeldVersions()
    first, second = weights_of(1), weights_of(2)
    layouts = published(held, 1, first)
    names = names_of(layouts, set(first))
    published(held, 2, second)
    sending = held.tensors(1, names)
    held.keep([2])
    # what is being sent is sent to its end
    assert all(torch.equal(tensor, first[name]) for name, tensor in sending)
    assert {name: tensor.sum() for name, tensor in held.tensors(2, names)} == {
        name: second[name].sum() for name in names
    }
    with pytest.raises(
        ValueError, match=r"rank 0 holds only 0 of 35 requested tensors of version 1 \(versions held: \[2\]\)"
    ):
        held.tensors(1, names)
    with pytest.raises(ValueError, match=r"35 of 36 requested tensors of version 2"):
        held.tensors(2, names | {"another": "another"})


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero, "LOOK_S", POLL_S)


class Held:
    """Version 1 and 2 on rank 0, and groups that are made in this process. `passed_s`: rank 0's clock is
    ahead by so much."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.threads = threads
        self.passed_s = 0.0
        self.looks: Counter[int] = Counter()
        self.opens = threading.Event()
        self.exchange = Exchange()
        self.held = HeldVersions()
        self.weights = {version: weights_of(version) for version in (1, 2)}
        self.layouts = {
            version: published(self.held, version, weights) for version, weights in self.weights.items()
        }
        self.names = names_of(self.layouts[1], set(self.weights[1]))
        self.groups: list[InProcessGroup] = []
        self.links = NcclLinks(self.held, self._open, timeout_s=WAIT_S, clock=self.clock)

    def clock(self) -> float:
        """A call that waits looks at it again and again; `looks`: how often each thread has."""
        self.looks[threading.get_ident()] += 1
        return time.monotonic() + self.passed_s

    def all_wait(self, turns: list[Future[None]]) -> bool:
        """Once so many threads of the pool have looked several times at who has the turn: whether none of
        them has got it."""
        ends_s = time.monotonic() + WAIT_S
        while sum(
            looks > 9 for thread, looks in dict(self.looks).items() if thread != threading.get_ident()
        ) < len(turns):
            assert time.monotonic() < ends_s, f"{len(turns)} threads should wait: {self.looks}"
            time.sleep(POLL_S)
        return not any(turn.done() for turn in turns)

    def _open(self, meeting: Meeting) -> InProcessGroup:
        self.opens.set()
        self.groups.append(InProcessGroup(self.exchange, meeting))
        return self.groups[-1]

    def meeting(self) -> Meeting:
        host, port = self.exchange.meeting_point()
        return Meeting(host=host, port=port, world_size=2, wire_bytes=1)

    def joined(self, worker: str = WORKER) -> InProcessGroup:
        meeting = self.meeting()
        came = self.threads.submit(self.exchange.pipe(meeting.port).met.wait, WAIT_S)
        self.links.join(worker, meeting)
        came.result()
        return self.groups[-1]

    def broadcast(self, version: int, worker: str = WORKER) -> Future[None]:
        return self.threads.submit(self.links.broadcast, worker, version, self.names)

    def is_taken(self, group: InProcessGroup, version: int) -> bool:
        """Whether all of a version comes out of the worker's end, in the order of the layouts."""
        taken = [group.pipe.slot.get(timeout=WAIT_S) for _ in self.names]
        return [name for name, _ in taken] == list(self.names.values()) and all(
            torch.equal(tensor, self.weights[version][name]) for name, tensor in taken
        )


@pytest.fixture
def there() -> Iterator[Held]:
    with ThreadPoolExecutor(4) as threads:
        yield Held(threads)


def test_a_worker_gets_exactly_the_version_it_asked_for_in_the_order_of_the_layouts(there: Held) -> None:
    group, other = there.joined(), there.joined("rollout-1")
    sending = there.broadcast(1)
    assert there.is_taken(group, 1)
    sending.result(WAIT_S)
    assert list(there.names.values()) == [name for name in there.weights[1] if name != "lm_head.weight"]
    assert group.pipe.slot.empty()
    assert other.pipe.slot.empty()


def test_the_group_of_a_worker_that_leaves_is_destroyed_and_its_broadcast_ends(there: Held) -> None:
    group = there.joined()
    sending = there.broadcast(2)
    group.pipe.slot.get(timeout=WAIT_S)  # one of many tensors; then the worker is gone
    there.links.leave(WORKER)
    with pytest.raises(
        AsyncrlError,
        match="rank 0 waited for rollout-0's vLLM processes to take version 2: rollout-0 has left",
    ):
        sending.result(WAIT_S)
    assert group.pipe.destroyed.wait(WAIT_S)
    with pytest.raises(AsyncrlError, match="rank 0 has no NCCL group with rollout-0"):
        there.links.broadcast(WORKER, 2, there.names)


def test_a_restarted_worker_joins_anew_and_gets_all_of_the_version(there: Held) -> None:
    old = there.joined()
    sending = there.broadcast(2)
    old.pipe.slot.get(timeout=WAIT_S)
    new = there.joined()  # nobody has told rank 0 that the old process is gone
    with pytest.raises(AsyncrlError, match="rollout-0 has left"):
        sending.result(WAIT_S)
    assert old.pipe.destroyed.wait(WAIT_S)
    again = there.broadcast(2)
    assert there.is_taken(new, 2)
    again.result(WAIT_S)
    assert not new.pipe.destroyed.is_set()


def test_a_broadcast_that_nobody_takes_ends_in_bounded_time_and_ends_its_group(there: Held) -> None:
    group = there.joined()
    sending = there.broadcast(1)
    group.pipe.slot.get(timeout=WAIT_S)
    there.passed_s = WAIT_S
    with pytest.raises(AsyncrlError, match=r"to take version 1: longer than weights.timeout_s = 30 s"):
        sending.result(WAIT_S)
    assert group.pipe.destroyed.is_set()


def test_a_meeting_that_nobody_comes_to_ends_in_bounded_time_and_whoever_comes_late_finds_its_group_destroyed(
    there: Held,
) -> None:
    meeting = there.meeting()
    joining = there.threads.submit(there.links.join, WORKER, meeting)
    there.opens.wait(WAIT_S)
    there.passed_s = WAIT_S
    with pytest.raises(
        AsyncrlError,
        match=r"for rollout-0's vLLM processes to meet it by NCCL: longer than weights.timeout_s",
    ):
        joining.result(WAIT_S)
    pipe = there.exchange.pipe(meeting.port)
    pipe.met.wait(WAIT_S)
    assert pipe.destroyed.wait(WAIT_S)


def test_workers_are_sent_to_one_after_another(there: Held) -> None:
    groups = [there.joined(f"rollout-{number}") for number in range(2)]
    first = there.broadcast(1, "rollout-0")
    groups[0].pipe.slot.get(timeout=WAIT_S)  # the first one's turn has come
    second = there.broadcast(2, "rollout-1")
    for _ in range(len(there.names) - 1):
        assert groups[1].pipe.slot.empty()
        groups[0].pipe.slot.get(timeout=WAIT_S)
    first.result(WAIT_S)
    assert there.is_taken(groups[1], 2)
    second.result(WAIT_S)


def test_a_worker_waits_for_its_turn_before_it_pauses_and_one_that_leaves_gives_it_back(there: Held) -> None:
    groups = [there.joined(f"rollout-{number}") for number in range(3)]
    there.links.turn("rollout-0")
    there.links.turn("rollout-0")  # it has it
    second, third = (there.threads.submit(there.links.turn, f"rollout-{number}") for number in (1, 2))
    assert there.all_wait([second, third])
    there.links.leave("rollout-0")  # it has begun nothing, and is gone
    (first,) = wait([second, third], timeout=WAIT_S, return_when=FIRST_COMPLETED).done
    has, waits = ("rollout-1", "rollout-2") if first is second else ("rollout-2", "rollout-1")
    there.links.leave(waits)  # gone while it waits
    with pytest.raises(
        AsyncrlError, match=f"{waits} waited for rank 0, which was sending to {has}: {waits} has left"
    ):
        (third if first is second else second).result(WAIT_S)
    sending = there.broadcast(1, has)
    assert there.is_taken(groups[int(has[-1])], 1)
    sending.result(WAIT_S)
    there.joined()
    there.links.turn(WORKER)  # the broadcast has given it back


def test_a_transfer_that_hangs_costs_its_own_worker_and_not_the_next_in_line(there: Held) -> None:
    hangs, next_one = there.joined(), there.joined("rollout-1")
    there.links.turn(WORKER)
    sending = there.broadcast(1)
    hangs.pipe.slot.get(timeout=WAIT_S)
    turn = there.threads.submit(there.links.turn, "rollout-1")
    there.passed_s = WAIT_S
    with pytest.raises(AsyncrlError, match=r"to take version 1: longer than weights.timeout_s"):
        sending.result(WAIT_S)
    turn.result(WAIT_S)
    again = there.broadcast(1, "rollout-1")
    assert there.is_taken(next_one, 1)
    again.result(WAIT_S)


def test_who_has_the_turn_and_begins_nothing_loses_it_and_is_sent_to_later(there: Held) -> None:
    slow, next_one = there.joined(), there.joined("rollout-1")
    there.links.turn(WORKER)
    turn = there.threads.submit(there.links.turn, "rollout-1")
    assert there.all_wait([turn])
    there.passed_s = WAIT_S
    turn.result(WAIT_S)
    slow_sending = there.broadcast(2)
    sending = there.broadcast(1, "rollout-1")
    for _ in there.names:
        assert slow.pipe.slot.empty()
        next_one.pipe.slot.get(timeout=WAIT_S)
    sending.result(WAIT_S)
    assert there.is_taken(slow, 2)
    slow_sending.result(WAIT_S)


def test_a_turn_that_is_never_given_back_fails_those_who_wait_after_a_transfer_for_each_worker(
    there: Held,
) -> None:
    begun, destroyed, ends = threading.Event(), threading.Event(), threading.Event()

    def broadcast(tensors: Any) -> None:
        begun.set()
        ends.wait(4 * WAIT_S)

    def destroy() -> None:
        destroyed.set()
        ends.wait(4 * WAIT_S)  # longer than it should take

    group: Any = SimpleNamespace(broadcast=broadcast, destroy=destroy)
    links = NcclLinks(there.held, lambda meeting: group, timeout_s=WAIT_S, clock=there.clock)
    for worker in (WORKER, "rollout-1"):
        links.join(worker, there.meeting())
    sending = there.threads.submit(links.broadcast, WORKER, 1, there.names)
    begun.wait(WAIT_S)
    came_s = there.clock()
    waiting = there.threads.submit(links.turn, "rollout-1")
    while not wait([waiting], timeout=2 * POLL_S).done:
        there.passed_s += WAIT_S / 2
    assert there.clock() - came_s > 2 * WAIT_S
    why = "which was sending to rollout-0: longer than weights.timeout_s = 30 s for each of 2 workers"
    with pytest.raises(ExecutorFailed, match=why):
        waiting.result()
    destroyed.wait(WAIT_S)
    ends.set()
    with pytest.raises(AsyncrlError, match="to take version 1"):
        sending.result(WAIT_S)
    links.turn("rollout-1")  # nothing was sent: it may ask again


def test_what_a_group_fails_with_is_raised_and_ends_it(there: Held) -> None:
    destroyed = threading.Event()

    def broadcast(tensors: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    group: Any = SimpleNamespace(broadcast=broadcast, destroy=destroyed.set)
    links = NcclLinks(there.held, lambda meeting: group, timeout_s=WAIT_S)
    links.join(WORKER, there.meeting())
    with pytest.raises(RuntimeError, match="unhandled system error"):
        links.broadcast(WORKER, 1, there.names)
    assert destroyed.is_set()


def exports(there: Held, memory: InProcessMemory, buffer_bytes: int = 100_000) -> IpcExports:
    return IpcExports(there.held, memory.produce, buffer_bytes=buffer_bytes, collect=memory.collect)


def test_a_version_passes_through_one_buffer_part_by_part(there: Held) -> None:
    memory = InProcessMemory()
    rank_zero = exports(there, memory)
    got: dict[str, torch.Tensor] = {}
    part = 0
    while (info := rank_zero.export(WORKER, 2, there.names, part)) is not None:
        got |= memory.read(info)
        part += 1
    assert part > 2
    assert list(got) == list(there.names.values())
    assert all(torch.equal(tensor, there.weights[2][name]) for name, tensor in got.items())
    largest = max(tensor.nbytes for tensor in there.weights[2].values())
    assert memory.sizes == [largest]
    assert largest > 100_000
    assert memory.collected == 0
    rank_zero.leave(WORKER)
    rank_zero.leave(WORKER)
    assert memory.collected == 1


def test_a_load_that_begins_again_gets_its_own_handle_and_a_part_out_of_order_is_refused(there: Held) -> None:
    memory = InProcessMemory()
    rank_zero = exports(there, memory, 2**20)
    with pytest.raises(ValueError, match="rollout-0 asked for part 1 of version 1, next is part -1"):
        rank_zero.export(WORKER, 1, there.names, 1)
    first = rank_zero.export(WORKER, 1, there.names, 0)
    again = rank_zero.export(WORKER, 1, there.names, 0)  # the process that had the first was killed
    assert first is not None
    assert again is not None
    assert first["ipc_handles_pickled"] != again["ipc_handles_pickled"]
    assert memory.sizes == [2**20, 2**20]
    with pytest.raises(ValueError, match="asked for part 1 of version 2, next is part 1 of version 1"):
        rank_zero.export(WORKER, 2, there.names, 1)
    there.held.keep([2])
    with pytest.raises(ValueError, match=r"0 of 35 requested tensors of version 1"):
        rank_zero.export(WORKER, 1, there.names, 0)


@pytest.mark.slow
def test_a_worker_that_leaves_while_a_part_is_made_gives_its_buffer_back(there: Held) -> None:
    buffers: list[weakref.ref[torch.Tensor]] = []
    held_when_collected: list[bool] = []

    def produce(tensors: Any, buffer_bytes: int) -> Iterator[Any]:
        buffer = torch.zeros(8)
        buffers.append(weakref.ref(buffer))
        rank_zero.leave(WORKER)  # rank 0's other thread, which cannot interrupt this one
        yield InProcessChunk(
            names=["a"],
            shapes=[[8]],
            dtype_names=["float32"],
            tensor_sizes=[32],
            ipc_handle={"here": (buffer,)},
        )

    def collect() -> None:
        held_when_collected.append(buffers[0]() is not None)

    rank_zero = IpcExports(there.held, produce, buffer_bytes=1, collect=collect)
    with pytest.raises(ExecutorFailed, match="rollout-0 has left while rank 0 made part 0 of version 1"):
        rank_zero.export(WORKER, 1, there.names, 0)
    assert held_when_collected == [True, False]
    with pytest.raises(ValueError, match="next is part -1"):
        rank_zero.export(WORKER, 1, there.names, 1)
