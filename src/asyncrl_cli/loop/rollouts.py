"""The rollout workers: admitting groups, and the tasks that wait for each worker: for its progress (with its
results), and for its loads of weights.

If a worker is lost, its responses and eval tries go elsewhere, and it is restarted (executor_tasks.py) or the
run stops in good order. Nothing is trained twice, because the calls to the old process are cancelled before
its responses start again; parts whose results had arrived by then keep them. Nothing starts on the new
process before it has loaded the newest version: until then the worker is `loading`.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from functools import partial

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, ExecutorLost, first_names
from asyncrl_cli.contracts.ports import CALL_KEY, RolloutWorker
from asyncrl_cli.contracts.prompt_group import AttemptKey
from asyncrl_cli.contracts.weight_version import LoadReport, Published
from asyncrl_cli.loop import causes
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.executor_tasks import ExecutorTasks
from asyncrl_cli.loop.run_state import RunState
from asyncrl_cli.measure.states import State, StateClock


class Rollouts:
    """Admits groups, and sends their parts and aborts to the workers."""

    def __init__(self, run: RunState, tasks: asyncio.TaskGroup) -> None:
        """Start admitting groups, and start the tasks of every worker (but those of lent ones)."""
        self.feed_clock = StateClock("feed", "feed", "", run.now_s)
        self._run = run
        own = [one for one in run.executors.workers if not run.admission.workers[one.name].is_lent]
        self.workers = {worker.name: WorkerTasks(run, worker, tasks) for worker in own}
        self._admitting = tasks.create_task(run.failure.guarded(self._admit), name="admit")
        for worker in self.workers.values():
            worker.begin()

    def cancel(self) -> None:
        self._admitting.cancel()
        for worker in self.workers.values():
            worker.cancel()

    async def _admit(self) -> None:
        """Start groups while admission is open, and wait while it is closed. Freed slots, loads and publishes
        reopen it."""
        run, clock = self._run, self.feed_clock
        while True:
            clock.enter(State.BUSY)
            while requests := run.groups.start():
                for name, request in requests:
                    self.workers[name].worker.submit(request)
            clock.enter(State.BLOCKED, "admission")
            await run.changes.until(
                run.admission.is_open, "feed", lambda: "admission: {} ({})".format(*causes.closing(run))
            )

    def abort(self, aborts: list[tuple[str, AttemptKey]]) -> None:
        for name, key in aborts:
            tasks = self.workers[name]
            if not tasks.is_down:
                tasks.spawn(partial(tasks.worker.abort, key), f"abort of {key}")

    async def hand_over(self, *, to_trainer: bool) -> None:
        """Colocate: hand the resources to the trainer, or back to the workers. Skips workers that are down;
        they restart later.

        A stop ends the wait: no later step needs the resources, and a worker that hangs must not delay the
        stop.
        """
        run = self._run
        run.executors.trainer_has_resources = True
        calls = []
        for tasks in self.workers.values():
            if not tasks.is_down:
                worker, what = tasks.worker, "pauses" if to_trainer else "resumes"
                calls.append(
                    tasks.spawn(worker.pause if to_trainer else worker.resume, f"{worker.name} {what}")
                )
                calls[-1].add_done_callback(lambda _: run.changes.notify())

        def missing() -> list[str]:
            return [call.get_name() for call in calls if not call.done()]

        resources = f"the resources to go to the {'trainer' if to_trainer else 'workers'}"
        await run.changes.until(
            lambda: run.failure.stopping or not missing(),
            "trainer (hand-over)",
            lambda: f"{resources}: {', '.join(missing())}",
        )
        run.executors.trainer_has_resources = to_trainer
        run.changes.notify()


class WorkerTasks(ExecutorTasks):
    """The tasks that wait for one worker: for its progress (`_follow`), its loads and its evals
    (`_keep_in_sync`)."""

    def __init__(self, run: RunState, worker: RolloutWorker, tasks: asyncio.TaskGroup) -> None:
        super().__init__(run, worker, tasks)
        self.worker = worker
        self.slots = run.admission.workers[worker.name]

    def begin(self) -> None:
        self.spawn(self._follow, f"progress of {self.worker.name}")
        self.spawn(self._keep_in_sync, f"sync of {self.worker.name}")

    async def _follow(self) -> None:
        """Record results, free the slots of ended sequences, collect reports, and detect a worker that is
        stuck: its engine has no other time limit."""
        run, slots, name, seen, warned = self._run, self.slots, self.worker.name, 0, False
        limit_s, moved_s = run.settings.profile.rollout.call_timeout_s, run.now_s()
        while True:
            update = await self.worker.next_update(seen)
            seen, arrived_s = update.seen, run.now_s()
            made_tokens = any([run.executors.reports.add(one, arrived_s, name) for one in update.reports])
            room, unfinished = slots.room, slots.unfinished_sequences
            run.admission.slots_freed(name, update.freed_slots)
            group_ended = run.groups.parts_ended(update.ended)
            try:
                run.groups.check_limits()
            except AsyncrlError as error:
                run.failure.stop(error)  # and go on: the last checkpoint asks this worker for its responses
            # Without unfinished ones a deterministic run's worker may load, even if evals have all its room.
            freed = slots.room > room or (unfinished > 0 and not slots.unfinished_sequences)
            if group_ended or freed:
                run.changes.notify(Change.GROUPS if group_ended else Change.SLOTS)
            elif made_tokens:
                run.changes.num_moves += 1
            preempted = [one for one in update.reports if one.sums.get("preemptions")]
            if preempted and not warned:
                warned = True
                run.progress.warn(
                    f"{preempted[0].name} preempted {preempted[0].sums['preemptions']:g} sequences: its KV "
                    "cache is too small for its slots, and work is done twice; lower rollout.slots or give "
                    "the cache more memory"
                )
            # It is fine that no token was made if nothing runs, or it waits for rewards or tools, or a load
            # has frozen it. Each of these has its own time limit.
            is_frozen = slots.loading and run.settings.interrupt != "drain"
            has_own_limit = any(
                report.state is State.WAITING or (report.role == "reward" and report.state is State.BUSY)
                for report in update.reports
            )
            # In a deterministic run responses give their slots up, and wait for the next version.
            may_hold = run.settings.profile.run.deterministic and not slots.used
            may_rest = is_frozen or may_hold or has_own_limit
            may_rest = may_rest or not (slots.unfinished or slots.eval_sequences)
            if freed or made_tokens or may_rest:
                moved_s = arrived_s
            elif arrived_s - moved_s > limit_s:
                num_groups = len({key.attempt for key in slots.unfinished})
                running = f"{num_groups} groups" + (" and an eval" if slots.eval_sequences else "")
                raise ExecutorLost(
                    f"it is stuck: {running} are running on it, and it made no token for {CALL_KEY} = "
                    f"{limit_s:g} s",
                    hint=f"its log may say why; if its first token just takes longer, --set {CALL_KEY}=...",
                    executor=name,
                )

    async def _keep_in_sync(self) -> None:
        """For each published version: prefetch it beside generation, load it, and run its eval if one is due.
        Evals that a lost worker has left come first: those of the version that this worker holds."""
        run, slots, who = self._run, self.slots, f"{self.worker.name} (weights)"

        def takes_over() -> bool:
            is_last = run.admission.is_last(slots.version)
            return not run.failure.stopping and run.evaluator.is_left_to(slots, is_last=is_last)

        while True:
            await run.changes.until(
                lambda: takes_over() or run.sync.wanted(slots) is not None,
                who,
                "a new version from the trainer",
                (Change.PUBLISHED,),
            )
            if not takes_over() and (published := run.sync.wanted(slots)) is not None:
                with run.changes.waiting(who, f"prefetch and load of version {published.version}"):
                    await self._load(published)
            if not run.failure.stopping:
                is_last = run.admission.is_last(slots.version)
                with run.changes.waiting(who, f"the eval of version {slots.version} to end"):
                    await run.evaluator.work(self.worker, slots, is_last=is_last)
            run.changes.notify(Change.LOADED)

    async def _load(self, published: Published) -> None:
        run, name, slots, held = self._run, self.worker.name, self.slots, self.slots.version
        slots.begin_prefetch(published.version)
        send_s = await self.worker.prefetch(published)
        await run.changes.until(
            lambda: not run.admission.load_blockers(slots),
            f"{name} (load)",
            lambda: f"what needs version {held} to end: {first_names(run.admission.load_blockers(slots))}",
        )
        slots.begin_load()
        began_s = run.progress.time_s
        report = await self.worker.load(published.version, run.settings.interrupt)
        slots.end_load(published.version)
        report = replace(report, send_s=send_s + report.send_s)  # plus what was fetched during the load
        run.sync.loaded(report)
        run.progress.event("loaded", worker=name, began_s=began_s, **asdict(report))
        if doubt := self._doubt(report):
            message = f"{name} disagrees with the trainer after loading version {report.version}: {doubt}"
            run.progress.warn(message)
        run.changes.notify(Change.LOADED)

    def _doubt(self, report: LoadReport) -> str:
        """Why the probes suggest that the worker does not compute with the loaded version; "" if they do
        not."""
        diff, limit = report.logprob_abs_diff_median, self._run.settings.max_logprob_diff
        if diff is not None and not diff <= limit:  # so that NaN is a doubt
            return f"median logprob difference {diff:.2e}, above weights.max_logprob_diff = {limit:g}"
        if report.verdict != "not loaded":
            return ""
        share = f"{report.loaded_share:.0%}"
        return (
            f"its logprobs moved only {share} of the way from the previous version's to the new one's "
            "(docs/weights.md)"
        )

    def set_down(self, is_down: bool) -> None:
        super().set_down(is_down)
        self.slots.set_down(is_down)

    def can_be_away(self) -> bool:
        least = self._run.settings.profile.rollout.min_workers
        return least is not None and self._run.admission.fleet.can_spare(self.slots, least)

    def go_away(self, error: ExecutorFailed, why: str) -> None:
        self.slots.away = True
        super().go_away(error, why)

    def take_back(self) -> None:
        self._run.admission.lose(self.worker.name)

    async def tasks_ended(self, tasks: list[asyncio.Task[None]]) -> None:
        """Also let other workers score the eval tries of the lost process, and ask whether arrays are lost
        with it."""
        await super().tasks_ended(tasks)
        run, name = self._run, self.worker.name
        self.slots.forget_weights()
        version = run.evaluator.worker_lost()
        if version is not None:
            run.progress.warn(
                f"the eval of version {version} was interrupted by the loss of {name}: another worker with "
                "that version goes on with it, or the next version is scored instead"
            )
        run.changes.notify()
        with run.changes.waiting(f"{name} (restart)", "word of its node"):
            is_gone = await self.worker.node_is_gone()
        if is_gone:
            run.groups.arrays_lost(name)
            run.progress.warn(
                f"the node of {name} is gone: responses that had ended there are generated again"
            )
