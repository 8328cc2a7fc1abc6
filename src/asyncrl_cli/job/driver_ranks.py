"""The trainer and the scorers as the loop sees them: `Trainer` and `Scorer` of contracts/ports.py on all
processes of each (rank_host.py). Runs in the driver.

Nothing here blocks the driver's event loop, every wait is bounded, and Ray never retries a call: an optimizer
step made twice would be worse than a failed run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, ExecutorLost, timeout
from asyncrl_cli.contracts.environment import reward_parts
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.ports import CALL_KEY, EvalResult, LoopSnapshot
from asyncrl_cli.contracts.prompt_group import GroupResult, TrainBatch, TrainReport
from asyncrl_cli.contracts.weight_version import Published
from asyncrl_cli.data.ray_store import received
from asyncrl_cli.data.store import Store, Stored
from asyncrl_cli.job.rank_host import SampleFacts
from asyncrl_cli.job.ray.calls import Limit, all_of, answer, shown_host, start_limit
from asyncrl_cli.measure.states import ExecutorReport
from asyncrl_cli.measure.values import Last
from asyncrl_cli.plan.job_plan import TRAINER
from asyncrl_cli.profile.arithmetic import CRITIC, REF, REWARD, train_steps_of
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.train.sample_dump import choose_samples, is_dump_step
from asyncrl_cli.train.step_plan import (
    RankPlan,
    needs_columns,
    plan_train_step,
    split_by_tokens,
    training_order,
)
from asyncrl_cli.weights.versions import TIMEOUT_KEY as WEIGHTS_KEY
from asyncrl_cli.weights.versions import joined_version

logger = logging.getLogger(__name__)

ALL_REPORTS_S = 5.0

T = TypeVar("T")
Dump = Callable[[], Coroutine[None, None, None]]
Arguments = list[Any]
Shares = tuple[list[GroupResult], list[RankPlan], list[Arguments]]


class RayRanks:
    """All processes of the trainer or of a scorer as one executor: makes the same calls to each process, in
    the same order, and collects all answers."""

    def __init__(
        self, name: str, make_actors: Callable[[], list[ActorHandle]], profile: Profile, store: Store
    ) -> None:
        """`make_actors()` creates the actors of all processes in their bundles, now and at every restart.
        `store`: the driver's, which knows all groups' data."""
        self.name = name
        self._store = store
        self.actors = make_actors()
        self._make_actors = make_actors
        self._profile = profile
        self._calls = Limit(profile.rollout.call_timeout_s, CALL_KEY)
        self._weights = Limit(profile.weights.timeout_s, WEIGHTS_KEY)
        self._starts = start_limit(profile)
        self._steps = Limit(profile.trainer.step_timeout_s, "trainer.step_timeout_s")
        self._checkpoints = Limit(profile.checkpoint.timeout_s, "checkpoint.timeout_s")
        self._hosts: dict[int, str] = {}
        self.warnings: list[str] = []
        """Of the last start, for the user."""
        self._shares_prefixes = False

    async def prepare(self) -> list[str]:
        """Wait until every process exists and has imported what it needs; none uses its device yet. Returns
        their nodes."""
        return await self.collective("its imports", "prepare", limit=self._starts)

    async def start(self) -> None:
        self._hosts = {}
        nodes = await self.prepare()
        meeting = self.actors[0].meeting_point.remote()
        init_method = await self._answer(meeting, "its start", self._starts)
        answers = await self.collective("its start", "start", init_method, nodes, limit=self._starts)
        self.warnings = list(dict.fromkeys(chain.from_iterable(answers)))
        if self.name in (TRAINER, CRITIC):
            shares = await self.collective("its start", "shares_prefixes", limit=self._starts)
            self._shares_prefixes = all(shares)
        self._hosts = {rank: shown_host(node) for rank, node in enumerate(nodes)}

    async def report(self) -> ExecutorReport:
        return await self._answer(self.actors[0].report.remote(), "a report", self._calls)

    async def stop(self, timeout_s: float) -> None:
        await self.collective("its shutdown", "stop", limit=Limit(timeout_s))

    async def collective(self, call: str, method: str, *args: object, limit: Limit) -> list[Any]:
        """Call `method` on all processes and return their answers. `call`: its name in errors."""
        refs = [getattr(actor, method).remote(*args) for actor in self.actors]
        return await self._answers(refs, call, limit)

    async def checkpointed(self, call: str, method: str, *args: object) -> None:
        """A call of a checkpoint, to all processes."""
        await self.collective(call, method, *args, limit=self._checkpoints)

    async def train_share(
        self, batch: TrainBatch, shares: Shares, call: str, dumped: Sequence[int] = ()
    ) -> list[tuple[TrainReport, ExecutorReport]]:
        """Make a train step. Every process gets its own share. `dumped`: groups whose samples are dumped."""
        calls, step = zip(self.actors, shares[2], strict=True), (batch.step, batch.step_in_window, dumped)
        refs = [actor.train.remote(*step, *share) for actor, share in calls]
        return await self._answers(refs, call, self._steps)

    def shares(self, batch: TrainBatch, names: Sequence[str], profile: Profile) -> Shares:
        """Split a train step over ranks and mini-batches, by metadata. Returns the batch's groups in training
        order, each process's plan, and the arguments of its call: the plan, `names`, the scorers whose
        columns it needs, and what it takes to get the data of the plan's groups."""
        minibatches, seed = profile.async_training.require_batches, profile.run.seed
        groups = training_order(batch.groups, num_minibatches=minibatches, seed=seed, step=batch.step)
        plans = plan_train_step(
            groups,
            profile,
            ranks=len(self.actors),
            step=batch.step,
            window=batch.window,
            shares_prefixes=self._shares_prefixes,
        )
        given: list[Arguments] = []
        for plan in plans:
            given.append([plan, names, [self._keys(groups[index]) for index in plan.groups]])
        return groups, plans, given

    def _keys(self, group: GroupResult) -> list[Stored]:
        return self._store.stored(group.payload or ())

    async def _answers(self, refs: Sequence[Awaitable[T]], call: str, limit: Limit) -> list[T]:
        return await all_of(self._answer(ref, call, limit, rank) for rank, ref in enumerate(refs))

    async def _answer(self, ref: Awaitable[T], call: str, limit: Limit, rank: int = 0) -> T:
        """Await the answer of a process. Errors name the trainer's rank, but the whole scorer, which is
        restarted as a whole. (When a process is lost, the others' collectives fail, and their error may come
        first.)"""
        host = self._hosts.get(rank, "")
        if self.name == TRAINER:
            executor = f"{TRAINER}-{rank}"
            return await answer(ref, executor=executor, call=call, limit=limit, patient=True, host=host)
        try:
            process = f"{call} (process {rank})"
            return await answer(ref, executor=self.name, call=process, limit=limit, host=host)
        except ExecutorLost:
            raise
        except ExecutorFailed as error:
            raise ExecutorLost(error.cause, hint=error.hint, executor=self.name) from error


class RayScorer(RayRanks):
    """`Scorer` on all its processes. Columns go to the store. (Only rewards come to the driver.)"""

    def __init__(
        self, name: str, make_actors: Callable[[], list[ActorHandle]], profile: Profile, store: Store
    ) -> None:
        super().__init__(name, make_actors, profile, store)
        self.call_tokens = len(self.actors) * profile.trainer.max_tokens_per_microbatch
        self._num_judged = 0

    async def load(self, published: Published) -> None:
        manifest, bucket_refs = published.handle
        call = f"the load of version {published.version}"
        await self.collective(call, "load", manifest, list(bucket_refs), limit=self._weights)

    async def score(
        self, groups: Sequence[GroupResult], items: Sequence[Item]
    ) -> tuple[Sequence[tuple[float, ...]], ExecutorReport]:
        """Divide the groups between the processes by their number of tokens, and score them. Groups may be
        given up meanwhile: their data stays until all processes have answered."""
        lengths = [sum(t.prompt_tokens + t.response_tokens for t in g.trajectories) for g in groups]
        shares = split_by_tokens(lengths, len(self.actors))
        num_tokens = sum(group.response_tokens for group in groups)
        is_reward, heads, refs = self.name == REWARD, list[ObjectRef](), list[Sequence[ObjectRef]]()
        reads_items = is_reward or self.name in self._profile.task.scorers
        with self._store.pinned([key for group in groups for key in group.payload or ()]):
            for actor, share in zip(self.actors, shares, strict=True):
                prompts = [items[index] for index in share] if reads_items else []
                keys = [self._keys(groups[index]) for index in share]
                most = 0 if is_reward else sum(map(len, keys))
                made = actor.score.options(num_returns=1 + most).remote(num_tokens, prompts, keys, most)
                head, *objects = made if most else [made]
                heads.append(head)
                refs.append(objects)
            call = f"the scores of {len(groups)} groups"
            answers = await self._answers(heads, call, self._calls)
        scores: list[tuple[float, ...]] = [()] * len(groups)
        for share, (_, made), objects in zip(shares, answers, refs, strict=True):
            if is_reward:
                for index, found in zip(share, made, strict=True):
                    scores[index] = found
            else:
                for one in received(made, objects):
                    self._store.hold_added(one)
        return scores, answers[0][0]

    async def judge(self, result: EvalResult, items: Sequence[Item]) -> Sequence[float]:
        """An eval's calls go to the processes in turn."""
        assert result.payload is not None, "a reward model was expected to score the eval"
        self._num_judged += 1
        index = self._num_judged % len(self.actors)
        call = f"the scores of {len(items)} trajectories of an eval"
        with self._store.pinned([result.payload]) as (key,):
            scores = self.actors[index].judge.remote(items, key)
            return await self._answer(scores, call, self._calls, index)

    async def learn(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        """`critic`: make the same optimizer steps as the trainer, each with the same groups. A `score` that
        is called later uses the updated weights."""
        names = (CRITIC, REF) if self._profile.algorithm.use_kl_in_reward else (CRITIC,)
        # its processes do not share sequences, whatever the trainer's do
        trainer = self._profile.trainer.model_copy(update={"sequence_parallel_size": 1})
        shares = self.shares(batch, names, self._profile.model_copy(update={"trainer": trainer}))
        return (await self.train_share(batch, shares, f"what it learns in step {batch.step}"))[0]

    async def restart(self) -> None:
        """Kill all actors, dead or alive, and start new ones, which get their bundles once the old actors are
        gone."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = self._make_actors()
        await self.start()


async def _all_dumps(dumps: Sequence[Dump], pinned: ExitStack) -> None:
    """Dump one by one, also after one that fails, and raise the first failure."""
    failures = list[AsyncrlError]()
    with pinned:
        for dump in dumps:
            try:
                await dump()
            except AsyncrlError as error:
                failures.append(error)
    if failures:
        raise failures[0]


def _joined(reports: Sequence[ExecutorReport]) -> ExecutorReport:
    """The first rank's report on the trainer, with the machines of all ranks."""
    return replace(reports[0], machines=tuple(chain.from_iterable(one.machines for one in reports)))


class HeldRefs(list[ObjectRef]):
    """A version's refs in the driver. While this list lives a worker may want the version, and the next
    gather keeps it."""


class RayTrainer(RayRanks):
    """`Trainer` on all its ranks.

    Samples are dumped beside training, one step at a time: each dump first awaits the previous one, so that
    no failure goes unseen. A failed dump loses its samples, not the step: `warn` is called for the first
    failure, and all failures are counted. `expected`: the reference answer of a prompt's uid, for the
    samples.

    `critic`: the critic in its own processes, if there is one. Its state is part of the checkpoints.
    """

    def __init__(
        self,
        make_actors: Callable[[], list[ActorHandle]],
        profile: Profile,
        store: Store,
        *,
        samples_dir: Path,
        critic: RayScorer | None = None,
        warn: Callable[[str], None] = logger.warning,
        expected: Callable[[str], str | None] = lambda uid: None,
    ) -> None:
        super().__init__(TRAINER, make_actors, profile, store)
        self._critic = critic
        self._warn = warn
        self._expected = expected
        self._samples_dir = samples_dir
        self.failed_dumps = 0
        self._dumping: tuple[int, asyncio.Task[None]] | None = None
        self._wanted: WeakValueDictionary[int, HeldRefs] = WeakValueDictionary()
        self._asks_all_s = float("-inf")
        """From when on a report asks all ranks."""

    async def train(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        """Each rank gets the data of its own groups."""
        shares = self.shares(batch, batch.columns, self._profile)
        logging = self._profile.logging
        is_dumped = is_dump_step(batch.step, logging.samples_every_steps, train_steps_of(self._profile))
        known = self._advantages(shares[1])
        with ExitStack() as pinned:  # the loop clears the groups as soon as they are trained
            # called before the ranks train: the samples are scored by the weights that they are trained from
            given = batch, shares[0], known, pinned
            dumped, dump = self.chosen_samples(*given) if is_dumped else ([], None)
            dumps = [] if dump is None else [dump]
            if logging.samples == "all":
                dumps.append(self.recorded(*given))
            answers = await self.train_share(batch, shares, f"train step {batch.step}", dumped)
            reports = [report for report, _ in answers]
            if dumps:
                await self.begin_dump(batch.step, lambda: _all_dumps(dumps, pinned.pop_all()))
        failed_dumps = {"samples/failed_dumps": Last(self.failed_dumps)} if self.failed_dumps else {}
        slowest_s = max(report.train_s for report in reports)
        column_s = {name: max(report.column_s[name] for report in reports) for name in reports[0].column_s}
        metrics = {**reports[0].metrics, **failed_dumps}
        return replace(reports[0], train_s=slowest_s, column_s=column_s, metrics=metrics), _joined(
            [one for _, one in answers]
        )

    async def report(self) -> ExecutorReport:
        """The first rank's. The machines of the others are in it every few seconds, and in the answers of
        `train` and `gather`: each second, hundreds of ranks would be hundreds of calls."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._asks_all_s:
            return await super().report()
        self._asks_all_s = now_s + ALL_REPORTS_S
        return _joined(await self.collective("a report", "report", limit=self._calls))

    # --- samples

    async def begin_dump(self, step: int, dump: Dump) -> None:
        """Start `dump()` once the previous dump has ended. `dump` must have a time limit of its own."""
        await self.finish_dumps()
        self._dumping = step, asyncio.create_task(dump(), name=f"samples of step {step}")
        # It asks the ranks for what the loss has written, before the next train step replaces that.
        await asyncio.sleep(0)

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
                lost = f"the samples of step {step} are lost, training goes on: {error}"
                self._warn(f"{lost} (further failures are only counted)")

    def _advantages(self, plans: Sequence[RankPlan]) -> dict[tuple[int, int], float]:
        """Of each trajectory of the step's groups; none if other things add to them for each token."""
        algorithm = self._profile.algorithm
        adds_teacher = bool(self._profile.teacher.paths and algorithm.distill_coef)
        if needs_columns(algorithm) or (adds_teacher and algorithm.distill_loss == "sampled"):
            return {}
        planned = (t for plan in plans for step in plan.optimizer_steps for t in step.trajectories)
        return {(t.group, t.trajectory): t.advantage for t in planned}

    def recorded(
        self,
        batch: TrainBatch,
        groups: Sequence[GroupResult],
        advantages: Mapping[tuple[int, int], float],
        pinned: ExitStack,
    ) -> Dump:
        """A function that records all trajectories of the step, to be called after it: rank 0 writes them
        beside training, for `weights.timeout_s` at most. `groups`: in training order. `pinned`: holds the
        data until the dumps have ended."""
        places = {group.key: index for index, group in enumerate(groups)}
        rows = [
            [advantages.get((places[group.key], number)) for number in range(len(group.trajectories))]
            for group in batch.groups
        ]
        pinned.enter_context(self._store.pinned([key for one in groups for key in one.payload or ()]))
        keys = [self._keys(group) for group in batch.groups]
        bare = replace(batch, groups=tuple(replace(group, payload=None) for group in batch.groups))

        async def record() -> None:
            given = str(self._samples_dir.absolute()), bare, rows, keys
            ref = self.actors[0].record.remote(*given)
            await self._answer(ref, f"the arrays of step {batch.step}", self._weights)

        return record

    def chosen_samples(
        self,
        batch: TrainBatch,
        groups: Sequence[GroupResult],
        advantages: Mapping[tuple[int, int], float],
        pinned: ExitStack,
    ) -> tuple[list[int], Dump]:
        """Choose samples of the step, and have the ranks score them before they train it. Returns their
        groups, and a function that dumps them, to be called after the train step: rank 0 writes them beside
        training, for `weights.timeout_s` at most."""
        logging, sharing = self._profile.logging, self._profile.trainer.sequence_parallel_size
        seed = f"samples {self._profile.run.seed}/{batch.step}"
        sizes = choose_samples([len(group.trajectories) for group in groups], logging.samples_per_step, seed)
        facts: dict[int, SampleFacts] = {
            index: {
                "advantages": [advantages.get((index, number)) for number in range(size)],
                "rewards": [meta.reward for meta in groups[index].trajectories],
                "parts": [reward_parts(meta.facts) for meta in groups[index].trajectories],
                "answer": self._expected(groups[index].key.uid),
            }
            for index, size in sizes.items()
        }
        indices, columns = list(facts), list[ObjectRef]()
        keys = {index: groups[index].payload or () for index in indices}
        for rank, actor in enumerate(self.actors if logging.samples_per_step else ()):
            # ranks that share sequences score the same groups
            scored = indices[rank // sharing :: len(self.actors) // sharing]
            columns.append(actor.logprobs.remote(scored, [self._keys(groups[index]) for index in scored]))
        pinned.enter_context(self._store.pinned([*chain.from_iterable(keys.values())]))

        async def dump() -> None:
            parts = [self._store.stored(one) for one in keys.values()]
            loss_fields = [actor.loss_fields.remote() for actor in self.actors]
            given = str(self._samples_dir.absolute()), batch.step, batch.window, facts, parts, loss_fields
            ref = self.actors[0].dump.remote(*given, *columns)
            await self._answer(ref, f"the dump of the samples of step {batch.step}", self._weights)

        return indices, dump

    # --- versions of the weights

    async def gather(self, version: int) -> tuple[float, ExecutorReport]:
        call = f"the gather of version {version}"
        answers = await self.collective(call, "gather", version, sorted(self._wanted), limit=self._weights)
        return max(seconds for seconds, _ in answers), _joined([report for _, report in answers])

    async def publish(self, version: int) -> Published:
        began_s = time.monotonic()
        call = f"the publish of version {version}"
        sent = await self.collective(call, "publish", version, limit=self._weights)
        manifest, bucket_refs = joined_version(sent)
        refs = self._wanted[version] = HeldRefs(bucket_refs)
        return Published(
            version=version,
            num_bytes=manifest.num_bytes,
            publish_s=time.monotonic() - began_s,
            handle=(manifest, refs),
            fingerprint=manifest.fingerprint,
        )

    # --- checkpoints, of which a critic in its own processes writes its part

    async def snapshot(self, step: int) -> None:
        learners = [self] if self._critic is None else [self, self._critic]
        await all_of(one.checkpointed(f"the snapshot of step {step}", "snapshot", step) for one in learners)

    async def restore(self, directory: Path) -> None:
        learners = [self] if self._critic is None else [self, self._critic]
        call, path = f"the load of {directory}", str(directory.absolute())
        await all_of(one.checkpointed(call, "restore", path) for one in learners)

    async def write(self, directory: Path, snapshot: LoopSnapshot) -> None:
        """Write, beside training, the trainer's snapshot of the same step, the data of the loop's groups
        (which the loop pins until this ends), and, within a window, the weights of the last gathered version
        as they were then."""
        call, path = f"the checkpoint of step {snapshot.step}", str(directory.absolute())
        whole = [self._store.stored(keys) for keys in snapshot.payloads]
        partial = self._store.stored(snapshot.partial_tokens)
        snapshot = replace(snapshot, loop_state={}, payloads=())
        writes = [self.checkpointed(call, "write", path, snapshot, whole, partial)]
        if self._critic is not None:
            writes.append(self._critic.checkpointed(call, "write", path, snapshot, [], []))
        await all_of(writes)

    async def stop(self, timeout_s: float) -> None:
        try:
            async with timeout(timeout_s):
                await self.finish_dumps()
        except TimeoutError:
            logger.warning("the last dump of samples was still being written: it is lost")
        await super().stop(timeout_s)
