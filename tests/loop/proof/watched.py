"""Ports that tell `Invariants` of every call, and hold executors to their contract: what `contracts.ports`
promises, in code."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.contracts.ports import (
    EvalRequest,
    EvalResult,
    Feed,
    PartialResult,
    RolloutWorker,
    Scorer,
    Trainer,
    WorkerUpdate,
)
from asyncrl_cli.contracts.prompt_group import (
    AttemptKey,
    DataKey,
    GroupResult,
    PartRequest,
    Prompt,
    TrainBatch,
    TrainReport,
    TrajectoryFailure,
)
from asyncrl_cli.contracts.weight_version import LoadReport, Published
from asyncrl_cli.measure.states import ExecutorReport
from asyncrl_cli.profile.schema import Interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.loop.proof.invariants import Invariants


class WatchedWorker:
    """Implements `contracts.ports.RolloutWorker` around another one. `load_limit_s` bounds a load, its drain
    included."""

    def __init__(
        self, worker: RolloutWorker, invariants: Invariants, on_the_way: Counter[int], load_limit_s: float
    ) -> None:
        """`on_the_way` counts the prefetches and loads in flight per version; all workers share one."""
        self.name = worker.name
        self.slots = worker.slots
        self._worker = worker
        self._invariants = invariants
        self._book = invariants.books.workers[worker.name]
        self._travel = invariants.books.travel
        self._on_the_way = on_the_way
        self._load_limit_s = load_limit_s
        self._prefetched = -1

    def submit(self, request: PartRequest) -> None:
        check = self._invariants.check
        check(not self._book.paused, "colocate", f"{request.key} starts while {self.name} is paused")
        check(not self._book.down, "restarts", f"{request.key} starts on {self.name}, which is down")
        self._invariants.ledger.submitted(self.name, request)
        if request.partial:
            is_known = request.partial.keys() == request.partial_tokens.keys()
            check(is_known, "data", f"{request.key} goes on without the tokens of all its responses")
            self._invariants.data.read(request.partial_tokens.values(), f"{request.key}, which goes on,")
        self._worker.submit(request)

    async def partial_responses(self) -> PartialResult:
        try:
            found = await self._worker.partial_responses()
        except AsyncrlError:
            self._book.so_far = PartialResult(rest_tokens=self._book.running_tokens)
            raise
        self._book.so_far = found
        self._invariants.data.reported(found.keys)
        self._invariants.counts["kept responses"] += sum(map(len, found.responses.values()))
        return found

    async def abort(self, key: AttemptKey) -> None:
        self._invariants.note(f"abort {key} on {self.name}")
        await self._worker.abort(key)

    async def next_update(self, seen: int) -> WorkerUpdate:
        update = await self._worker.next_update(seen)
        for report in update.reports:
            self._invariants.times.check_report(report)
            self._book.running_tokens = int(report.gauges["running_tokens"])
        unfinished, live = self._book.unfinished, self._invariants.books.live
        for key, before in unfinished.items():
            now = live[key.attempt].parts[key.number].num_responses - update.freed_slots.get(key, 0)
            is_over = any(result.key == key for result in update.ended)
            may_rise = is_over or not self._invariants.settings.profile.rollout.hold_slots
            may_rise |= self._book.down  # a lent worker has stopped its parts, and is about to say so
            holds = now <= before or may_rise
            self._invariants.check(holds, "slots", f"{key} takes {now} slots after {before}")
            unfinished[key] = 0 if is_over else now
        self._invariants.data.reported(result.payload for result in update.ended)
        for result in update.ended:
            self._invariants.counts["turns"] += sum(meta.num_turns for meta in result.trajectories)
            self._invariants.counts.update(f"failed: {failure.kind}" for failure in result.failures)
            self._invariants.ledger.part_ended(self.name, result)
        return update

    async def prefetch(self, published: Published) -> float:
        version, held, check = published.version, self._book.version, self._invariants.check
        self._invariants.note(f"{self.name} prefetches version {version}")
        if self._book.is_lent:
            check(self._book.has_device, "lending", f"{self.name} prefetches without a device")
            is_newest = version == self._invariants.books.version
            check(is_newest, "lending", f"{self.name} wakes with version {version}")
            self._book.sleep(False)
        check(version > held, "loads", f"{self.name} holds {held} and prefetches {version}")
        self._on_the_way[version] += 1
        versions = sorted(+self._on_the_way)
        check(len(versions) <= 2, "loads", f"versions {versions} are on their way at once")
        if not self._book.loading:
            self._travel.set_out(self.name, self._book.unfinished)
        with self._sent_or_lost(version):
            send_s = await self._worker.prefetch(published)
        self._travel.arrived(self.name, self._book.unfinished)
        self._prefetched = version
        self._book.loading = True
        return send_s

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        check, loop = self._invariants.check, asyncio.get_running_loop()
        self._invariants.note(f"{self.name} loads version {version} ({interrupt})")
        is_here, held = version == self._prefetched, self._book.version
        check(is_here, "loads", f"{self.name} loads {version} and has prefetched {self._prefetched}")
        check(self._book.eval_sequences == 0, "evals", f"{self.name} loads {version} during an eval")
        began_s, limit_s = loop.time(), self._load_limit_s
        with self._sent_or_lost(version):
            report = await self._worker.load(version, interrupt)
        took_s = loop.time() - began_s
        check(took_s <= limit_s, "drain", f"{self.name} took {took_s} s to load, more than {limit_s} s")
        is_newer = report.version == version > held
        check(is_newer, "loads", f"{self.name} held {held}, loaded {report.version}")
        self._book.version, self._book.loading = version, False
        self._on_the_way[version] -= 1
        return report

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        check, held = self._invariants.check, self._book.version
        check(not self._book.is_lent, "lending", f"{self.name} scores an eval")
        holds = (held == request.version and not self._book.loading) or self._book.down
        check(holds, "evals", f"{self.name} holds {held} and scores {request.version}")
        num_tries = len(request.tries)
        self._book.eval_sequences += num_tries
        try:
            result = await self._worker.evaluate(request)
        finally:
            self._book.eval_sequences -= num_tries
        self._invariants.data.reported([result.payload])
        num_answers = len(result.outcomes)
        check(num_answers == num_tries, "evals", f"{num_answers} answers to {num_tries} tries")
        return result

    async def abort_evals(self) -> None:
        await self._worker.abort_evals()

    async def pause(self) -> PartialResult:
        if self._book.is_lent:
            return await self._hand_back()
        left = {key: count for key, count in self._book.unfinished.items() if count}
        self._invariants.check(not left, "colocate", f"{self.name} is paused with sequences running: {left}")
        self._invariants.is_lent = True
        found = await self._worker.pause()
        self._book.paused = True
        return found

    async def _hand_back(self) -> PartialResult:
        check = self._invariants.check
        self._invariants.note(f"{self.name} hands back its device")
        check(self._book.has_device, "lending", f"{self.name} hands back what it has not")
        self._book.sleep(True)
        found = await self._worker.pause()
        running = self._worker.engine.running
        check(not running, "lending", f"{running} sequences run on {self.name}, which is asleep")
        self._prefetched, self._book.running_tokens = -1, 0
        self._book.paused, self._book.has_device = True, False
        self._invariants.data.reported(found.keys)
        kept = sum(map(len, found.responses.values()))
        self._invariants.counts.update({"recalls": 1, "recalled parts": len(found.stopped), "recalled": kept})
        self._invariants.ledger.recalled(self.name, found)
        return found

    async def resume(self) -> None:
        if self._book.is_lent:
            doing = self._invariants.trainer_does
            self._invariants.note(f"{self.name} wakes")
            self._invariants.check(not doing, "lending", f"{self.name} wakes during {doing}")
            self._book.has_device = True
        await self._worker.resume()
        self._book.paused = False

    async def end(self) -> None:
        self._invariants.note(f"{self.name} is ended")
        self._invariants.check(self._book.is_lent, "lending", f"{self.name} is ended")
        await self._worker.end()
        self._book.has_device = False

    async def node_is_gone(self) -> bool:
        return await self._worker.node_is_gone()

    async def restart(self) -> None:
        check, book = self._invariants.check, self._book
        self._invariants.note(f"{self.name} is restarted")
        check(not book.is_lent, "lending", f"{self.name} is restarted")
        check(book.down, "restarts", f"{self.name} is restarted, and has not failed")
        check(not book.unfinished, "restarts", f"{self.name} is restarted with {list(book.unfinished)} on it")
        is_lent = self._invariants.is_lent
        check(not is_lent, "restarts", f"{self.name} is restarted while the trainer has the resources")
        self._prefetched, self._book.paused = -1, False
        self._invariants.times.restarted(self.name)
        await self._worker.restart()

    @contextmanager
    def _sent_or_lost(self, version: int) -> Iterator[None]:
        """A version that is lost on its way, or with its worker, is on its way no more."""
        try:
            yield
        except BaseException:
            self._on_the_way[version] -= 1
            raise


class WatchedScorer:
    """Implements `contracts.ports.Scorer` around another one: it gets the groups that can be taken next, one
    call at a time."""

    def __init__(self, scorer: Scorer, invariants: Invariants) -> None:
        self.name = scorer.name
        self.call_tokens = scorer.call_tokens
        self._scorer = scorer
        self._invariants = invariants
        self._is_scoring = self._is_learning = False
        self._held = -1

    async def load(self, published: Published) -> None:
        version, current = published.version, self._invariants.books.version
        self._invariants.note(f"{self.name} loads version {version}")
        is_due = self.name == "prox" and self._held < version == current
        loads = f"{self.name} holds {self._held} and loads {version} in window {current}"
        self._invariants.check(is_due, "loads", loads)
        await self._scorer.load(published)
        self._held = version

    async def score(
        self, groups: Sequence[GroupResult], items: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Any], ExecutorReport]:
        check, asked = self._invariants.check, [group.key for group in groups]
        self._invariants.note(f"{self.name} scores {len(groups)} groups")
        check(not self._is_scoring, "scores", f"{self.name} has two calls at once")
        is_early = self._is_learning
        check(not is_early, "scores", f"{self.name} scores before it has learned from the last train step")
        num_taken = self._num_taken()
        due = self._invariants.books.unscored(self.name)[: len(asked)]
        check(asked == due, "scores", f"{self.name} scores {asked}, should be {due}")
        is_current = self.name != "prox" or self._held == self._invariants.books.version
        check(is_current, "scores", f"{self.name} scores with the weights of version {self._held}")
        prompts = [item["prompt"] for item in items] == [key.uid[1:] for key in asked]
        check(prompts, "scores", f"{self.name} is given other prompts")
        lengths = [
            [one.prompt_tokens + one.response_tokens for one in group.trajectories] for group in groups
        ]
        tokens = [sum(group) for group in lengths]
        is_small = len(tokens) == 1 or sum(tokens) <= self.call_tokens
        is_small &= 0 < len(tokens) <= self._invariants.settings.schedule.step_groups
        check(is_small, "scores", f"{self.name} is given groups of {tokens} tokens")
        self._is_scoring, data, keys = True, self._invariants.data, keys_of(groups)
        try:
            with data.pinned(keys), data.reading(keys, self.name):  # as the scorers on Ray do
                columns, report = await self._scorer.score(groups, items)
        finally:
            self._is_scoring = False
        if self.name == "reward":
            for group, scores in zip(groups, columns, strict=True):
                both = zip(group.trajectories, scores, strict=True)
                rewarded = tuple(meta.reward + score for meta, score in both)
                self._invariants.ledger.rewarded[group.key] = rewarded
        if self.name != "critic" or num_taken == self._num_taken():
            self._invariants.ledger.computed.update((self.name, key) for key in asked)
        return columns, report

    async def judge(self, result: EvalResult, items: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        num_played = sum(not isinstance(outcome, TrajectoryFailure) for outcome in result.outcomes)
        has_all = len(items) == num_played > 0
        self._invariants.check(has_all, "scores", f"{self.name} judges {len(items)} of {num_played}")
        assert result.payload is not None
        try:
            with self._invariants.data.judging(result.payload):
                return await self._scorer.judge(result, items)
        except asyncio.CancelledError:
            self._invariants.counts["judging cut off"] += 1
            raise

    def _num_taken(self) -> int:
        totals = self._invariants.books.totals()
        return totals["trained"] + totals["training"]

    async def learn(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        """All taken groups are those of this step and of those before it."""
        self._invariants.note(f"{self.name} learns from step {batch.step}")
        num_taken, step_groups = self._num_taken(), self._invariants.settings.schedule.step_groups
        is_due = not self._is_learning and num_taken == batch.step * step_groups
        learns = f"{self.name} learns from step {batch.step} of {num_taken} groups"
        self._invariants.check(is_due, "scores", learns)
        self._is_learning = True
        with self._invariants.data.reading(keys_of(batch.groups), f"what {self.name} learns"):
            made, report = await self._scorer.learn(batch)
        self._is_learning = False
        return made, report

    async def report(self) -> ExecutorReport:
        return await self._scorer.report()

    async def restart(self) -> None:
        self._invariants.note(f"{self.name} is restarted")
        self._invariants.check(not self._is_scoring, "restarts", f"{self.name} is restarted while it scores")
        self._invariants.times.restarted(self.name)
        self._held = -1
        await self._scorer.restart()


def keys_of(groups: Sequence[GroupResult]) -> list[DataKey]:
    return [key for group in groups for key in group.payload or ()]


class WatchedTrainer:
    """Implements `contracts.ports.Trainer` around another one."""

    def __init__(self, trainer: Trainer, invariants: Invariants) -> None:
        self._trainer = trainer
        self._invariants = invariants

    async def train(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        self._invariants.steps.batch_given(batch)
        what = f"train step {batch.step}"
        with self._alone(what), self._invariants.data.reading(keys_of(batch.groups), what):
            made, report = await self._trainer.train(batch)
        self._invariants.times.check_report(report)
        return made, report

    async def gather(self, version: int) -> tuple[float, ExecutorReport]:
        with self._alone(f"gather {version}"):
            gather_s, report = await self._trainer.gather(version)
        self._invariants.times.check_report(report)
        self._invariants.gathered(version)
        return gather_s, report

    async def publish(self, version: int) -> Published:
        published = await self._trainer.publish(version)
        is_it = published.version == version
        self._invariants.check(is_it, "version", f"published {published.version}, asked for {version}")
        return published

    async def snapshot(self, step: int) -> None:
        with self._alone(f"snapshot {step}"):
            await self._trainer.snapshot(step)

    async def report(self) -> ExecutorReport:
        report = await self._trainer.report()
        self._invariants.times.check_report(report)
        return report

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """The trainer does one thing at a time, and never while a worker has its device. (After a stop it
        only copies its state to the host.)"""
        invariants, doing = self._invariants, self._invariants.trainer_does
        invariants.check(not doing, "steps", f"{what} during {doing}")
        lent = [name for name, book in invariants.books.workers.items() if book.has_device]
        may_be = invariants.books.stopping and what.startswith("snapshot")
        invariants.check(not lent or may_be, "lending", f"{what} on devices that {lent} have")
        invariants.note(what)
        invariants.trainer_does = what
        try:
            yield
        finally:
            invariants.trainer_does = ""


class WatchedFeed:
    """Implements `contracts.ports.Feed` around another one: which prompt was given, and none twice."""

    def __init__(self, feed: Feed, invariants: Invariants) -> None:
        self._feed = feed
        self._invariants = invariants

    def next(self) -> Prompt:
        prompt, fed = self._feed.next(), self._invariants.ledger.fed
        is_new = (prompt.uid, prompt.epoch) not in fed
        self._invariants.check(is_new, "ledger", f"the feed gives {prompt.uid} again")
        fed.append((prompt.uid, prompt.epoch))
        return prompt

    def find(self, uid: str, epoch: int) -> Prompt:
        return self._feed.find(uid, epoch)

    def state(self) -> dict[str, Any]:
        return self._feed.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._feed.restore(state)

    def ended(self, group: GroupResult) -> None:
        is_given = (group.key.uid, group.key.epoch) in self._invariants.ledger.fed
        self._invariants.check(is_given, "ledger", f"the feed hears of {group.key}, which it has not given")
        self._feed.ended(group)

    def figures(self) -> Mapping[str, float]:
        return self._feed.figures()
