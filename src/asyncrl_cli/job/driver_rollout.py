"""A rollout worker as the loop sees it: `RolloutWorker` of contracts/ports.py on the actor of
rollout_host.py. Runs in the driver.

Parts of groups travel to the actor, and their results back, several per call:

    driver   submit(request) ─> outgoing ──┐                             ┌──> `next_update`: ended parts
    calls                                  ├─ exchange(requests, seen) ──┤
    actor    PartDesk: a task per part <───┘          ended, reports ────┘    100 ms after the last answer

A call to an actor costs the driver and the actor a millisecond or two of CPU each. With short responses or
many workers, a separate call per part would be most of the driver's work. So the loop's long poll for
changes also carries new parts to the worker, and ended ones back: several at once while others run, and a
worker's last one without delay. Requests that are made while a poll is under way are sent in a separate call
(`post`).

Who waits for whom: `next_update` for a change on the worker, for a second at most. `submit` waits for
nothing. Nothing here blocks the driver's event loop, every wait is bounded, and Ray never retries a call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl_cli.base.errors import ExecutorLost, NoRoom, timeout
from asyncrl_cli.contracts.ports import CALL_KEY, EvalRequest, EvalResult, PartialResult, WorkerUpdate
from asyncrl_cli.contracts.prompt_group import AttemptKey, DataKey, PartRequest
from asyncrl_cli.contracts.weight_version import LoadReport, Published
from asyncrl_cli.data.ray_store import received
from asyncrl_cli.data.store import Store, Stored
from asyncrl_cli.job.ray.calls import Limit, answer, shown_host, start_limit
from asyncrl_cli.job.ray.endings import ProcessStart, end_processes
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Interrupt, Profile
from asyncrl_cli.weights.versions import AT_ONCE_S, DRIVER_MARGIN_S, load_s
from asyncrl_cli.weights.versions import TIMEOUT_KEY as WEIGHTS_KEY

logger = logging.getLogger(__name__)

SETTLE_S = 0.002
"""How long an exchange waits before it is sent, for new requests that the last answer has made room for."""
PLACING_KEY = "placement.timeout_s"
NO_ROOM = "add a node, or --set rollout.min_workers=... to let the run continue without it"
NODE_S = 5.0
"""How long Ray may take to list its nodes, and a node to accept a connection."""
LOOK_EVERY_S = 0.5
GIVEN_TO_A_DEAD_NODE = "because its node has died"
"""Ray's text about an actor that it assigned to a node before it knew that the node was gone."""
GONE_S = 30.0
"""How long the processes of a worker that is ended may take to leave its device."""
SO_FAR_S = 5.0
"""How long a checkpoint waits for a worker that may hang; training stands still meanwhile."""

T = TypeVar("T")
Answer = tuple[WorkerUpdate, list[Stored]]


class PartExchange:
    """Requests and results of one life of a worker's process.

    `answer(pending, call)` awaits the actor's answer within a limit, and raises as `ray.calls.answer` does. A
    cancelled `next_update` loses the parts that it would have brought.
    """

    def __init__(
        self,
        actor: ActorHandle,
        answer: Callable[[Awaitable[Answer], str], Awaitable[Answer]],
        store: Store,
    ) -> None:
        self._actor = actor
        self._answer = answer
        self.store = store
        self._outgoing: list[PartRequest] = []
        self.num_parts = self.num_given = 0
        """Requested, and not yet ended; and all that were ever sent."""
        self._is_under_way = False
        self._ran_s: dict[int, float] = {}
        """When sequences were last seen running, by the version that the worker held. On the event loop's
        clock."""

    def ran_before_s(self, version: int) -> float:
        """When sequences were last seen running on weights older than `version`; -inf if never."""
        return max((ran_s for held, ran_s in self._ran_s.items() if held < version), default=float("-inf"))

    def submit(self, request: PartRequest) -> None:
        """Send the part with the next exchange; if one is under way, in a separate call with all others of
        this turn."""
        self._outgoing.append(request)
        self.num_parts += 1
        if self._is_under_way and len(self._outgoing) == 1:
            asyncio.get_running_loop().call_soon(self.post)

    def post(self) -> None:
        """Send the waiting requests in a separate call, not awaited: if it fails, the exchange under way
        fails, too."""
        if self._outgoing:
            self._actor.submit.remote(*self._taken())

    async def next_update(self, seen: int) -> WorkerUpdate:
        """Exchange parts and wait for a change since `seen`. The store holds the ended parts' data then."""
        await asyncio.sleep(SETTLE_S)
        head, *refs = self._actor.exchange.remote(*self._taken(), seen)
        self._is_under_way = True
        try:
            update, stored = await self._answer(head, "a progress report")
        finally:
            self._is_under_way = False
        for report in update.reports:
            if report.gauges.get("running_sequences"):
                self._ran_s[int(report.gauges["version"])] = asyncio.get_running_loop().time()
        self.num_parts -= len(update.ended)
        for one in received(stored, refs):
            self.store.hold(one)
        return update

    def _taken(self) -> tuple[list[PartRequest], dict[DataKey, Stored]]:
        """The waiting requests, and what it takes to get the data that they continue from."""
        taken, self._outgoing = self._outgoing, []
        self.num_given += len(taken)
        keys = [*dict.fromkeys(chain.from_iterable(one.partial_tokens.values() for one in taken))]
        return taken, dict(zip(keys, self.store.stored(keys), strict=True))


class RayRolloutWorker:
    """`RolloutWorker` on the actor of one worker (`RolloutHost`). Parts travel with `next_update`
    (`PartExchange`)."""

    def __init__(
        self,
        name: str,
        make_actor: Callable[[], ActorHandle],
        profile: Profile,
        store: Store,
        workers: int = 1,
        is_lent: bool = False,
    ) -> None:
        """`make_actor()` creates the worker's actor in its bundle, now and at every restart. `workers`: how
        many the job has. `is_lent`: it is on a device of the trainer's."""
        self._store = store
        self._weights_s = weights_s = profile.weights.timeout_s
        self.name = name
        self.is_lent = is_lent
        self.slots = profile.rollout.slots
        self.actor = make_actor()
        self._make_actor = make_actor
        self._calls = Limit(profile.rollout.call_timeout_s, CALL_KEY)
        self._placing_s = profile.placement.timeout_s
        self._starts = start_limit(profile)
        self._weights = Limit(weights_s, WEIGHTS_KEY)
        self._load = self._weights
        if profile.weights.transport in DIRECT_TRANSPORTS:  # one worker after the other
            self._load = Limit(load_s(weights_s, workers), WEIGHTS_KEY, weights_s)
        self._node, self._host, self._processes = "", "", list[ProcessStart]()
        self._rank_zero: ActorHandle | None = None
        """The trainer's first actor, if it sends this worker weights directly."""
        self._parts = PartExchange(self.actor, self._answer, self._store)

    @property
    def actors(self) -> list[ActorHandle]:
        return [self.actor]

    def submit(self, request: PartRequest) -> None:
        self._parts.submit(request)

    async def abort(self, key: AttemptKey) -> None:
        self._parts.post()
        await self._answer(self.actor.abort.remote(key, self._parts.num_given), f"the abort of {key}")

    async def partial_responses(self) -> PartialResult:
        limit, call = Limit(SO_FAR_S), "a report of its responses"
        # not `_answer`: a worker that is too slow for this is not lost, and keeps its connection to rank 0
        ask = partial(answer, executor=self.name, call=call, limit=limit, host=self._host)
        return await self._so_far(self.actor.partial_responses, ask)

    async def _so_far(self, method: Any, ask: Callable[[Any], Awaitable[Any]], *given: int) -> PartialResult:
        most = max(self._parts.num_parts, 1)
        head, *refs = method.options(num_returns=1 + most).remote(*given, most)
        found: PartialResult
        found, stored = await ask(head)
        for one in received(stored, refs):
            self._store.hold(one)
        return found

    async def next_update(self, seen: int) -> WorkerUpdate:
        return await self._parts.next_update(seen)

    async def prefetch(self, published: Published) -> float:
        manifest, bucket_refs = published.handle
        ref = self.actor.prefetch.remote(manifest, list(bucket_refs))
        return float(await self._answer(ref, f"the transfer of version {published.version}", self._weights))

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        """A drain may take as long as the longest response, so its limit counts from when a response was last
        seen running. Where rank 0 sends the bytes during the load, the worker's own limits on waiting for
        rank 0 are shorter than this one."""
        call, ref = f"the load of version {version} ({interrupt})", self.actor.load.remote(version, interrupt)
        since = partial(self._parts.ran_before_s, version) if interrupt == "drain" else None
        return await self._answer(ref, call, self._load, since)

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        head, *refs = self.actor.evaluate.remote(request)
        result: EvalResult
        result, stored = await self._answer(head, f"the eval of version {request.version}", Limit(None))
        for one in received(stored, refs):
            self._store.hold(one)
        return result

    async def abort_evals(self) -> None:
        await self._answer(self.actor.abort_evals.remote(), "the abort of its evals")

    async def pause(self) -> PartialResult:
        self._parts.post()
        ask, num_given = partial(self._answer, call="a pause"), self._parts.num_given
        found = await self._so_far(self.actor.pause, ask, num_given)
        self._parts.num_parts -= len(found.stopped)
        return found

    async def resume(self) -> None:
        await self._answer(self.actor.resume.remote(), "a resume")

    async def end(self) -> None:
        ray.kill(self.actor)
        there = NodeAffinitySchedulingStrategy(self._node, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(end_processes).options(scheduling_strategy=there)
        await self._answer(task.remote(self._processes, GONE_S), "the end of its processes")

    async def restart(self) -> None:
        """Kill the actor, dead or alive, and start a new one, which gets its bundle once the old actor is
        gone.

        The engine's processes and the reward process end with the actor that started them. Arrays of ended
        parts remain: the driver owns their references, and the node's object store has the bytes.
        """
        ray.kill(self.actor)
        if self._rank_zero is not None:
            ref, call = self._rank_zero.leave.remote(self.name), f"the leave of {self.name}"
            await answer(ref, executor="trainer-0", call=call, limit=Limit(AT_ONCE_S))
        await self._place_again()
        self._parts = PartExchange(self.actor, self._answer, self._store)
        await self.start()
        if self._rank_zero is not None:
            await self.connect(self._rank_zero)

    async def _place_again(self) -> None:
        """Create an actor and wait until it has a process. If the bundle's node is gone, the bundle waits for
        another node. Until Ray notices, it assigns actors to the old node, where they never run: then create
        another actor."""
        limit, now = Limit(self._placing_s, PLACING_KEY), asyncio.get_running_loop().time
        until_s = now() + self._placing_s
        while True:
            self.actor = self._make_actor()
            left, ready = replace(limit, seconds=max(until_s - now(), 0.0)), self.actor.__ray_ready__.remote()
            try:
                await answer(ready, executor=self.name, call="its process", limit=left)
                return
            except ExecutorLost as error:
                if isinstance(error.__cause__, TimeoutError):
                    ray.kill(self.actor)
                    why = f"no process for it within {limit}"
                    raise NoRoom(why, hint=NO_ROOM, executor=self.name) from error
                if GIVEN_TO_A_DEAD_NODE not in str(error.__cause__):
                    raise
            await asyncio.sleep(LOOK_EVERY_S)

    async def start(self) -> None:
        started = await self._answer(self.actor.start.remote(), "its start", self._starts)
        self._node, host, self._processes = started
        self._host = shown_host(host)

    async def node_is_gone(self) -> bool:
        """A node is alive if its raylet accepts a connection. (Ray itself needs about 15 s to notice that one
        is gone.) If Ray does not answer, the node counts as alive."""
        try:
            async with timeout(NODE_S):
                nodes = await asyncio.to_thread(ray.nodes)
        except (RayError, TimeoutError) as error:
            why = error or "Ray does not answer"
            logger.warning("cannot tell whether the node of %s is gone: %s", self.name, why)
            return False
        node = next((node for node in nodes if node["NodeID"] == self._node), None)
        if node is None:  # it never started
            return False
        try:
            async with timeout(NODE_S):
                _, writer = await asyncio.open_connection(node["NodeManagerAddress"], node["NodeManagerPort"])
            writer.close()
        except (OSError, TimeoutError):
            return True
        return not node["Alive"]

    async def connect(self, rank_zero: ActorHandle) -> None:
        """For `nccl` and `ipc`: connect the worker to the trainer's first actor, which sends it weights; also
        after restarts."""
        self._rank_zero = rank_zero
        limit = Limit(self._weights_s + DRIVER_MARGIN_S, WEIGHTS_KEY, self._weights_s)
        await self._answer(self.actor.connect.remote(rank_zero), "its connection to trainer-0", limit)

    async def stop(self, timeout_s: float) -> None:
        await self._answer(self.actor.stop.remote(), "its shutdown", Limit(timeout_s))

    async def _answer(
        self,
        ref: Awaitable[T],
        call: str,
        limit: Limit | None = None,
        since: Callable[[], float] | None = None,
    ) -> T:
        """By default within `rollout.call_timeout_s`."""
        try:
            return await answer(
                ref, executor=self.name, call=call, limit=limit or self._calls, since=since, host=self._host
            )
        except ExecutorLost:
            # at once: else rank 0's GPU stays busy sending to the lost worker until a timeout
            if self._rank_zero is not None:
                self._rank_zero.leave.remote(self.name)
            raise
