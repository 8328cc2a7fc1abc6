"""Implements the loop's ports on Ray actors: `RayRolloutWorker` and `RayTrainer`.

Nothing here blocks the driver's event loop, every wait is bounded, and Ray never retries a call: an optimizer step made
twice would be worse than a failed run.
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

from asyncrl_cli.errors import AsyncrlError, ExecutorLost
from asyncrl_cli.job.calls import Limit, RayRankZero, all_of, answer
from asyncrl_cli.job.exchange import PartExchange
from asyncrl_cli.job.transports import HeldRefs
from asyncrl_cli.loop import ports
from asyncrl_cli.loop.attempts import AttemptKey, GroupResult
from asyncrl_cli.loop.states import ExecutorReport
from asyncrl_cli.loop.values import Last
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Interrupt, Profile
from asyncrl_cli.samples import choose_samples, is_dump_step
from asyncrl_cli.train.advantages import needs_columns
from asyncrl_cli.train.balance import RankPlan, plan_train_step, training_order
from asyncrl_cli.weights.versions import DRIVER_MARGIN_S, load_s
from asyncrl_cli.weights.versions import TIMEOUT_KEY as WEIGHTS_KEY

logger = logging.getLogger(__name__)

CALL_KEY = "rollout.call_timeout_s"
START_LIMIT = Limit(600.0)
"""Covers imports, loading a large model from a slow disk, and an engine's memory profiling."""


class RayRolloutWorker:
    """`loop.ports.RolloutWorker` on a `RolloutActor`. Parts travel with `progress` (exchange.py)."""

    def __init__(self, name: str, make_actor: Callable[[], Any], profile: Profile, workers: int = 1) -> None:
        """`make_actor()` makes the worker's actor in its bundle, now and at every restart. `workers`: how many the job has."""
        weights_s, is_direct = profile.weights.timeout_s, profile.weights.transport in DIRECT_TRANSPORTS
        self.name = name
        self.slots = profile.rollout.slots
        self.actor = make_actor()
        self._make_actor = make_actor
        self._calls = Limit(profile.rollout.call_timeout_s, CALL_KEY)
        self._weights = Limit(weights_s, WEIGHTS_KEY)
        self._load = Limit(load_s(weights_s, workers), WEIGHTS_KEY, weights_s) if is_direct else self._weights
        self._num_workers = workers
        self._rank_zero: RayRankZero | None = None
        self._parts = PartExchange(self.actor, self._answer)

    def submit(self, request: ports.PartRequest) -> None:
        self._parts.submit(request)

    async def abort(self, key: AttemptKey) -> None:
        self._parts.post()
        await self._answer(self.actor.abort.remote(key), f"the abort of {key}")

    async def progress(self, seen: int) -> ports.Progress:
        return await self._parts.progress(seen)

    async def prefetch(self, published: ports.Published) -> float:
        manifest, bucket_refs = published.handle
        ref = self.actor.prefetch.remote(manifest, list(bucket_refs))
        return float(await self._answer(ref, f"the transfer of version {published.version}", self._weights))

    async def load(self, version: int, interrupt: Interrupt) -> ports.LoadReport:
        """A drain may take as long as the longest response, so its limit counts from when a response was last seen to run. Where
        rank 0 sends the bytes during the load, the worker's own limits on waiting for rank 0 are shorter than this one."""
        what, ref = f"the load of version {version} ({interrupt})", self.actor.load.remote(version, interrupt)
        since = partial(self._parts.ran_before_s, version) if interrupt == "drain" else None
        return await self._answer(ref, what, self._load, since)

    async def evaluate(self, request: ports.EvalRequest) -> ports.EvalResult:
        return await self._answer(self.actor.evaluate.remote(request), f"the eval of version {request.version}", Limit(None))

    async def abort_evals(self) -> None:
        await self._answer(self.actor.abort_evals.remote(), "the abort of its evals")

    async def pause(self) -> None:
        await self._answer(self.actor.pause.remote(), "a pause")

    async def resume(self) -> None:
        await self._answer(self.actor.resume.remote(), "a resume")

    async def restart(self) -> None:
        """Kill the actor, dead or alive, and start another, which gets its bundle once the old actor is gone.

        The engine's processes and the reward process end with the actor that started them. Arrays of ended parts stay: the
        driver owns their references, and the node's object store has the bytes.
        """
        ray.kill(self.actor)
        if self._rank_zero is not None:
            await self._rank_zero.leave()
        self.actor = self._make_actor()
        self._parts = PartExchange(self.actor, self._answer)
        await self.start()
        if self._rank_zero is not None:
            await self.connect(self._rank_zero.actor)

    async def start(self) -> None:
        await self._answer(self.actor.start.remote(), "its start", START_LIMIT)

    async def connect(self, trainer_actor: Any) -> None:
        """`nccl`, `ipc`: this worker asks the trainer's first actor for its weights, now and after every restart."""
        own_s = self._weights.seconds
        self._rank_zero = RayRankZero(trainer_actor, self.name, own_s, self._num_workers)
        limit = Limit(own_s + DRIVER_MARGIN_S, WEIGHTS_KEY, own_s)
        await self._answer(self.actor.connect.remote(self._rank_zero), "its meeting with trainer-0", limit)

    async def stop(self, timeout_s: float) -> None:
        await self._answer(self.actor.stop.remote(), "its end", Limit(timeout_s))

    async def _answer(self, ref: Any, call: str, limit: Limit | None = None, since: Callable[[], float] | None = None) -> Any:
        """By default within `rollout.call_timeout_s`."""
        try:
            return await answer(ref, executor=self.name, call=call, limit=limit or self._calls, since=since)
        except ExecutorLost:
            if self._rank_zero is not None:  # at once: else rank 0's GPU stays busy with sending to the lost worker until a timeout
                self._rank_zero.actor.leave.remote(self.name)
            raise


class RayTrainer:
    """`loop.ports.Trainer` on all `TrainerActor` ranks. Collective calls go to every rank, in the same order.

    Samples are dumped beside training, one step at a time: the next dump first awaits the last, so that no failure goes unseen. A
    failed dump loses its samples, not the step: `warn` is called for the first failure, and all failures are counted.
    """

    name = "trainer"

    def __init__(self, actors: Sequence[Any], profile: Profile, *, samples_dir: Path) -> None:
        self.actors = list(actors)
        self.warn: Callable[[str], None] = logger.warning
        self.failed_dumps = 0
        self._dumping: tuple[int, asyncio.Task[None]] | None = None
        self._profile = profile
        self._samples_dir = samples_dir
        self._calls = Limit(profile.rollout.call_timeout_s, CALL_KEY)
        self._weights = Limit(profile.weights.timeout_s, WEIGHTS_KEY)
        self._wanted: WeakValueDictionary[int, HeldRefs] = WeakValueDictionary()

    async def train(self, batch: ports.TrainBatch) -> tuple[ports.TrainReport, ExecutorReport]:
        """Split the step over ranks and mini-batches by metadata; Ray brings each rank the parts and columns of its own groups."""
        minibatches = self._profile.async_training.require_batches
        call = f"train step {batch.step}"
        groups = training_order(batch.groups, num_minibatches=minibatches, seed=self._profile.run.seed, step=batch.step)
        plans = plan_train_step(groups, self._profile, ranks=len(self.actors), window=batch.window)
        is_dumped = is_dump_step(batch.step, self._profile.logging.samples_every_steps)
        dump = self._sampled(batch, groups, plans) if is_dumped else None
        names = tuple(next(iter(batch.columns.values()), {}))
        refs = []
        for actor, plan in zip(self.actors, plans, strict=True):
            own = [groups[index] for index in plan.groups]
            columns = [batch.columns[group.key][name] for name in names for group in own]
            parts = chain.from_iterable(group.payload for group in own)
            refs.append(actor.train.remote(batch.step, batch.step_in_window, plan, names, *columns, *parts))
        answers = await all_of(self._answer(ref, call, self._calls, rank) for rank, ref in enumerate(refs))
        reports = [report for report, _ in answers]
        if dump is not None:
            await self.begin_dump(batch.step, dump)
        failed_dumps = {"samples/failed_dumps": Last(self.failed_dumps)} if self.failed_dumps else {}
        slowest_s = max(report.train_s for report in reports)
        old_logprob_s = max(report.old_logprob_s for report in reports)
        column_s = {name: max(report.column_s[name] for report in reports) for name in reports[0].column_s}
        metrics = {**reports[0].metrics, **failed_dumps}
        slowest = replace(reports[0], train_s=slowest_s, old_logprob_s=old_logprob_s, column_s=column_s, metrics=metrics)
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
                self.warn(f"the samples of step {step} are lost, training goes on: {error} (later ones are only counted)")

    def _sampled(
        self, batch: ports.TrainBatch, groups: Sequence[GroupResult], plans: Sequence[RankPlan]
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Choose samples of the step, and have the ranks score them before they train it. Returns what dumps them, to be called
        when it is trained: rank 0 writes them beside training, for `weights.timeout_s` at most."""
        logging, ranks = self._profile.logging, len(self.actors)
        seed = f"samples {self._profile.run.seed}/{batch.step}"
        sizes = choose_samples([len(group.trajectories) for group in groups], logging.samples_per_step, seed)
        planned = (t for plan in plans for step in plan.optimizer_steps for t in step.trajectories)
        is_planned = not needs_columns(self._profile.algorithm)
        known = {(t.group, t.trajectory): t.advantage for t in planned if is_planned}
        chosen = {index: [known.get((index, number)) for number in range(size)] for index, size in sizes.items()}
        indices, columns = list(chosen), []
        for rank, actor in enumerate(self.actors if logging.samples_per_step else ()):
            own = indices[rank::ranks]
            columns.append(actor.logprobs.remote(own, *chain.from_iterable(groups[index].payload for index in own)))

        async def dump() -> None:
            parts = list(chain.from_iterable(groups[index].payload for index in indices))
            directory = str(self._samples_dir.absolute())
            ref = self.actors[0].dump.remote(directory, batch.step, batch.window, chosen, parts, *columns)
            await self._answer(ref, f"the dump of the samples of step {batch.step}")

        return dump

    async def gather(self, version: int) -> tuple[float, ExecutorReport]:
        answers = await self._collective(f"the gather of version {version}", "gather", version, sorted(self._wanted))
        return max(seconds for seconds, _ in answers), answers[0][1]

    async def publish(self, version: int) -> ports.Published:
        began_s = time.monotonic()
        ref = self.actors[0].publish.remote(version)
        manifest, bucket_refs = await self._answer(ref, f"the publish of version {version}")
        refs = self._wanted[version] = HeldRefs(bucket_refs)
        publish_s = time.monotonic() - began_s
        return ports.Published(version=version, num_bytes=manifest.num_bytes, publish_s=publish_s, handle=(manifest, refs))

    async def snapshot(self, step: int) -> float:
        return float(max(await self._collective(f"the snapshot of step {step}", "snapshot", step)))

    async def write(self, step: int, directory: Path, payloads: Sequence[Any], with_published: bool) -> None:
        call, parts = f"the checkpoint of step {step}", list(chain.from_iterable(payloads))
        await self._collective(call, "write", step, str(directory.absolute()), parts, with_published)

    async def report(self) -> ExecutorReport:
        return await self._answer(self.actors[0].report.remote(), "a report", self._calls)

    async def start(self) -> None:
        init_method = await self._answer(self.actors[0].meeting_point.remote(), "its start", START_LIMIT)
        await self._collective("its start", "start", init_method, limit=START_LIMIT)

    async def load(self, directory: Path) -> None:
        """Restore a checkpoint."""
        await self._collective(f"the load of {directory}", "load", str(directory.absolute()))

    async def stop(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.finish_dumps()
        except TimeoutError:
            logger.warning("the last dump of samples was still being written: it is lost")
        await self._collective("its end", "stop", limit=Limit(timeout_s))

    async def _collective(self, call: str, method: str, *args: Any, limit: Limit | None = None) -> list[Any]:
        refs = [getattr(actor, method).remote(*args) for actor in self.actors]
        return await all_of(self._answer(ref, call, limit, rank) for rank, ref in enumerate(refs))

    async def _answer(self, ref: Any, call: str, limit: Limit | None = None, rank: int = 0) -> Any:
        """By default within `weights.timeout_s`."""
        return await answer(ref, executor=f"trainer-{rank}", call=call, limit=limit or self._weights, patient=True)
