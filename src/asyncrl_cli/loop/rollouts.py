"""The rollout side of the loop: admitting, running groups, following progress, keeping workers in sync.

Failures of a worker restart it (restarts.py), or end the run in good order (`Board.stop`): the trainer finishes its step and
checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from functools import partial

from asyncrl_cli.errors import AsyncrlError, ExecutorLost
from asyncrl_cli.loop import causes
from asyncrl_cli.loop.attempts import AttemptKey
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.failures import first_error
from asyncrl_cli.loop.ports import GroupRequest, LoadReport, Progress, RolloutWorker
from asyncrl_cli.loop.restarts import Restarts
from asyncrl_cli.loop.slots import WorkerSlots
from asyncrl_cli.loop.states import State

CALL_KEY = "rollout.call_timeout_s"


class Rollouts:
    def __init__(self, board: Board, tasks: asyncio.TaskGroup) -> None:
        self._board = board
        self._tasks = tasks
        self._started: dict[asyncio.Task[None], str] = {}
        self._by_name = {worker.name: worker for worker in board.workers}
        self._restarts = Restarts(board, self)

    def start(self) -> None:
        self.spawn(self._admit, "admit")
        for worker in self._board.workers:
            self.begin_life(worker)

    def abort(self, aborts: list[tuple[str, AttemptKey]]) -> None:
        for name, key in aborts:
            if not self._board.admission.workers[name].down:
                worker = self._by_name[name]
                self.spawn(partial(worker.abort, key), f"abort of {key}", worker)

    async def hand_over(self, *, to_trainer: bool) -> None:
        """Colocate: the resources change hands. A worker that is down is not asked; it is restarted when it may have them.

        A stop ends the wait: no step follows that needs the resources, and a worker that hangs must not hold it up.
        """
        board = self._board
        self._restarts.are_lent = True
        up = [worker for worker in board.workers if not board.admission.workers[worker.name].down]
        what = "pauses" if to_trainer else "resumes"
        calls = [self.spawn(worker.pause if to_trainer else worker.resume, f"{worker.name} {what}", worker) for worker in up]
        for call in calls:
            call.add_done_callback(lambda _: board.changes.notify())

        def missing() -> list[str]:
            return [call.get_name() for call in calls if not call.done()]

        resources = f"the resources to go to the {'trainer' if to_trainer else 'workers'}"
        await board.changes.until(
            lambda: board.stopping or not missing(), "trainer (hand-over)", lambda: f"{resources}: {', '.join(missing())}"
        )
        self._restarts.are_lent = to_trainer
        board.changes.notify()

    def cancel(self) -> None:
        for task in list(self._started):
            task.cancel()

    def begin_life(self, worker: RolloutWorker) -> None:
        """Start what goes on beside the groups of a worker's process."""
        self.spawn(partial(self._follow, worker), f"progress of {worker.name}", worker)
        self.spawn(partial(self._keep_in_sync, worker), f"sync of {worker.name}", worker)

    def end_life(self, worker: RolloutWorker) -> list[asyncio.Task[None]]:
        """Cancel all that waits for the worker, but the task that says so. Returns what ends now."""
        mine = [task for task, name in self._started.items() if name == worker.name and task is not asyncio.current_task()]
        for task in mine:
            task.cancel()
        return mine

    def spawn(
        self, work: Callable[[], Coroutine[None, None, None]], name: str, worker: RolloutWorker | None = None
    ) -> asyncio.Task[None]:
        """A task of its own; with `worker`, one that waits for that worker, and ends when its process does.

        It makes its coroutine when it begins: one that is cancelled before leaves none behind.
        """
        task = self._tasks.create_task(self._guard(work, worker), name=name)
        self._started[task] = "" if worker is None else worker.name
        task.add_done_callback(self._started.pop)
        return task

    async def _guard(self, work: Callable[[], Coroutine[None, None, None]], worker: RolloutWorker | None = None) -> None:
        try:
            await work()
        except (AsyncrlError, ExceptionGroup) as error:
            found = first_error(error, AsyncrlError)
            if found is None:
                raise
            if worker is not None and isinstance(found, ExecutorLost):
                self._restarts.failed(worker, found)
            else:
                self._board.stop(found)

    async def _admit(self) -> None:
        """Consumes prompts; waits for admission, which groups, loads and publishes reopen."""
        board, admission, clock = self._board, self._board.admission, self._board.feed_clock
        while True:
            clock.enter(State.BUSY)
            while (started := board.groups.start()) is not None:
                name, request = started
                self.spawn(partial(self._run_group, self._by_name[name], request), f"group {request.key}", self._by_name[name])
            clock.enter(State.BLOCKED, "admission")
            await board.changes.until(admission.is_open, "feed", lambda: f"admission: {causes.admission_wait(board)}")

    async def _run_group(self, worker: RolloutWorker, request: GroupRequest) -> None:
        """Consumes a request; waits for the worker's engine and rewards, however long they take: `_follow` sees them work."""
        self._board.groups.finish(await worker.generate(request))
        self._board.changes.notify(Change.GROUPS)

    async def _follow(self, worker: RolloutWorker) -> None:
        """Frees the slots of sequences that end inside running groups, and collects reports. A worker that stands still is lost."""
        board, seen, warned = self._board, 0, False
        moved_s = board.now_s()
        while True:
            progress = await worker.progress(seen)
            seen = progress.seen
            arrived_s = board.now_s()
            active = [board.reports.add(report, arrived_s, worker.name) for report in progress.reports]
            warned = warned or self._warned_of_preemption(progress)
            freed = board.admission.sequences_finished(worker.name, progress.finished_sequences)
            if freed:
                board.changes.notify(Change.SLOTS)
            elif any(active):
                board.changes.progress += 1
            if freed or any(active) or self._may_rest(worker, progress):
                moved_s = arrived_s
            elif arrived_s - moved_s > board.profile.rollout.call_timeout_s:
                raise self._stands_still(worker)

    def _may_rest(self, worker: RolloutWorker, progress: Progress) -> bool:
        """Nothing runs there, or what runs waits for rewards, or is frozen by a load: both have limits of their own."""
        slots = self._board.admission.workers[worker.name]
        is_frozen = slots.loading and self._board.settings.interrupt != "drain"
        is_scoring = any(report.role == "reward" and report.state is State.BUSY for report in progress.reports)
        return is_frozen or is_scoring or not (slots.unfinished or slots.eval_sequences)

    def _stands_still(self, worker: RolloutWorker) -> ExecutorLost:
        slots, limit_s = self._board.admission.workers[worker.name], self._board.profile.rollout.call_timeout_s
        running = f"{len(slots.unfinished)} groups" + (" and an eval" if slots.eval_sequences else "")
        return ExecutorLost(
            f"it stands still: {running} run there, and no token came for {CALL_KEY} = {limit_s:g} s",
            hint=f"its log may say why; if its first token only needs longer, --set {CALL_KEY}=...",
            executor=worker.name,
        )

    def _warned_of_preemption(self, progress: Progress) -> bool:
        for report in progress.reports:
            if count := report.sums.get("preemptions"):
                message = (
                    f"{report.name} preempted {count:g} sequences: its KV cache is too small for its slots, and work is done twice"
                )
                self._board.event("warning", message=f"{message}; lower rollout.slots or give the cache more memory")
                return True
        return False

    async def _keep_in_sync(self, worker: RolloutWorker) -> None:
        """Consumes published versions: prefetch beside generation, then load; then the version's eval, if one is due."""
        board, sync = self._board, self._board.sync
        slots = board.admission.workers[worker.name]
        while True:
            who, new_version = f"{worker.name} (weights)", "a new version from the trainer"
            await board.changes.until(lambda: sync.wanted(worker.name) is not None, who, new_version, (Change.PUBLISHED,))
            await self._load_newest(worker, slots)
            if not board.stopping:
                with board.changes.waiting(who, f"the eval of version {slots.version} to end"):
                    await board.evaluator.work(worker, slots, is_last=slots.version == board.last_version)
            board.changes.notify(Change.LOADED)

    async def _load_newest(self, worker: RolloutWorker, slots: WorkerSlots) -> None:
        board, sync = self._board, self._board.sync
        published = sync.wanted(worker.name)
        assert published is not None
        sync.begin(worker.name, published.version)
        with board.changes.waiting(f"{worker.name} (weights)", f"prefetch and load of version {published.version}"):
            send_s = await worker.prefetch(published)
            sync.receive(worker.name)
            slots.begin_load()
            report = await worker.load(published.version, board.settings.interrupt)
        slots.end_load(published.version)
        self._loaded(worker.name, report, send_s)

    def _loaded(self, name: str, report: LoadReport, send_s: float) -> None:
        board = self._board
        report = replace(report, send_s=send_s + report.send_s)  # and what was fetched within the load
        board.sync.loaded(name, report)
        board.event("loaded", worker=name, **asdict(report))
        if doubt := self._doubt(report):
            board.event("warning", message=f"{name} disagrees with the trainer after loading version {report.version}: {doubt}")
        board.changes.notify(Change.LOADED)

    def _doubt(self, report: LoadReport) -> str:
        """Why the probes say that the worker does not compute with the version; "" if they do not."""
        diff, limit = report.logprob_abs_diff, self._board.settings.max_logprob_diff
        if diff is not None and not diff <= limit:
            return f"mean logprob difference {diff:.2e}, above weights.max_logprob_diff = {limit:g}"
        if report.verdict != "not loaded":
            return ""
        return f"its logprobs have gone {report.loaded_share:.0%} of the way from the version before (docs/weights.md)"
