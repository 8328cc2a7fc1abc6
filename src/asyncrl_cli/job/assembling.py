"""The loop of a run, out of what has been prepared and started, and everyone who observes it."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from asyncrl_cli.checkpoint.find import Checkpoint, LoopStateFile
from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.checkpoint.store import CheckpointStore
from asyncrl_cli.errors import StorageError
from asyncrl_cli.loop.pipeline import Pipeline, ResumeFrom, World
from asyncrl_cli.loop.ports import Cut, Trainer
from asyncrl_cli.loop.settings import LoopSettings
from asyncrl_cli.observe.live_status import RunFacts
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.screen import make_ui
from asyncrl_cli.observe.sinks import EventsFile, MetricsFile, Sink, StatusFile, TimelineFile
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.storage import telling_storage
from asyncrl_cli.tasks.feed import PromptFeed
from asyncrl_cli.tasks.task import Task
from asyncrl_cli.weights.transports import all_loads_s


class RunCheckpoints:
    """Implements `loop.ports.CheckpointWriter`: the store's directory, the trainer's part written by the trainer."""

    def __init__(self, store: CheckpointStore, trainer: Trainer) -> None:
        self._store = store
        self._trainer = trainer

    async def write(self, cut: Cut) -> Path:
        def write_trainer(directory: Path) -> Awaitable[Any]:
            return self._trainer.write(cut.step, directory, cut.payloads, not cut.at_window_boundary)

        state: LoopStateFile = {
            "schema_version": 1,
            "step": cut.step,
            "version": cut.version,
            "at_window_boundary": cut.at_window_boundary,
            "loop_state": {**cut.loop_state},
        }
        try:
            with telling_storage():
                return await self._store.write(state, write_trainer)
        except StorageError as error:
            raise StorageError(f"the checkpoint of step {cut.step} cannot be written: {error.message}", hint=error.hint) from error


def make_pipeline(
    profile: Profile,
    directory: RunDirectory,
    task: Task,
    trainer: Any,
    workers: Sequence[Any],
    observers: Observers,
    checkpoint: Checkpoint | None,
    payloads: Sequence[Any],
) -> Pipeline:
    """`checkpoint`, and the `payloads` of its finished groups: where a resumed run goes on."""
    store = CheckpointStore(directory.path, keep=profile.checkpoint.keep, profile=profile.name)
    resume_from = None
    if checkpoint is not None:
        store.abandon_newer(checkpoint.step)
        resume_from = ResumeFrom(loop_state=checkpoint.loop_state, payloads=payloads)
    world = World(
        feed=PromptFeed(task.train, seed=profile.run.seed),
        trainer=trainer,
        workers=workers,
        eval_items=task.eval,
        observers=[observers],
        checkpoints=RunCheckpoints(store, trainer),
        resume_from=resume_from,
    )
    return Pipeline(LoopSettings.of(profile, all_loads_s(profile.weights, len(workers))), world)


def make_observers(profile: Profile, directory: RunDirectory, ui: str) -> Observers:
    """Files, Weights & Biases, and the screen, if there is one."""
    sinks: list[Sink] = [
        MetricsFile(directory.metrics),
        EventsFile(directory.events),
        TimelineFile(directory.timeline),
        StatusFile(directory.status),
    ]
    if profile.logging.wandb != "disabled":
        from asyncrl_cli.observe.wandb_sink import Wandb

        config = profile.model_dump(mode="json")
        mode, project = profile.logging.wandb, profile.logging.wandb_project
        sinks.append(Wandb(directory.path, mode=mode, project=project, name=directory.name, config=config))
    if (screen := make_ui(ui)) is not None:
        sinks.append(screen)
    return Observers(RunFacts.of(profile, directory.path, directory.attempts), sinks)
