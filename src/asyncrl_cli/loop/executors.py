"""The second part of the run's state: its executors, what they report, and which of them have no process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.ports import RolloutWorker, Scorer, Trainer
from asyncrl_cli.loop.changes import Changes
from asyncrl_cli.loop.progress import RunProgress
from asyncrl_cli.loop.reports import ReportBook
from asyncrl_cli.measure.states import State

RESTARTS_KEY = "rollout.max_restarts"


class Restarts:
    """`rollout.max_restarts`: the restarts of one executor, successful or not."""

    def __init__(self, allowed: int) -> None:
        self.allowed = self.left = allowed

    def use(self) -> str:
        """Use one. Returns its number, such as "1 of 3"."""
        self.left -= 1
        return f"{self.allowed - self.left} of {self.allowed}"


class Executors:
    """The trainer, the rollout workers and the scorers. (The loop's own knowledge of a worker's slots and
    weights is in fleet.py.)"""

    def __init__(
        self,
        trainer: Trainer,
        workers: Sequence[RolloutWorker],
        scorers: Sequence[Scorer],
        changes: Changes,
        progress: RunProgress,
    ) -> None:
        self.trainer, self.workers, self.scorers = trainer, workers, scorers
        self.reports = ReportBook()
        self.num_restarts = 0
        """Of the whole run."""
        self.restarting: dict[str, str] = {}
        """Those without a process, by name, and the number of the restart under way: "1 of 3"."""
        self.away: dict[str, str] = {}
        """Workers that the run continues without, by name, and why."""
        self.trainer_call: tuple[State, str] | None = None
        """What the loop has asked the trainer to do, as a state and its reason; None while it asks for
        nothing."""
        self.is_lent = False
        """Colocate: the trainer has the resources, or they are being handed over."""
        self._changes = changes
        self._progress = progress

    @contextmanager
    def calling_trainer(self, state: State, why: str = "") -> Iterator[None]:
        """While the block runs, the trainer counts as being in `state`, for the reason `why`."""
        self.trainer_call = state, why
        try:
            yield
        finally:
            self.trainer_call = None

    def lend(self, is_lent: bool) -> None:
        self.is_lent = is_lent
        self._changes.notify()

    def restart_begins(self, name: str, error: ExecutorFailed, restarts: Restarts) -> None:
        """The executor is lost, and one of its restarts is used."""
        self.num_restarts += 1
        self.restarting[name] = number = restarts.use()
        self._progress.event("lost", worker=name, error=str(error), restarts_left=restarts.left)
        number = number.replace("of", f"of {RESTARTS_KEY} =")
        self._progress.warn(f"{str(error).rstrip('.')}; restarting it ({number})")

    def goes_away(self, name: str, error: ExecutorFailed, why: str) -> None:
        """The run continues without a worker."""
        self.restarting.pop(name, None)
        if name not in self.away:
            self._progress.event("away", worker=name, error=str(error), why=why)
            self._progress.warn(f"{str(error).rstrip('.')}; the run continues without it: {why}")
        self.away[name] = why
        self._changes.notify()

    def returned(self, name: str, now_s: float, began_s: float, restarts: Restarts) -> None:
        """The executor has a new process."""
        self.restarting.pop(name, None)
        self.away.pop(name, None)
        self.reports.returned(name, now_s)
        self._progress.event("restarted", worker=name, restart_s=now_s - began_s, restarts_left=restarts.left)
