"""Implements the loop's ports on Ray actors: `RayRolloutWorker` and `RayTrainer`.

Nothing here blocks the driver's event loop, every wait is bounded, and Ray never retries a call: an optimizer
step made twice would be worse than a failed run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray.exceptions import RayError

from asyncrl_cli.base.errors import AsyncrlError, ExecutorLost, NoRoom, timeout
from asyncrl_cli.contracts import ports
from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult
from asyncrl_cli.job.calls import Limit, RayRankZero, all_of, answer, shown_host, start_limit
from asyncrl_cli.job.exchange import PartExchange
from asyncrl_cli.job.rank_actors import RayRanks
from asyncrl_cli.job.transports import HeldRefs
from asyncrl_cli.loop.worker_tasks import CALL_KEY
from asyncrl_cli.measure.states import ExecutorReport
from asyncrl_cli.measure.values import Last
from asyncrl_cli.profile.arithmetic import train_steps_of
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Interrupt, Profile
from asyncrl_cli.train.sample_dump import choose_samples, is_dump_step
from asyncrl_cli.train.step_plan import RankPlan, needs_columns
from asyncrl_cli.weights.versions import DRIVER_MARGIN_S, load_s
from asyncrl_cli.weights.versions import TIMEOUT_KEY as WEIGHTS_KEY

logger = logging.getLogger(__name__)

PLACING_KEY = "placement.timeout_s"
NO_ROOM = "add a node, or --set rollout.min_workers=... to let the run continue without it"
NODE_S = 5.0
"""How long Ray may take to list its nodes, and a node to accept a connection."""
LOOK_EVERY_S = 0.5
GIVEN_TO_A_DEAD_NODE = "because its node has died"
"""Ray's text about an actor that it assigned to a node before it knew that the node was gone."""
SO_FAR_S = 5.0
"""How long a checkpoint waits for a worker that may hang; training stands still meanwhile."""


class RayRolloutWorker:
    """`loop.ports.RolloutWorker` on a `RolloutActor`. Parts travel with `progress` (exchange.py)."""

    def __init__(self, name: str, make_actor: Callable[[], Any], profile: Profile, workers: int = 1) -> None:
        """`make_actor()` creates the worker's actor in its bundle, now and at every restart. `workers`: how
        many the job has."""
        weights_s, is_direct = profile.weights.timeout_s, profile.weights.transport in DIRECT_TRANSPORTS
        self.name = name
        self.slots = profile.rollout.slots
        self.actor = make_actor()
        self._make_actor = make_actor
        self._calls = Limit(profile.rollout.call_timeout_s, CALL_KEY)
        self._placing_s = profile.placement.timeout_s
        self._starts = start_limit(profile)
        self._weights = Limit(weights_s, WEIGHTS_KEY)
        self._load = Limit(load_s(weights_s, workers), WEIGHTS_KEY, weights_s) if is_direct else self._weights
        self._num_workers = workers
        self._node, self._host = "", ""
        self._rank_zero: RayRankZero | None = None
        self._parts = PartExchange(self.actor, self._answer)

    def submit(self, request: ports.PartRequest) -> None:
        self._parts.submit(request)

    async def abort(self, key: AttemptKey) -> None:
        self._parts.post()
        await self._answer(self.actor.abort.remote(key), f"the abort of {key}")

    async def so_far(self) -> ports.PartialResult:
        head, payloads = self.actor.so_far.remote()
        told = await answer(
            head, executor=self.name, call="a report of its responses", limit=Limit(SO_FAR_S), host=self._host
        )
        return replace(told, handle=payloads)

    async def progress(self, seen: int) -> ports.Progress:
        return await self._parts.progress(seen)

    async def prefetch(self, published: ports.Published) -> float:
        manifest, bucket_refs = published.handle
        ref = self.actor.prefetch.remote(manifest, list(bucket_refs))
        return float(await self._answer(ref, f"the transfer of version {published.version}", self._weights))

    async def load(self, version: int, interrupt: Interrupt) -> ports.LoadReport:
        """A drain may take as long as the longest response, so its limit counts from when a response was last
        seen running. Where rank 0 sends the bytes during the load, the worker's own limits on waiting for
        rank 0 are shorter than this one."""
        what, ref = f"the load of version {version} ({interrupt})", self.actor.load.remote(version, interrupt)
        since = partial(self._parts.ran_before_s, version) if interrupt == "drain" else None
        return await self._answer(ref, what, self._load, since)

    async def evaluate(self, request: ports.EvalRequest) -> ports.EvalResult:
        head, payload = self.actor.evaluate.remote(request)
        result = await self._answer(head, f"the eval of version {request.version}", Limit(None))
        return replace(result, payload=payload)

    async def abort_evals(self) -> None:
        await self._answer(self.actor.abort_evals.remote(), "the abort of its evals")

    async def pause(self) -> None:
        await self._answer(self.actor.pause.remote(), "a pause")

    async def resume(self) -> None:
        await self._answer(self.actor.resume.remote(), "a resume")

    async def restart(self) -> None:
        """Kill the actor, dead or alive, and start a new one, which gets its bundle once the old actor is
        gone.

        The engine's processes and the reward process end with the actor that started them. Arrays of ended
        parts remain: the driver owns their references, and the node's object store has the bytes.
        """
        ray.kill(self.actor)
        if self._rank_zero is not None:
            await self._rank_zero.leave()
        await self._place_again()
        self._parts = PartExchange(self.actor, self._answer)
        await self.start()
        if self._rank_zero is not None:
            await self.connect(self._rank_zero.actor)

    async def _place_again(self) -> None:
        """Create an actor and wait until it has a process. If the bundle's node is gone, the bundle waits for
        another node. Until Ray notices, it assigns actors to the old node, where they never run: then create
        another actor."""
        limit, now = Limit(self._placing_s, PLACING_KEY), asyncio.get_running_loop().time
        until_s = now() + self._placing_s
        while True:
            self.actor = self._make_actor()
            left = replace(limit, seconds=max(until_s - now(), 0.0))
            try:
                await answer(
                    self.actor.__ray_ready__.remote(), executor=self.name, call="its process", limit=left
                )
                return
            except ExecutorLost as error:
                if isinstance(error.__cause__, TimeoutError):
                    ray.kill(self.actor)
                    raise NoRoom(
                        f"no process for it within {limit}", hint=NO_ROOM, executor=self.name
                    ) from error
                if GIVEN_TO_A_DEAD_NODE not in str(error.__cause__):
                    raise
            await asyncio.sleep(LOOK_EVERY_S)

    async def start(self) -> None:
        self._node, host = await self._answer(self.actor.start.remote(), "its start", self._starts)
        self._host = shown_host(host)

    async def node_is_gone(self) -> bool:
        """A node is alive if its raylet accepts a connection. (Ray itself needs about 15 s to notice that one
        is gone.) If Ray does not answer, the node counts as alive."""
        try:
            async with timeout(NODE_S):
                nodes = await asyncio.to_thread(ray.nodes)
        except (RayError, TimeoutError) as error:
            logger.warning(
                "cannot tell whether the node of %s is gone: %s", self.name, error or "Ray does not answer"
            )
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

    async def connect(self, trainer_actor: Any) -> None:
        """For `nccl` and `ipc`: connect the worker to the trainer's first actor, which sends it weights; also
        after restarts."""
        own_s = self._weights.seconds
        self._rank_zero = RayRankZero(trainer_actor, self.name, own_s, self._num_workers)
        limit = Limit(own_s + DRIVER_MARGIN_S, WEIGHTS_KEY, own_s)
        await self._answer(self.actor.connect.remote(self._rank_zero), "its connection to trainer-0", limit)

    async def stop(self, timeout_s: float) -> None:
        await self._answer(self.actor.stop.remote(), "its shutdown", Limit(timeout_s))

    async def _answer(
        self, ref: Any, call: str, limit: Limit | None = None, since: Callable[[], float] | None = None
    ) -> Any:
        """By default within `rollout.call_timeout_s`."""
        try:
            return await answer(
                ref, executor=self.name, call=call, limit=limit or self._calls, since=since, host=self._host
            )
        except ExecutorLost:
            # at once: else rank 0's GPU stays busy sending to the lost worker until a timeout
            if self._rank_zero is not None:
                self._rank_zero.actor.leave.remote(self.name)
            raise


class RayTrainer(RayRanks):
    """`loop.ports.Trainer` on all `TrainerActor` ranks.

    Samples are dumped beside training, one step at a time: each dump first awaits the previous one, so that
    no failure goes unseen. A failed dump loses its samples, not the step: `warn` is called for the first
    failure, and all failures are counted. `expected`: the reference answer of a prompt's uid, for the
    samples.

    `critic`: the critic in its own processes, if there is one. Its state is part of the checkpoints.
    """

    critic: RayRanks | None = None

    def __init__(self, actors: Sequence[Any], profile: Profile, *, samples_dir: Path) -> None:
        super().__init__("trainer", actors, profile)
        self.warn: Callable[[str], None] = logger.warning
        self.expected: Callable[[str], str | None] = lambda uid: None
        self.failed_dumps = 0
        self._dumping: tuple[int, asyncio.Task[None]] | None = None
        self._samples_dir = samples_dir
        self._wanted: WeakValueDictionary[int, HeldRefs] = WeakValueDictionary()

    async def train(self, batch: ports.TrainBatch) -> tuple[ports.TrainReport, ExecutorReport]:
        """Split the step over ranks and mini-batches by metadata; Ray brings each rank the parts and columns
        of its own groups."""
        names = tuple(next(iter(batch.columns.values()), {}))
        groups, plans, given = self._shares(batch, names)
        is_dumped = is_dump_step(
            batch.step, self._profile.logging.samples_every_steps, train_steps_of(self._profile)
        )
        dump = self._sampled(batch, groups, plans) if is_dumped else None
        ranks = zip(self.actors, given, strict=True)
        refs = [actor.train.remote(batch.step, batch.step_in_window, *own) for actor, own in ranks]
        answers = await self._answers(f"train step {batch.step}", refs, self._steps)
        reports = [report for report, _ in answers]
        if dump is not None:
            await self.begin_dump(batch.step, dump)
        failed_dumps = {"samples/failed_dumps": Last(self.failed_dumps)} if self.failed_dumps else {}
        slowest_s = max(report.train_s for report in reports)
        column_s = {name: max(report.column_s[name] for report in reports) for name in reports[0].column_s}
        metrics = {**reports[0].metrics, **failed_dumps}
        slowest = replace(reports[0], train_s=slowest_s, column_s=column_s, metrics=metrics)
        return slowest, answers[0][1]

    async def begin_dump(self, step: int, dump: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start `dump()` once the previous dump has ended. `dump` must have a time limit of its own."""
        await self.finish_dumps()
        self._dumping = step, asyncio.create_task(dump(), name=f"samples of step {step}")

    async def finish_dumps(self) -> None:
        if self._dumping is None:
            return
        (step, dumping), self._dumping = self._dumping, None
        try:
            await dumping
        except AsyncrlError as error:
            self.failed_dumps += 1
            logger.warning("the samples of step %d are lost: %s", step, error)
            if self.failed_dumps == 1:
                self.warn(
                    f"the samples of step {step} are lost, training goes on: {error} (further failures "
                    "are only counted)"
                )

    def _sampled(
        self, batch: ports.TrainBatch, groups: Sequence[GroupResult], plans: Sequence[RankPlan]
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Choose samples of the step, and have the ranks score them before they train it. Returns a function
        that dumps them, to be called after the train step: rank 0 writes them beside training, for
        `weights.timeout_s` at most."""
        logging, sharing = self._profile.logging, self._profile.trainer.sequence_parallel_size
        seed = f"samples {self._profile.run.seed}/{batch.step}"
        sizes = choose_samples([len(group.trajectories) for group in groups], logging.samples_per_step, seed)
        planned = (t for plan in plans for step in plan.optimizer_steps for t in step.trajectories)
        is_planned = not needs_columns(self._profile.algorithm)
        known = {(t.group, t.trajectory): t.advantage for t in planned if is_planned}
        facts = {
            index: {
                "advantages": [known.get((index, number)) for number in range(size)],
                "rewards": [meta.reward for meta in groups[index].trajectories],
                "answer": self.expected(groups[index].key.uid),
            }
            for index, size in sizes.items()
        }
        indices, columns = list(facts), []
        for rank, actor in enumerate(self.actors if logging.samples_per_step else ()):
            own = indices[rank // sharing :: len(self.actors) // sharing]
            columns.append(
                actor.logprobs.remote(own, *chain.from_iterable(groups[index].payload for index in own))
            )

        async def dump() -> None:
            parts = list(chain.from_iterable(groups[index].payload for index in indices))
            directory = str(self._samples_dir.absolute())
            ref = self.actors[0].dump.remote(directory, batch.step, batch.window, facts, parts, *columns)
            await self._answer(ref, f"the dump of the samples of step {batch.step}")

        return dump

    async def gather(self, version: int) -> tuple[float, ExecutorReport]:
        answers = await self.collective(
            f"the gather of version {version}", "gather", version, sorted(self._wanted)
        )
        return max(seconds for seconds, _ in answers), answers[0][1]

    async def publish(self, version: int) -> ports.Published:
        began_s = time.monotonic()
        ref = self.actors[0].publish.remote(version)
        manifest, bucket_refs = await self._answer(ref, f"the publish of version {version}")
        refs = self._wanted[version] = HeldRefs(bucket_refs)
        publish_s = time.monotonic() - began_s
        return ports.Published(
            version=version, num_bytes=manifest.num_bytes, publish_s=publish_s, handle=(manifest, refs)
        )

    async def snapshot(self, step: int) -> None:
        await self._learners(f"the snapshot of step {step}", "snapshot", step)

    async def write(self, directory: Path, cut: ports.Cut) -> None:
        """Write the snapshot of the cut's step beside training: trainer state, the arrays of `cut.payloads`
        and `cut.kept`, and, within a window, the weights of the last gathered version as they were at the
        snapshot."""
        call, target, cut = (
            (f"the checkpoint of step {cut.step}"),
            str(directory.absolute()),
            replace(cut, loop_state={}),
        )
        limit = self._checkpoints
        writes = [self.collective(call, "write", target, cut, limit=limit)]
        if self.critic is not None:
            own = replace(cut, payloads=(), kept=(), so_far=())
            writes.append(self.critic.collective(call, "write", target, own, limit=limit))
        await all_of(writes)

    async def restore(self, directory: Path) -> None:
        """Load a checkpoint."""
        await self._learners(f"the load of {directory}", "restore", str(directory.absolute()))

    async def _learners(self, call: str, method: str, *args: Any) -> list[Any]:
        """Call everything with state in a checkpoint: the ranks, and a critic in its own processes. Returns
        the ranks' answers."""
        learners = [self] if self.critic is None else [self, self.critic]
        limit = self._checkpoints
        of_ranks, *_ = await all_of(
            learner.collective(call, method, *args, limit=limit) for learner in learners
        )
        return of_ranks

    async def stop(self, timeout_s: float) -> None:
        try:
            async with timeout(timeout_s):
                await self.finish_dumps()
        except TimeoutError:
            logger.warning("the last dump of samples was still being written: it is lost")
        await super().stop(timeout_s)

    async def _answer(self, ref: Any, call: str, rank: int = 0, limit: Limit | None = None) -> Any:
        """By default within `weights.timeout_s`."""
        limit, host = limit or self._weights, self._hosts.get(rank, "")
        return await answer(ref, executor=f"trainer-{rank}", call=call, limit=limit, patient=True, host=host)
