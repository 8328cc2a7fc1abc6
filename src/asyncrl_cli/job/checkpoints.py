"""The loop's checkpoints of a run: the store's directory, the trainer's part written by the trainer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.checkpoint.files import telling_storage
from asyncrl_cli.errors import StorageError

if TYPE_CHECKING:
    from asyncrl_cli.checkpoint.store import CheckpointStore
    from asyncrl_cli.loop.ports import Cut, Trainer


class RunCheckpoints:
    """Implements `loop.ports.CheckpointWriter`."""

    def __init__(self, store: CheckpointStore, trainer: Trainer) -> None:
        self._store = store
        self._trainer = trainer

    async def write(self, cut: Cut) -> Path:
        try:
            with telling_storage():
                return await self._store.write(cut, self._write_trainer(cut))
        except StorageError as error:
            raise StorageError(f"the checkpoint of step {cut.step} cannot be written: {error.message}", hint=error.hint) from error

    def _write_trainer(self, cut: Cut) -> Callable[[Path], Awaitable[Any]]:
        with_published = not cut.at_window_boundary
        return lambda directory: self._trainer.write(cut.step, directory, cut.payloads, with_published)
