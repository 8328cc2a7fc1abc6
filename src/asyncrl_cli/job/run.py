"""A run from its profile to its end: prepare, start Ray and the workers, wire the loop, watch, clean up.

    profile -> run directory -> engine, task, model -> Ray, placement, actors -> Pipeline -> RunResult

What can be refused is refused before anything is started, in that order. A run that never began leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from asyncrl_cli.errors import AsyncrlError, ExecutorFailed, Interrupted
from asyncrl_cli.job.attempt_log import logged_to
from asyncrl_cli.job.ending import RunResult, run_to_the_end
from asyncrl_cli.job.preparing import Prepared, Say, prepare
from asyncrl_cli.job.stopping import StopRequests, end_descendants, hangups_blocked, leave, leave_soon, tell
from asyncrl_cli.profile.schema import Profile

if TYPE_CHECKING:
    from asyncrl_cli.checkpoint.find import Checkpoint
    from asyncrl_cli.checkpoint.run_directory import RunDirectory
    from asyncrl_cli.loop.pipeline import Pipeline
    from asyncrl_cli.observe.observers import Observers
    from asyncrl_cli.observe.sinks import Sink
    from asyncrl_cli.observe.start_status import StartStatus
    from asyncrl_cli.plan.job_plan import JobPlan
    from asyncrl_cli.tasks.task import Task

NEVER_BEGAN = "interrupted while the run was starting: no step was trained"


@dataclass
class Run:
    """One run: `result = await Run(profile).run()`. `Run.resume(...)` makes one that continues from a checkpoint."""

    profile: Profile
    origins: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    runs_dir: Path = Path("runs")
    name: str | None = None
    address: str | None = None
    ui: str = "auto"
    checkpoint: Checkpoint | None = None
    requests: StopRequests = field(default_factory=lambda: StopRequests(_interrupt), init=False, repr=False)
    _is_ended: bool = field(default=False, init=False, repr=False)
    _unbegun: RunDirectory | None = field(default=None, init=False, repr=False)
    _start: StartStatus | None = field(default=None, init=False, repr=False)

    @classmethod
    def resume(cls, argument: str, *, runs_dir: Path, ui: str = "auto", address: str | None = None) -> Run:
        """`argument` is a checkpoint, a run directory or a run's name. Raises RefusedError for a damaged or foreign one."""
        from asyncrl_cli.checkpoint.find import load_checkpoint, refuse_ended, resolve
        from asyncrl_cli.job.resuming import check_resumable
        from asyncrl_cli.profile.resolved import read_document

        checkpoint = load_checkpoint(resolve(argument, runs_dir))
        refuse_ended(checkpoint)
        loaded = read_document(checkpoint.directory / "config.resolved.json")
        check_resumable(checkpoint, loaded.profile)
        return cls(profile=loaded.profile, origins=loaded.origins, ui=ui, address=address, checkpoint=checkpoint)

    async def run(self) -> RunResult:
        """Raises `AsyncrlError` for whatever is wrong before the first step; later failures are in the result.

        In the main thread SIGINT, SIGTERM and SIGHUP end it as `job/stopping.py` says.
        """
        task = asyncio.current_task()
        assert task is not None
        in_loop = asyncio.get_running_loop().call_soon_threadsafe

        def end_the_start() -> None:
            self._is_ended = True
            tell("ending the start; asked again it ends at once")
            in_loop(task.cancel)

        self.requests.mean(end_the_start, self._leave_the_start)
        with self.requests.on_signals():
            try:
                return await self._started_and_run()
            except asyncio.CancelledError as cancelled:
                if not self._is_ended:
                    raise
                task.uncancel()
                raise _failure_before(cancelled) or Interrupted(NEVER_BEGAN) from None

    async def _started_and_run(self) -> RunResult:
        from asyncrl_cli.checkpoint.run_directory import check_free, fresh_name
        from asyncrl_cli.job.session import object_store_bytes_for, ray_session
        from asyncrl_cli.observe.starting import Starting
        from asyncrl_cli.tasks.reward_module import keep_reward_module
        from asyncrl_cli.weights.model_files import keep_model_files

        if self.checkpoint is None:
            self.name = self.name or self.profile.run.name or fresh_name(self.profile.name, self.runs_dir)
            check_free(self.runs_dir, self.name)
        with contextlib.ExitStack() as stack:
            stack.push(self._remove_unbegun)  # after Ray has ended: an actor that starts late makes its log's directory
            directory = self._open_directory(stack) if self.checkpoint else self._make_directory(stack)
            attempt_dir = directory.start_attempt()
            stack.enter_context(logged_to(attempt_dir / "driver.log"))
            watching = asyncio.ensure_future(self.requests.watch(directory.stop_requests))
            stack.callback(watching.cancel)
            with Starting(self.ui) as show, self._start_status(directory) as status:

                def say(text: str, done: int = 0, total: int = 0, figures: str = "") -> None:
                    show(text, done, total, figures)
                    status(show.line)

                prepared = await prepare(self.profile, say, self.address, directory.path if self.checkpoint else None)
                self._refuse_other_prompts(prepared.task)
                say("starting Ray")
                store_bytes = object_store_bytes_for(prepared.model_dir)
                with hangups_blocked():
                    plan = stack.enter_context(ray_session(self.profile, address=self.address, object_store_bytes=store_bytes))
                keep_model_files(prepared.model_dir, directory.path)
                keep_reward_module(directory.path, prepared.task.reward.function, prepared.task.reward.module_file)

                def begin() -> None:
                    show.close()
                    status.close()
                    self._start = None

                return await self._run_with(directory, attempt_dir, plan, prepared, say, begin)

    def _refuse_other_prompts(self, task: Task) -> None:
        """A checkpoint names its prompts: the task must still have them, as they were."""
        from asyncrl_cli.tasks.feed import PromptFeed

        if self.checkpoint is not None:
            feed, groups = PromptFeed(task.train, seed=self.profile.run.seed), self.checkpoint.loop_state["groups"]
            feed.restore(groups["feed"])
            for entry in (*groups["running"], *groups["again"], *(finished["try"] for finished in groups["finished"])):
                feed.find(*entry["key"][:2])

    async def _run_with(
        self,
        directory: RunDirectory,
        attempt_dir: Path,
        plan: JobPlan,
        prepared: Prepared,
        say: Say,
        begin: Callable[[], None],
    ) -> RunResult:
        """`begin` ends what is said of the start."""
        from asyncrl_cli.job.workers import started_workers

        async with started_workers(
            plan,
            self.profile,
            prepared.model_dir,
            prepared.task.reward,
            log_dir=attempt_dir,
            run_dir=directory.path,
            checkpoint=self.checkpoint,
            progress=say,
        ) as (trainer, workers, payloads):
            begin()
            observers = self._observers(directory)
            try:
                pipeline = self._pipeline(directory, prepared.task, trainer, workers, payloads, observers)
            except BaseException as failure:
                observers.close("failed", str(failure))
                raise
            for warning in (*self.warnings, *plan.warnings, *prepared.task.notes):
                observers.warning(warning)
            trainer.dumps.warn = observers.warning
            self._unbegun = None
            result = await run_to_the_end(pipeline, trainer, directory, observers, self.requests)
            if self.ui != "none":
                tell("shutting down")  # Ray and the workers take seconds to end
            return result

    def _pipeline(
        self,
        directory: RunDirectory,
        task: Task,
        trainer: Any,
        workers: Sequence[Any],
        payloads: Sequence[Any],
        observers: Observers,
    ) -> Pipeline:
        from asyncrl_cli.checkpoint.store import CheckpointStore
        from asyncrl_cli.job.checkpoints import RunCheckpoints
        from asyncrl_cli.loop.pipeline import Pipeline, ResumeFrom, World
        from asyncrl_cli.loop.settings import LoopSettings
        from asyncrl_cli.tasks.feed import PromptFeed
        from asyncrl_cli.weights.limits import all_loads_s

        store = CheckpointStore(directory.path, keep=self.profile.checkpoint.keep, profile=self.profile.name)
        resume_from = None
        if self.checkpoint is not None:
            store.abandon_newer(self.checkpoint.step)
            resume_from = ResumeFrom(loop_state=self.checkpoint.loop_state, payloads=payloads)
        world = World(
            feed=PromptFeed(task.train, seed=self.profile.run.seed),
            trainer=trainer,
            workers=workers,
            eval_items=task.eval,
            observers=[observers],
            checkpoints=RunCheckpoints(store, trainer),
            resume_from=resume_from,
        )
        settings = LoopSettings.of(self.profile, all_loads_s(self.profile.weights, len(workers)))
        return Pipeline(settings, world)

    def _observers(self, directory: RunDirectory) -> Observers:
        from asyncrl_cli.observe.live_status import RunFacts
        from asyncrl_cli.observe.observers import Observers
        from asyncrl_cli.observe.screen import make_ui
        from asyncrl_cli.observe.sinks import EventsFile, MetricsFile, StatusFile
        from asyncrl_cli.observe.timeline import TimelineFile

        sinks: list[Sink] = [
            MetricsFile(directory.metrics),
            EventsFile(directory.events),
            TimelineFile(directory.timeline),
            StatusFile(directory.status),
        ]
        if self.profile.logging.wandb != "disabled":
            sinks.append(self._wandb(directory))
        screen = make_ui(self.ui)
        if screen is not None:
            sinks.append(screen)
        return Observers(RunFacts.of(self.profile, directory.path, directory.attempts), sinks)

    def _wandb(self, directory: RunDirectory) -> Any:
        from asyncrl_cli.observe.wandb_sink import Wandb

        return Wandb(
            directory.path,
            mode=self.profile.logging.wandb,
            project=self.profile.logging.wandb_project,
            name=directory.name,
            config=self.profile.model_dump(mode="json"),
        )

    def _make_directory(self, stack: contextlib.ExitStack) -> RunDirectory:
        from asyncrl_cli.checkpoint.run_directory import RunDirectory
        from asyncrl_cli.profile.resolved import to_document, to_toml

        assert self.name is not None
        directory = RunDirectory.create(
            self.runs_dir,
            self.name,
            profile_toml=to_toml(self.profile, self.origins),
            resolved=to_document(self.profile, self.origins),
        )
        stack.callback(directory.close)
        self._unbegun = directory
        return directory

    def _start_status(self, directory: RunDirectory) -> StartStatus:
        from asyncrl_cli.observe.live_status import RunFacts
        from asyncrl_cli.observe.start_status import StartStatus

        self._start = StartStatus(directory.status, RunFacts.of(self.profile, directory.path, directory.attempts))
        return self._start

    def _leave_the_start(self) -> NoReturn:
        """Asked a second time. Whoever computes or connects there is not waited for; the directory goes as it would in order."""
        tell("out at once: no step was trained")
        leave_soon()  # however long the rest takes
        end_descendants()
        self._remove_unbegun(None, None, None)
        leave()

    def _remove_unbegun(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """A run that never began leaves no directory: nothing could resume it, and its name would be taken. What an executor said
        before it failed is kept."""
        if self._start is not None:
            self._start.take_back()
        if self._unbegun is None:
            return
        logs = self._unbegun.remove(keep_logs=isinstance(error, ExecutorFailed))
        if logs is not None and isinstance(error, ExecutorFailed):
            error.hint = error.hint or f"the logs of this start are in {logs}"

    def _open_directory(self, stack: contextlib.ExitStack) -> RunDirectory:
        from asyncrl_cli.checkpoint.run_directory import RunDirectory

        assert self.checkpoint is not None
        directory = RunDirectory.open(self.checkpoint.directory.parent.parent)
        stack.callback(directory.close)
        return directory


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _failure_before(cancelled: BaseException) -> AsyncrlError | None:
    """The failure whose clean-up was cancelled: it is what happened to the run."""
    earlier: BaseException | None = cancelled
    while earlier is not None and not isinstance(earlier, AsyncrlError):
        earlier = earlier.__context__
    return earlier
