"""How far the run has come, and what its observers hear of it: `RunState.progress` (run_state.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncrl_cli.contracts.events import Event, Observer
from asyncrl_cli.contracts.prompt_group import AttemptKey
from asyncrl_cli.loop.admission import Admission


class RunProgress:
    """Steps, phase and checkpoints. The version and the window are admission's, the groups the ledger's."""

    def __init__(self, admission: Admission, observers: Sequence[Observer]) -> None:
        """Call inside the running event loop: its clock is the run's."""
        self.step = 0
        self.phase = "starting"
        self.snapshot_step: int | None = None
        """The step of the last checkpoint that was begun, or of the one that the run was resumed from."""
        self.checkpoint = ""
        """The name of the last checkpoint that was written."""
        self.longest_step_s = 0.0
        """The longest call of the trainer for a train step so far."""
        self.observers = observers
        self._admission = admission
        self._now_s = asyncio.get_running_loop().time
        self._time_before_s = -self._now_s()

    @property
    def time_s(self) -> float:
        """The time of the run so far, with that of the runs that it resumes."""
        return self._time_before_s + self._now_s()

    def resume(self, step: int, time_s: float) -> None:
        """Go on from the checkpoint of `step`, which was made after `time_s`."""
        self.step = self.snapshot_step = step
        self._time_before_s = time_s - self._now_s()

    def enter(self, phase: str) -> None:
        self.phase = phase

    def checkpointed(self, step: int, version: int, name: str) -> None:
        self.checkpoint = name
        self.event("checkpointed", step=step, version=version, path=name)

    def event(
        self,
        name: str,
        *,
        key: AttemptKey | None = None,
        version: int | None = None,
        step: int | None = None,
        **fields: object,
    ) -> None:
        """Notify the observers. `version` and `step` default to the run's."""
        event = Event(
            time_s=self.time_s,
            name=name,
            key=key,
            version=self._admission.version if version is None else version,
            step=self.step if step is None else step,
            fields=fields,
        )
        for observer in self.observers:
            observer.event(event)

    def warn(self, message: str) -> None:
        self.event("warning", message=message)
