"""The tasks that wait for one rollout worker: for its progress (with its results), its loads of weights and
its restarts.

If the worker fails, it is restarted, or the run stops in good order (`Board.stop`): the trainer finishes its
step and checkpoints.

    failed ──> down: nothing is placed on it, tasks that wait for it are cancelled ──> its responses and eval
    tries go elsewhere
        ──> (colocate: the trainer gives the resources back) ──> restart ──> load of the newest version ──>
        responses

restarting.py has what is the same for every executor. Nothing is trained twice, because the calls to the old
process are cancelled before its responses start again; parts whose results had arrived by then keep them.
Nothing starts on the new process before it has loaded weights: until then the worker is `loading`.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from functools import partial

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, ExecutorLost
from asyncrl_cli.contracts.ports import LoadReport, Progress, Published, RolloutWorker
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.restarting import RestartableTasks
from asyncrl_cli.measure.states import State

CALL_KEY = "rollout.call_timeout_s"


class WorkerTasks(RestartableTasks):
    def __init__(self, board: Board, worker: RolloutWorker, tasks: asyncio.TaskGroup) -> None:
        super().__init__(board, worker, tasks)
        self.worker = worker
        self.slots = board.admission.workers[worker.name]

    def begin(self) -> None:
        self.spawn(self._follow, f"progress of {self.worker.name}")
        self.spawn(self._keep_in_sync, f"sync of {self.worker.name}")

    async def _follow(self) -> None:
        """Record results, free the slots of ended sequences, collect reports, and detect a worker that is
        stuck.

        Engine and rewards have no other time limit.
        """
        board, name, seen, warned = self._board, self.worker.name, 0, False
        moved_s = board.now_s()
        while True:
            progress = await self.worker.progress(seen)
            seen = progress.seen
            arrived_s = board.now_s()
            active = any([board.reports.add(report, arrived_s, name) for report in progress.reports])
            warned = warned or self._warned_of_preemption(progress)
            freed = self._take_in(progress)
            if active and not freed:
                board.changes.progress += 1
            if freed or active or self._may_rest(progress):
                moved_s = arrived_s
            elif arrived_s - moved_s > board.profile.rollout.call_timeout_s:
                raise self._stands_still()

    def _take_in(self, progress: Progress) -> bool:
        """Free slots, then record results. True if there is more room now. Too many failures stop the run,
        but not these tasks."""
        board, room, has_ended = self._board, self.slots.room, False
        board.admission.slots_freed(self.worker.name, progress.freed_slots)
        try:
            has_ended = board.groups.parts_ended(progress.ended)
            board.groups.check_limits()
        except AsyncrlError as error:
            board.stop(error)
        freed = self.slots.room > room
        if has_ended:
            board.changes.notify(Change.GROUPS)
        elif freed:
            board.changes.notify(Change.SLOTS)
        return freed

    def _may_rest(self, progress: Progress) -> bool:
        """Whether it is fine that no token was made: nothing runs, or it waits for rewards or tools, or a
        load has frozen it. Each of these has its own time limit."""
        is_frozen = self.slots.loading and self._board.settings.interrupt != "drain"
        is_scoring = any(
            report.role == "reward" and report.state is State.BUSY for report in progress.reports
        )
        has_tools = any(report.state is State.WAITING for report in progress.reports)
        return (
            is_frozen or is_scoring or has_tools or not (self.slots.unfinished or self.slots.eval_sequences)
        )

    def _stands_still(self) -> ExecutorLost:
        slots, limit_s = self.slots, self._board.profile.rollout.call_timeout_s
        num_groups = len({key.attempt for key in slots.unfinished})
        running = f"{num_groups} groups" + (" and an eval" if slots.eval_sequences else "")
        return ExecutorLost(
            f"it is stuck: {running} are running on it, and it made no token for {CALL_KEY} = {limit_s:g} s",
            hint=f"its log may say why; if its first token just takes longer, --set {CALL_KEY}=...",
            executor=self.worker.name,
        )

    def _warned_of_preemption(self, progress: Progress) -> bool:
        for report in progress.reports:
            if count := report.sums.get("preemptions"):
                self._board.warn(
                    f"{report.name} preempted {count:g} sequences: its KV cache is too small for its slots, "
                    "and work is done "
                    "twice; lower rollout.slots or give the cache more memory"
                )
                return True
        return False

    async def _keep_in_sync(self) -> None:
        """For each published version: prefetch it beside generation, load it, and run its eval if one is due.
        Evals that a lost worker has left come first: those of the version that this worker holds."""
        board, slots, who = self._board, self.slots, f"{self.worker.name} (weights)"
        wanted = partial(board.sync.wanted, slots)

        def takes_over() -> bool:
            return not board.stopping and board.evaluator.is_left_to(slots)

        while True:
            await board.changes.until(
                lambda: takes_over() or wanted(), who, "a new version from the trainer", (Change.PUBLISHED,)
            )
            if not takes_over() and (published := wanted()) is not None:
                with board.changes.waiting(who, f"prefetch and load of version {published.version}"):
                    await self._load(published)
            if not board.stopping:
                with board.changes.waiting(who, f"the eval of version {slots.version} to end"):
                    await board.evaluator.work(
                        self.worker, slots, is_last=board.admission.is_last(slots.version)
                    )
            board.changes.notify(Change.LOADED)

    async def _load(self, published: Published) -> None:
        board, name = self._board, self.worker.name
        self.slots.begin_prefetch(published.version)
        send_s = await self.worker.prefetch(published)
        self.slots.begin_load()
        report = await self.worker.load(published.version, board.settings.interrupt)
        self.slots.end_load(published.version)
        report = replace(report, send_s=send_s + report.send_s)  # plus what was fetched during the load
        board.sync.loaded(report)
        board.event("loaded", worker=name, **asdict(report))
        if doubt := self._doubt(report):
            board.warn(f"{name} disagrees with the trainer after loading version {report.version}: {doubt}")
        board.changes.notify(Change.LOADED)

    def _doubt(self, report: LoadReport) -> str:
        """Why the probes suggest that the worker does not compute with the loaded version; "" if they do
        not."""
        diff, limit = report.logprob_abs_diff_median, self._board.settings.max_logprob_diff
        if diff is not None and not diff <= limit:
            return f"median logprob difference {diff:.2e}, above weights.max_logprob_diff = {limit:g}"
        if report.verdict != "not loaded":
            return ""
        share = f"{report.loaded_share:.0%}"
        return (
            f"its logprobs moved only {share} of the way from the previous version's to the new one's "
            "(docs/weights.md)"
        )

    def _set_down(self, is_down: bool) -> None:
        super()._set_down(is_down)
        self.slots.set_down(is_down)

    def _can_be_away(self) -> bool:
        least = self._board.profile.rollout.min_workers
        return least is not None and self._board.admission.fleet.can_spare(self.slots, least)

    def _go_away(self, error: ExecutorFailed, why: str) -> None:
        self.slots.away = True
        super()._go_away(error, why)

    def _lose(self) -> None:
        self._board.admission.lose(self.worker.name)

    async def _restart(self, ending: list[asyncio.Task[None]]) -> None:
        board, name = self._board, self.worker.name
        with board.changes.waiting(f"{name} (restart)", "word of its node"):
            is_gone = await self.worker.node_is_gone()
        if is_gone:
            board.groups.arrays_lost(name)
            board.warn(f"the node of {name} is gone: responses that had ended there are generated again")
        await super()._restart(ending)

    def _give_back(self) -> None:
        """Let other workers score the eval tries of the lost process. Its responses were taken back earlier
        (`_lose`)."""
        board, name = self._board, self.worker.name
        self.slots.forget_weights()
        version = board.evaluator.worker_lost()
        if version is not None:
            board.warn(
                f"the eval of version {version} was interrupted by the loss of {name}: another worker with "
                "that version goes "
                "on with it, or the next version is scored instead"
            )
        board.changes.notify()
