"""The asynchronous RL loop: the map.

    feed --prompt--> ADMIT --requests-> workers (generate, reward) --results-> (scorers) --> BATCH --R groups--> trainer
      ^                ^                  ^     |                                              |                   |
      |                |                  |     +-- sequences that ended                       |                gather
      |                +- slots, window, deadlines (admission.py) -----------------------------+                   |
      +-- requeued     |                  +-- load <-- prefetch <-- newest <-- publish <---------------------------+
                       +---------------------- version rises when the gather has ended

    task               consumes              waits for                              unblocked by
    -----------------  --------------------  -------------------------------------  -----------------------------------
    admit              prompts               admission open                         follow (slots, a drop), sync (a load, or
                                                                                    the end of an eval, which runs there and
                                                                                    frees slots), training (a publish)
    follow (a worker)  results, progress     the worker's next change               the worker, within one second. One that has
                       -                                                            work but makes no token for
                       -                                                            rollout.call_timeout_s is lost
    restart (a worker) a dead worker         a fresh one; colocate: also the lease  the worker's start, bounded; training
    sync (a worker)    the newest version    a version newer than the worker's      publish; then the worker's prefetch,
                                                                                    load and eval, each bounded
                       -                     or an eval that a lost worker left     restart
    scorer             finished groups       a group that it has not scored         follow; then the scorer's call,
                       -                                                            rollout.call_timeout_s
                       -                     prox: the window's version             publish; then its load, weights.timeout_s
                       -                     critic: to have learned from the last  its learn call, beside the trainer's,
                       -                     train step                             trainer.step_timeout_s
    training           R finished groups     R takeable groups                      follow; colocate: also the eval's end
                       -                     their columns                          scorer
                       -                     after each step: a separate critic     the critic, trainer.step_timeout_s
                       -                     colocate: every worker to hand over    the workers, rollout.call_timeout_s; a stop
                       -                     at most one older version loading      sync (before a gather)
                       -                     weights.mode = "sync": all workers to  sync (every worker's load)
                                             hold the newest version
                       -                     the previous checkpoint written        checkpoint
    publish            gathered buckets      the trainer's publish                  the trainer, weights.timeout_s
    checkpoint         a cut                 the writer                             disk, checkpoint.timeout_s
    tick               -                     one second                             the clock

Why there is no deadlock: training waits for groups and loads. Groups run on workers whatever training does.
Admission is closed by slots (freed by groups, and by evals, which eval.timeout_s bounds), by the window
(reopened by training's publish, which needs only groups that are already admitted: `takeable_in_time` keeps
room for every one of them), or by deadlines (reopened by a load, which waits for a publish and, under
`drain`, for running groups). Responses of a failed worker are placed before any new group. They need slots on
workers whose weights are as new as those of the rest of the group; every load adds such slots. A failed
worker is restarted (worker_tasks.py) while it has restarts left. After that its failure stops the run in good
order, unless the run can continue without it (`rollout.min_workers`). A failed trainer or separate critic
fails the run at once.
"""

from __future__ import annotations

import asyncio

from asyncrl_cli.base.errors import AsyncrlError, Interrupted, StallError, first_error
from asyncrl_cli.loop.board import Board, World
from asyncrl_cli.loop.causes import snapshot
from asyncrl_cli.loop.cuts import Checkpointer, thaw
from asyncrl_cli.loop.rollouts import Rollouts
from asyncrl_cli.loop.scorers import ScorerTasks
from asyncrl_cli.loop.training import Training
from asyncrl_cli.profile.arithmetic import LoopSettings

_TICK_S = 1.0


class Pipeline:
    """One run of the loop. `await run()` returns once the last version is loaded and scored."""

    def __init__(self, settings: LoopSettings, world: World) -> None:
        """Call inside the running event loop: its clock is the run's."""
        self.board = Board(settings, world)
        if world.resume_from is not None:
            thaw(self.board, world.resume_from)

    async def run(self) -> None:
        """Run to the end. Raises `Interrupted` after a stop, the failed executor's own error, or
        `StallError`."""
        board = self.board
        board.reports.began_s = board.now_s()
        try:
            await self._run_tasks()
        except BaseExceptionGroup as group:
            told = first_error(group, AsyncrlError)
            error = (board.failure or told) if told else first_error(group, BaseException) or group
            self._end("failed", error)
            raise error from group
        if board.failure is not None:
            self._end("failed", board.failure)
            raise board.failure
        self._end("stopped" if board.stopping else "done")
        if board.stopping:
            raise Interrupted(
                f"stopped after step {board.step} of {self.board.settings.schedule.train_steps}"
            )

    async def _run_tasks(self) -> None:
        board = self.board
        async with asyncio.TaskGroup() as tasks:
            watching = [
                tasks.create_task(self._tick(), name="tick"),
                tasks.create_task(self._follow_trainer(), name="reports"),
            ]
            rollouts, scorers = (
                Rollouts(board, tasks),
                [ScorerTasks(board, scorer, tasks) for scorer in board.scorers],
            )
            for scorer in scorers:
                scorer.begin()
            await Training(board, tasks, rollouts, Checkpointer(board, tasks)).run()
            rollouts.cancel()
            for scorer in scorers:
                scorer.cancel()
            for task in watching:
                task.cancel()

    def request_stop(self) -> None:
        """Ask the run to finish its train step, write a checkpoint and end, all within `run.stop_grace_s`."""
        self.board.stop()

    def _end(self, phase: str, error: BaseException | None = None) -> None:
        self.board.end(phase, error)
        self.board.tick(snapshot(self.board))

    async def _follow_trainer(self) -> None:
        """Fetch the trainer's report once a second, beside `_tick`: a trainer that hangs must not block the
        watchdog."""
        board = self.board
        while True:
            board.reports.add(await board.trainer.report(), board.now_s())
            await asyncio.sleep(_TICK_S)

    async def _tick(self) -> None:
        """Once a second: send the observers a snapshot, and stop the run if nothing has moved for too
        long."""
        board, settings = self.board, self.board.settings
        progress, moved_s, stop_s = -1, board.now_s(), None
        while True:
            board.reports.add(board.feed_clock.report(), board.now_s())
            board.reports.advance_lost(board.now_s())
            board.tick(snapshot(board))
            is_busy = (
                "trainer" not in board.changes.waits
                or not board.admission.fleet.is_whole()
                or bool(board.restarting)
            )
            if board.changes.progress != progress or is_busy:
                progress, moved_s = board.changes.progress, board.now_s()
            if board.now_s() - moved_s > settings.stall_timeout_s:
                board.stop(self._stall())
            if board.stopping:
                stop_s = stop_s if stop_s is not None else board.now_s()
                if board.now_s() - stop_s > (grace_s := board.profile.run.stop_grace_s):
                    hint = "resume from the last checkpoint; a larger run.stop_grace_s gives a stop more time"
                    raise board.failure or StallError(
                        f"the stop took longer than run.stop_grace_s = {grace_s:g}", hint=hint
                    )
            await asyncio.sleep(_TICK_S)

    def _stall(self) -> StallError:
        """The watchdog's error: what each part of the loop waits for, and the state of every executor."""
        board = self.board
        waits = [f"{who} waits for {what}" for who, what in board.changes.named().items()]
        states = [f"{name} is {report.state}" for name, report in board.reports.latest.items()]
        return StallError(
            f"nothing moved for run.stall_timeout_s = {self.board.settings.stall_timeout_s:g}: "
            f"{'; '.join(waits + states)}",
            hint="the run's log has the last messages of each executor",
        )
