"""A run from its profile to its end: prepare, start Ray and the workers, wire the loop, watch, clean up. Runs
in the driver.

    profile -> run directory -> driver_preparation.py: engine, task, model -> ray/: session, placement
            -> driver_crew.py: actors -> driver_loop.py: Pipeline -> RunResult

Whatever can be refused is refused before anything is started. A run that never began leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import psutil

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, Interrupted
from asyncrl_cli.checkpoint.lookup import detached_output, refuse_ended, resolve
from asyncrl_cli.checkpoint.reader import Checkpoint, load_checkpoint
from asyncrl_cli.checkpoint.run_directory import RunDirectory, fresh_name
from asyncrl_cli.envs.tool_environment import RepeatedCalls
from asyncrl_cli.job.driver_loop import RunResult, make_pipeline, run_to_the_end
from asyncrl_cli.job.driver_preparation import prepare
from asyncrl_cli.job.driver_process import END_S, StopRequests, leave, logged_to, tell
from asyncrl_cli.job.driver_prompts import check_resumable, refuse_other_prompts
from asyncrl_cli.job.ray.session import ray_session
from asyncrl_cli.models.model_files import keep_model_files
from asyncrl_cli.models.shape import ModelShape, ShapeUnknown, parameters_of, shape_of_directory
from asyncrl_cli.observe.live_status import facts_of
from asyncrl_cli.observe.observers import Observers, StartStatus
from asyncrl_cli.observe.screen import ProgressLine, make_ui
from asyncrl_cli.observe.sinks import EventsFile, MetricsFile, Sink, StatusFile, TimelineFile, make_sinks
from asyncrl_cli.observe.terminal import neutral
from asyncrl_cli.plan.cluster import local_cluster, usable_cores
from asyncrl_cli.plan.compiler import device_of
from asyncrl_cli.plan.job_plan import DTYPE, JobPlan, for_device, for_job
from asyncrl_cli.profile.arithmetic import train_steps_of
from asyncrl_cli.profile.loaded import DEFAULT, Loaded
from asyncrl_cli.profile.resolved import changed, read_document, to_document, to_toml
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import Table
from asyncrl_cli.tasks.code_choice import keep_record, origin
from asyncrl_cli.tasks.task import Task

if TYPE_CHECKING:
    from asyncrl_cli.job.driver_crew import Crew  # it needs Ray

LEAVE_WITHIN_S = 3.0
PROBE_ITEMS = 64
"""How many prompts give the probes their text: enough for prompts of a few tokens each."""
NEVER_BEGAN = "interrupted while the run was starting: no step was trained"


class Warnings:
    """Takes warnings of a start, and keeps them until there is a screen to show them."""

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._show: Callable[[str], None] = self._waiting.append

    def __call__(self, text: str) -> None:
        self._show(text)

    def show_by(self, show: Callable[[str], None]) -> None:
        self._show = show
        for text in self._waiting:
            show(text)


@dataclass
class Run:
    """One run: `result = await Run(profile).run()`. `Run.resume(...)` makes one that continues from a
    checkpoint.

    `origins`: those of `Loaded`. Without them every value counts as given, also `model.dtype` and the time
    limits.
    """

    profile: Profile
    origins: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    runs_dir: Path = Path("runs")
    name: str | None = None
    address: str | None = None
    ui: str = "auto"
    checkpoint: Checkpoint | None = None
    requests: StopRequests = field(default_factory=StopRequests, init=False, repr=False)
    _is_ended: bool = field(default=False, init=False, repr=False)
    _unbegun: RunDirectory | None = field(default=None, init=False, repr=False)
    _start: StartStatus | None = field(default=None, init=False, repr=False)

    @classmethod
    def resume(
        cls,
        argument: str,
        *,
        runs_dir: Path,
        sets: Sequence[str] = (),
        ui: str = "auto",
        address: str | None = None,
    ) -> Run:
        """`argument` is a checkpoint, a run directory or a run's name; `sets` change its profile, as far as a
        resume allows it.

        Raises RefusedError for a damaged or foreign checkpoint, ConfigError for wrong `sets`.
        """
        checkpoint = load_checkpoint(resolve(argument, runs_dir))
        loaded = changed(read_document(checkpoint.directory / "config.resolved.json"), sets)
        refuse_ended(checkpoint, train_steps_of(loaded.profile))
        check_resumable(checkpoint, loaded.profile)
        return cls(
            loaded.profile, loaded.origins, loaded.warnings, ui=ui, address=address, checkpoint=checkpoint
        )

    async def run(self) -> RunResult:
        """Raises `AsyncrlError` for anything that goes wrong before the first step; later failures are in the
        result.

        In the main thread SIGINT, SIGTERM, SIGHUP and SIGUSR1 end the run as `StopRequests` describes.
        """
        task = asyncio.current_task()
        assert task is not None
        in_loop = asyncio.get_running_loop().call_soon_threadsafe

        def end_the_start() -> None:
            self._is_ended = True
            tell(f"cancelling the start; {self.requests.again} ends it at once")
            in_loop(task.cancel)

        self.requests.set_actions(end_the_start, self._leave_the_start)
        with self.requests.on_signals(), self.requests.within(self.profile.run.stop_grace_s + END_S):
            try:
                return await self._start_and_run()
            except asyncio.CancelledError as cancelled:
                if not self._is_ended:
                    raise
                task.uncancel()
                # the real reason may be a failure that was being cleaned up when the cancellation came
                earlier: BaseException | None = cancelled
                while earlier is not None and not isinstance(earlier, AsyncrlError):
                    earlier = earlier.__context__
                raise earlier or Interrupted(NEVER_BEGAN) from None

    async def _start_and_run(self) -> RunResult:
        if self.address is None:
            self.resolve_for(device_of(self.profile, local_cluster()))
        async with AsyncExitStack() as stack:
            # after Ray has ended: an actor that starts late makes its log's directory
            stack.push(self._remove_unbegun)
            directory = self._unbegun = self._directory()
            stack.callback(directory.close)
            attempt_dir = directory.start_attempt()
            stack.enter_context(logged_to(attempt_dir / "driver.log"))
            watching = asyncio.ensure_future(self.requests.watch(directory.stop_requests))
            stack.callback(watching.cancel)
            facts = facts_of(self.profile, directory.path, directory.attempts)
            is_shared = self.address is None and not self.profile.rollout.urls
            if is_shared and device_of(self.profile, local_cluster()) == "cpu":
                facts = replace(facts, cores=usable_cores())
            self._start = StartStatus(directory.status, facts)
            warnings = Warnings()
            with ProgressLine(self.ui, listen=self._start) as say:
                task, crew = await self._start_everything(stack, directory, attempt_dir, say, warnings)
            self._start = None

            # the run's files, the sinks of [logging], and the screen if it is wanted
            sinks: list[Sink] = [MetricsFile(directory.metrics), EventsFile(directory.events)]
            sinks += [TimelineFile(directory.timeline), StatusFile(directory.status)]
            sinks += make_sinks(self.profile, directory.path)
            if (screen := make_ui(self.ui)) is not None:
                sinks.append(screen)
            observers = Observers(facts, sinks, further=RepeatedCalls(directory.logs))
            try:
                pipeline = make_pipeline(self.profile, directory, task, crew, observers, self.checkpoint)
            except BaseException as failure:
                observers.close("failed", str(failure))
                raise
            warnings.show_by(observers.warning)
            self._unbegun = None
            detached_output(directory.path).unlink(missing_ok=True)
            directory.keep_profile(*self._documents())  # the next checkpoints have it
            result = await run_to_the_end(pipeline, crew.trainer, directory, observers, self.requests)
            if self.ui != "none":
                tell("shutting down")  # Ray and the workers take seconds to end
            return result

    async def _start_everything(
        self,
        stack: AsyncExitStack,
        directory: RunDirectory,
        log_dir: Path,
        say: ProgressLine,
        warnings: Warnings,
    ) -> tuple[Task, Crew]:
        """Start all that the loop needs. Returns the task and the workers; `stack` ends what was started."""
        resumed = directory.path if self.checkpoint else None
        reward_log = log_dir / "reward-0.log"
        task, model_dir, further = await prepare(
            self.profile, say, self.address, resumed, say.show, reward_log
        )
        if self.checkpoint is not None:
            refuse_other_prompts(self.checkpoint, task, self.profile.run.seed)
        say(f"connecting to Ray at {self.address}" if self.address else "starting Ray")
        plan = stack.enter_context(ray_session(self.profile, address=self.address, model_dir=model_dir))
        for text in (*self.warnings, *plan.warnings, *task.notes):
            warnings(text)
        # only now are the device (of a cluster) and the plan known, from which these defaults follow
        self.resolve_for(plan.device)
        with suppress(ShapeUnknown):  # then the default time limits stay as they are
            for text in self.resolve_for_model(plan, shape_of_directory(model_dir)):
                warnings(text)
        keep_model_files(model_dir, directory.path)
        for record, code in task.user_code.items():
            keep_record(directory.path, record, code)
            if note := origin(directory.path, record, code):
                # whatever `ui` is: the record may be somebody else's
                print(neutral(note), file=sys.stderr, flush=True)
        from asyncrl_cli.job.driver_crew import CrewOrder, started_crew

        items = {item["uid"]: item for item in task.train}
        order = CrewOrder(
            plan=plan,
            profile=self.profile,
            model_dir=model_dir,
            further=further,
            run_dir=directory.path,
            log_dir=log_dir,
            reward=task.reward,
            tool_class=task.tool_class,
            scorers=task.scorers,
            probe_items=task.train[:PROBE_ITEMS],
            checkpoint=self.checkpoint,
            expected=lambda uid: task.shown_answer(items[uid]),
            say=say,
            warn=warnings,
        )
        return task, await stack.enter_async_context(started_crew(order))

    def resolve_for(self, device: str) -> None:
        """Fill in the defaults for the device. A resumed run keeps those that it began with, also on another
        device."""
        if self.checkpoint is None:
            loaded = Loaded(profile=self.profile, origins=self.origins)
            resolved = for_device(loaded, device, is_here=self.address is None)
            self.profile, self.origins = resolved.profile, resolved.origins
        assert self.checkpoint is not None or self.origins.get(DTYPE) != DEFAULT

    def resolve_for_model(self, plan: JobPlan, shape: ModelShape) -> tuple[str, ...]:
        """Fill in the defaults for the model, and return warnings. A resumed run gets only time limits."""
        loaded = Loaded(profile=self.profile, origins=self.origins)
        teachers = parameters_of(self.profile.teacher.paths.values(), shape)
        is_resumed = self.checkpoint is not None
        resolved = for_job(loaded, plan, shape, teachers=teachers, is_resumed=is_resumed)
        self.profile, self.origins = resolved.profile, resolved.origins
        return resolved.warnings

    def _directory(self) -> RunDirectory:
        """The run's directory, locked: a new one, or the existing one of a resumed run."""
        if self.checkpoint is not None:
            return RunDirectory.open(self.checkpoint.directory.parent.parent)
        self.name = self.name or self.profile.run.name or fresh_name(self.profile.name, self.runs_dir)
        toml, resolved = self._documents()
        return RunDirectory.create(self.runs_dir, self.name, profile_toml=toml, resolved=resolved)

    def _documents(self) -> tuple[str, Table]:
        """The contents of `profile.toml` and of `config.resolved.json`."""
        return to_toml(self.profile, self.origins), to_document(self.profile, self.origins)

    def _leave_the_start(self) -> NoReturn:
        """The second stop request during the start: wait for nothing. The run directory is removed, as after
        the first request."""
        tell("ended at once: no step was trained")
        timer = threading.Timer(LEAVE_WITHIN_S, leave)  # even if the clean-up below hangs
        timer.daemon = True
        timer.start()
        # Nothing may write to what is removed next. The reaper is spared: it cleans up after us.
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if not any(word.endswith("reaper.py") for word in process.cmdline()):
                    process.kill()
        self._remove_unbegun(None, None, None)
        leave()

    def _remove_unbegun(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Remove the directory of a run that never began: nothing could resume it, and its name would stay
        taken. Of a resume that never began, remove the attempt. If an executor failed, its logs are kept."""
        if self._start is not None:
            self._start.take_back()
        if self._unbegun is None:
            return
        keep_logs, logs = isinstance(error, ExecutorFailed), None
        if self.checkpoint is None:
            logs = self._unbegun.remove(keep_logs=keep_logs)
        elif not keep_logs:
            self._unbegun.remove_attempt()
        if logs is not None and isinstance(error, ExecutorFailed):
            error.hint = error.hint or f"the logs of this start are in {logs}"
