"""The asynchronous RL loop: the map.

    feed --prompt--> ADMIT --requests-> workers (generate, reward) --results-> (scorers) -> BATCH -R-> trainer
                       ^                  ^     |                                             |           |
         requeued -----+                  |     +-- slots of sequences that ended             |        gather
                       +-- slots, window, deadlines (admission.py) <---- takes ---------------+           |
                       |                  +-- load <-- prefetch <-- newest version <-- publish <----------+
                       +--------------------- version rises: after the gather, before the publish

    task               consumes             waits for                          unblocked by
    -----------------  -------------------  ---------------------------------  -------------------------------
    admit              prompts              admission open                     follow (slots, a drop), scorer
                                                                               (a drop), sync (a load, or the
                                                                               end of its eval, which frees
                                                                               slots), training (a version)
    follow (a worker)  results, progress    the worker's next change           the worker, within one second.
                                                                               One whose engine has work but
                                                                               makes no token (nor loads) for
                                                                               rollout.call_timeout_s is lost
    wake, hand back    the newest version   its device and a load, before it   the worker, weights.timeout_s
    (a lent worker)                         hands back
    restart (executor) a dead worker/scorer a fresh one                        its start, bounded
                                            colocate: the trainer's hand-back  training (a window's end)
    sync (a worker)    the newest version   a version newer than its own       publish; then its prefetch,
                                                                               load and eval, each bounded
                       -                    or an eval of its version whose    restart (of the lost worker)
                                            worker was lost
    scorer             finished groups      a group to score (prox: one that   follow; then its call,
                                            this window takes; critic: that    rollout.call_timeout_s
                                            the next train step takes)
                       -                    prox: the window's version         publish; then its load,
                                                                               weights.timeout_s
                       -                    critic: to have learned from the   its learn call,
                                            newest train step                  trainer.step_timeout_s
    training           R finished groups    R takeable groups                  follow
                       -                    colocate, before a window's first  follow, sync (a load, an eval's
                                            step: all of the window's groups,  end)
                                            no eval, and every worker on the
                                            newest version
                       -                    lend: then every lent worker to    hand back; the loss of the
                                            sleep                              worker; a stop
                       -                    their columns                      scorer
                       -                    colocate: then every worker to     the workers,
                                            hand over                          rollout.call_timeout_s; a stop
                       -                    before a gather: the publish       publish; sync (a load); a stop
                                            before it, and workers must not    if nothing moves
                                            have begun two versions
                       -                    after it, colocate: every worker   the workers,
                                            to take the resources back         rollout.call_timeout_s; a stop
                       -                    weights.mode = "sync" (not         sync (every worker's load)
                                            "async"): all workers to hold the
                                            newest version
                       -                    after each step, last: a separate  the critic,
                                            critic to have learned from it     trainer.step_timeout_s
                       -                    at the end: all workers to hold    sync (a load, the eval's end)
                                            the last version, and its eval
                       -                    the previous checkpoint written    checkpoint
    publish            gathered buckets     the trainer's publish              the trainer, weights.timeout_s
    checkpoint         the loop's snapshot  the writer                         disk, checkpoint.timeout_s
    tick, reports      -                    one second                         the clock; the trainer's
                                                                               report is bounded

Words. A train step takes R groups. K train steps, so W = K * R groups, are a window, numbered like the
version that it begins with (the last window may be shorter; a run that is then extended begins a whole one).
It ends with a gather: the version rises, which begins the next window, and the weights are published then. At
most W + floor(`staleness_threshold` * W) groups may be running, finished or taken in a window: its budget,
which governor.py may lower. A group's deadline is the last window in which it may be trained: the oldest
version of the workers that its responses start on, plus `max_staleness`. (It rises if the responses on the
oldest version are lost and start again on newer ones.) A group is takeable when it is finished, has all its
columns, and, if it is taken now, every other untaken group can still be taken in time: inequality (*) of
admission.py. (*) applies under `on_stale = "wait"` only, where no group is ever late; else late groups are
trained (`"accept"`) or ended.

The journey of a prompt group, by file. When admission is open, groups.py takes a `Prompt` from the feed, and
an `Attempt` at it begins (ledger.py has its stages). admission.py finds room for its n responses at once
(free slots or, if all workers together have fewer than n, places in queues) and sets its deadline;
rollouts.py submits a `PartRequest` to each worker that gets some. There an environment and the model take
turns, and a reward judges. A `PartResult` comes back with the metadata. The arrays go from process to process
without the driver: data/ declares their fields, and has the stores that can hold them. Joined, the parts are
a `GroupResult`, and the group is finished. Or it is dropped, and another prompt gets its place: if too few of
its responses have a reward, or (`algorithm.filter_groups`) if all rewards are equal, which is known once a
reward model, if there is one, has scored them. scorer_tasks.py has the attempt's missing columns computed.
training.py takes R takeable groups as a `TrainBatch`: in finish order, passing over those that are not
takeable yet. The trainer plans the step from the metadata (advantages, which rank trains what), makes its
optimizer steps and answers with a `TrainReport`. At the window's end it gathers its weights, and the version
rises: that opens the next window, and under `on_stale = "drop"` or `"requeue"` it ends the attempts that are
past their deadline (a requeued prompt starts again as another attempt, before the feed's next one; after
`max_requeues` of these it is dropped, or fails the run). Then publishing.py has the trainer hand its buckets
out: a `Published`, which each worker prefetches and loads (rollouts.py), and answers with a `LoadReport`. A
worker always turns to the newest version, and may skip others.

Lending (lending.py): while the trainer waits for groups, workers on its devices may generate. They are asleep
before it takes any.

Evals (evals.py): a worker that has loaded a version whose eval is due works on it beside its groups, and
loads again only when no tries are left. An eval that runs longer than `eval.timeout_s` has no result. If all
workers of an eval are lost, another one with that version goes on with it, or a newer version is scored
instead. Evals take slots, but no place in the window. One runs at a time: a version that is due meanwhile is
left out.

A worker's death: the parts that it has returned remain, unless its node is gone with their arrays: then
finished groups with such parts are requeued (`max_requeues` does not count this), and in running groups these
parts' responses start again, too. Its other responses start again, in new parts, before any new group. They
need slots on workers with weights new enough for their group's deadline; every load adds such slots. Its new
process first loads the newest version.

Checkpoints (checkpointer.py): between two train steps the trainer copies its state, workers report what
running responses have so far, and the loop's state is frozen: the feed's position, finished groups, and what
running ones have; no columns. The last one is written while the workers load and score the last version. A
resumed run first publishes its version again, and a worker starts nothing before it has loaded it. It places
what ran as if all workers had died, except that responses of a single turn keep their tokens: whole ones only
need their reward, and others continue if the engine can.

Why there is no deadlock: training waits for groups and loads. Groups run on workers whatever training does.
Admission is closed by slots (freed by groups, and by evals, which eval.timeout_s bounds), by the window
(reopened when the version rises, which needs only groups that are already admitted: `takeable_in_time` keeps
room for every one of them), by the governor (never while no sequence is in flight), by deadlines (unless
`on_stale = "accept"`: a worker that lags would start the group too old, or will soon load; always: lost
responses need newer weights; reopened by a load, which waits for a publish and, if loads drain, for running
responses), or in colocate by loads. A lost worker or a failed scorer is restarted (executor_tasks.py) while
it has restarts left. After that its failure, like any other error of a worker, stops the run as a user would
(the train step ends, a checkpoint is written), unless the run can continue without it
(`rollout.min_workers`). A failed trainer or separate critic fails the run at once, without a checkpoint.
"""

from __future__ import annotations

import asyncio

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, Interrupted, StallError, first_error
from asyncrl_cli.loop.causes import overview
from asyncrl_cli.loop.checkpointer import Checkpointer, thaw
from asyncrl_cli.loop.lending import Lending
from asyncrl_cli.loop.rollouts import Rollouts
from asyncrl_cli.loop.run_state import RunState, World
from asyncrl_cli.loop.scorer_tasks import ScorerTasks
from asyncrl_cli.loop.training import Training
from asyncrl_cli.profile.arithmetic import CRITIC, LoopSettings

_TICK_S = 1.0


class Pipeline:
    """One run of the loop. `await run()` returns once the last version is loaded and scored."""

    def __init__(self, settings: LoopSettings, world: World) -> None:
        """Call inside the running event loop: its clock is the run's."""
        self.state = RunState(settings, world)
        self._checkpoints = world.checkpoints
        if world.resume_from is not None:
            thaw(self.state, world.resume_from)

    async def run(self) -> None:
        """Run to the end. Raises `Interrupted` after a stop, the failed executor's own error, or
        `StallError`."""
        run, failure = self.state, self.state.failure
        run.executors.reports.began_s = run.now_s()
        try:
            async with asyncio.TaskGroup() as tasks:
                rollouts = Rollouts(run, tasks)
                lending = Lending(run, tasks, rollouts) if run.settings.profile.placement.lend else None
                scorers = {scorer.name: ScorerTasks(run, scorer, tasks) for scorer in run.executors.scorers}
                watching = [
                    tasks.create_task(self._tick(rollouts), name="tick"),
                    tasks.create_task(self._follow_trainer(), name="reports"),
                ]
                for scorer in scorers.values():
                    scorer.begin()
                checkpointer = Checkpointer(run, tasks, self._checkpoints)
                await Training(run, tasks, rollouts, scorers.get(CRITIC), checkpointer, lending).run()
                rollouts.cancel()
                for scorer in scorers.values():
                    scorer.cancel()
                for task in watching:
                    task.cancel()
        except BaseExceptionGroup as group:
            # What ended the run may have made others fail as well, and these may have been faster.
            found = first_error(group, AsyncrlError)
            error = (failure.error or found) if found else first_error(group, BaseException) or group
            self._end("failed", error)
            raise error from group
        if failure.error is not None:
            self._end("failed", failure.error)
            raise failure.error
        self._end("stopped" if failure.stopping else "done")
        if failure.stopping:
            last_step = run.settings.schedule.train_steps
            raise Interrupted(f"stopped after step {run.progress.step} of {last_step}")

    def request_stop(self) -> None:
        """Ask the run to finish its train step, write a checkpoint and end, all within `RunState.grace_s`."""
        self.state.failure.stop()

    def _end(self, phase: str, error: BaseException | None = None) -> None:
        """The run is over: every executor counts as done, or as failed if it raised `error`."""
        run = self.state
        run.progress.enter(phase)
        if error is not None and run.failure.error is None:
            run.progress.event("failed", error=str(error))
        run.executors.reports.end(error.executor if isinstance(error, ExecutorFailed) else "")
        for observer in run.progress.observers:
            observer.tick(overview(run))

    async def _follow_trainer(self) -> None:
        """Fetch the trainer's report once a second, beside `_tick`: a trainer that hangs must not block the
        watchdog."""
        executors = self.state.executors
        while True:
            executors.reports.add(await executors.trainer.report(), self.state.now_s())
            await asyncio.sleep(_TICK_S)

    async def _tick(self, rollouts: Rollouts) -> None:
        """Once a second: send the observers an overview, and stop the run if nothing has moved for too
        long."""
        run = self.state
        changes, executors, failure = run.changes, run.executors, run.failure
        stall_s = run.settings.stall_timeout_s
        moved, moved_s, stop_s = -1, run.now_s(), None
        while True:
            executors.reports.add(rollouts.feed_clock.report(), run.now_s())
            executors.reports.advance_lost(run.now_s())
            for observer in run.progress.observers:
                observer.tick(overview(run))
            # Only the waits of "trainer" have no time limit of their own: for groups, and for loads before a
            # checkpoint of a deterministic run. A restart has one, unless it waits for a trainer's resources.
            is_restarting = not run.admission.fleet.is_whole() or bool(executors.restarting)
            is_busy = "trainer" not in changes.waits or (
                is_restarting and not executors.trainer_has_resources
            )
            if changes.num_moves != moved or is_busy:
                moved, moved_s = changes.num_moves, run.now_s()
            if run.now_s() - moved_s > stall_s:
                waits = [f"{who} waits for {what}" for who, what in changes.named().items()]
                states = [f"{name} is {report.state}" for name, report in executors.reports.latest.items()]
                message = f"nothing moved for run.stall_timeout_s = {stall_s:g}: {'; '.join(waits + states)}"
                hint = "the run's log has the last messages of each executor"
                failure.stop(StallError(message, hint=hint))
            if failure.stopping:
                stop_s = run.now_s() if stop_s is None else stop_s
                if run.now_s() - stop_s > run.grace_s:
                    hint = "a larger run.stop_grace_s gives a stop more time"
                    message = f"the stop took longer than {run.grace_s:.3g} s (run.stop_grace_s)"
                    raise failure.error or StallError(message, hint=hint)
            await asyncio.sleep(_TICK_S)
