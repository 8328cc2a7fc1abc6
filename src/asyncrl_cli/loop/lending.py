"""The trainer's devices generate while the trainer waits for groups (`placement.lend`).

    trainer waits ──lend──> workers wake, load the newest version, generate ──┐
    trainer computes <── they stop, hand over what runs, sleep <──recall── R groups are takeable

Each trainer rank has a rollout worker on its device, which is asleep while the trainer computes: for the rest
of the loop it is a worker that is away. Only the trainer lends, while it has nothing to do, and it goes on
only after every lent worker is asleep or has no process. So both never compute at once. Responses that a
recall stops are placed again before any new group, and continue from the tokens that they have, on weights at
least as new.

It lends if admission waits for slots, and by a forecast the wait becomes shorter by more than it costs:

    (gap - wake_s) * lent / (own + lent) > recall_s       gap = missing groups / groups per second

`own` and `lent` are slots. Groups per second are counted while nothing is lent. `wake_s` and `recall_s` are
those of the last time: until the workers generate, and until the trainer goes on. Before the first time they
are 0, and they are forgotten slowly, so that one slow load does not end lending for good.

Worked example: 4 groups are missing, one ends every 5 s, own = lent, waking takes 6 s and a recall 2 s. The
trainer would wait for 20 s. 14 s of them with twice the slots do the work of 28: 7 s are saved, and 2 s lost.

A lent worker that fails is not started again. Its processes leave the device before the trainer goes on.
"""

from __future__ import annotations

import asyncio
from functools import partial

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.ports import RolloutWorker
from asyncrl_cli.contracts.weight_version import Published
from asyncrl_cli.loop.admission import Closed
from asyncrl_cli.loop.executors import Restarts
from asyncrl_cli.loop.rollouts import Rollouts, WorkerTasks
from asyncrl_cli.loop.run_state import RunState

FORGET = 0.5
"""The weight of what was counted before the last time that the devices were lent."""
STOP_S, STOP_SHARE = 10.0, 0.5
"""How long the last checkpoint waits for workers that hand back, which may hang; at most this share of the
time that a stop may take."""
COST_LEFT = 0.95
"""What is left after a train step of the costs of the last time."""


class Forecast:
    """How long the trainer would wait, and whether lending pays. `num_ended`: groups that have ended so
    far."""

    def __init__(self, now_s: float) -> None:
        self.wake_s = self.recall_s = 0.0
        self._ended = self._seconds = 0.0
        self._since: tuple[float, int] = now_s, 0

    def pays(self, now_s: float, num_ended: int, num_missing: int, share: float) -> bool:
        """`share`: of the lent slots in all slots, were they lent now."""
        ended = self._ended + num_ended - self._since[1]
        seconds = self._seconds + now_s - self._since[0]
        gap_s = num_missing * seconds / ended if ended else float("inf")
        return (gap_s - self.wake_s) * share > self.recall_s

    def lent(self, now_s: float, num_ended: int) -> None:
        self._ended = FORGET * (self._ended + num_ended - self._since[1])
        self._seconds = FORGET * (self._seconds + now_s - self._since[0])

    def recalled(self, now_s: float, num_ended: int, wake_s: float, recall_s: float) -> None:
        self._since = now_s, num_ended
        self.wake_s, self.recall_s = wake_s, recall_s

    def step_ended(self) -> None:
        self.wake_s, self.recall_s = COST_LEFT * self.wake_s, COST_LEFT * self.recall_s


class LentTasks(WorkerTasks):
    """The tasks that wait for a lent worker. It loads when it is woken, and evals run on the others."""

    def __init__(self, run: RunState, worker: RolloutWorker, tasks: asyncio.TaskGroup) -> None:
        super().__init__(run, worker, tasks)
        self.restarts = Restarts(0)
        self.wake_s = 0.0
        self._waking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.spawn(self._follow, f"progress of {self.worker.name}")

    def wake(self, newest: Published) -> None:
        self._run.executors.lent[self.worker.name] = self._run.now_s()
        self._waking = self.spawn(partial(self._wake, newest), f"{self.worker.name} wakes")

    def recall(self) -> None:
        self.spawn(self._hand_back, f"{self.worker.name} hands back its device")

    async def _wake(self, newest: Published) -> None:
        run, began_s = self._run, self._run.now_s()
        with run.changes.waiting(f"{self.worker.name} (waking)", f"its device and version {newest.version}"):
            await self.worker.resume()
            self.slots.set_asleep(False)
            await self._load(newest)
        self.wake_s = run.now_s() - began_s

    async def _hand_back(self) -> None:
        if self._waking is not None:  # a load cannot be cut short, and has its own limit
            await asyncio.wait([self._waking])
        self.slots.set_asleep(True)
        found = await self.worker.pause()
        self._run.groups.recalled(self.worker.name, found)
        self._run.executors.reports.stopped(self.worker.name)
        self._gave_back()

    def _gave_back(self) -> None:
        self._run.executors.lent.pop(self.worker.name, None)
        self._run.changes.notify()

    def can_be_away(self) -> bool:
        return True

    def go_away(self, error: ExecutorFailed, why: str) -> None:
        super().go_away(error, "a worker on the trainer's devices is not started again")

    async def tasks_ended(self, tasks: list[asyncio.Task[None]]) -> None:
        with self._run.changes.waiting(f"{self.worker.name} (end)", "its processes to leave the device"):
            await self.worker.end()
        self._gave_back()
        await super().tasks_ended(tasks)


class Lending:
    """Lends the trainer's devices, and recalls them. Only the trainer's task calls it."""

    def __init__(self, run: RunState, tasks: asyncio.TaskGroup, rollouts: Rollouts) -> None:
        """Adds the lent workers to those of `rollouts`."""
        self._run = run
        slots = run.admission.workers
        lent = [worker for worker in run.executors.workers if slots[worker.name].is_lent]
        self._workers = [LentTasks(run, worker, tasks) for worker in lent]
        for worker in self._workers:
            rollouts.workers[worker.worker.name] = worker
            worker.begin()
        self._forecast = Forecast(run.now_s())
        self._since_s: float | None = None
        self._lent_s, self._tokens = 0.0, 0.0
        """Of this step, and all tokens up to the last one."""

    def pays(self) -> bool:
        """Whether the devices are to be lent now. Asked when a group ends, before admission fills the slots
        that this frees. (A changed loop that asked after that, too, gained no more: docs/simulation.md.)"""
        run, admission, num_groups = self._run, self._run.admission, self._run.settings.schedule.step_groups
        slots = sum(worker.slots.slots for worker in self._workers if not worker.is_down)
        may_lend = self._since_s is None and slots and self._newest() is not None
        if not may_lend or admission.closed() is not Closed.SLOTS:
            return False
        own = sum(worker.slots for worker in admission.workers.values() if not worker.down)
        num_missing = num_groups - len(admission.takeable(num_groups, unscored=True))
        return self._forecast.pays(run.now_s(), self._num_ended, num_missing, slots / (own + slots))

    def lend(self) -> None:
        run, newest = self._run, self._newest()
        lent = [worker for worker in self._workers if not worker.is_down]
        assert newest is not None
        self._since_s = run.now_s()
        self._forecast.lent(self._since_s, self._num_ended)
        run.progress.event("lent", workers=[worker.worker.name for worker in lent])
        for worker in lent:
            worker.wake(newest)

    async def recall(self) -> None:
        """Wait until the trainer has its devices again, if they are lent. After a stop no step needs them;
        then wait, `STOP_S` at most, for what the last checkpoint still lacks of them."""
        run, lent, began_s = self._run, self._run.executors.lent, self._run.now_s()
        if self._since_s is None:
            return
        for worker in self._workers:
            if worker.worker.name in lent and not worker.is_down:
                worker.recall()
        await run.changes.until(
            lambda: run.failure.stopping or not lent,
            "trainer (lending)",
            lambda: f"its devices, which are lent to {', '.join(lent)}",
        )
        if run.failure.stopping:
            limit_s = min(STOP_S, STOP_SHARE * run.grace_s)
            what = "what ran on lent workers, for the last checkpoint"
            try:
                async with asyncio.timeout(limit_s):
                    await run.changes.until(lambda: not self._handing_back(), "trainer (lending)", what)
            except TimeoutError:
                names = ", ".join(self._handing_back())
                run.progress.warn(
                    f"{names} did not hand back what ran there within {limit_s:g} s: the last checkpoint is "
                    "without it, and a resumed run generates it again"
                )
            return
        lent_s, self._since_s = run.now_s() - self._since_s, None
        self._lent_s += lent_s
        wake_s = max(worker.wake_s for worker in self._workers)
        self._forecast.recalled(run.now_s(), self._num_ended, wake_s, run.now_s() - began_s)
        run.progress.event("recalled", lent_s=lent_s)

    def _handing_back(self) -> list[str]:
        """The workers that give their devices back and have yet to say what ran there."""
        there = [worker for worker in self._workers if worker.slots.down and not worker.is_down]
        return [worker.worker.name for worker in there if worker.slots.unfinished]

    def figures(self) -> dict[str, float]:
        """Metrics of the train step so far."""
        return {"placement/lent_s": self._lent_s, "placement/lent_tokens": self._all_tokens() - self._tokens}

    def step_ended(self) -> None:
        self._lent_s, self._tokens = 0.0, self._all_tokens()
        self._forecast.step_ended()

    def _newest(self) -> Published | None:
        """None while the window's version is still being published."""
        newest = self._run.sync.newest
        return newest if newest is not None and newest.version == self._run.version else None

    def _all_tokens(self) -> float:
        reports = self._run.executors.reports.latest
        lent = [reports[worker.worker.name] for worker in self._workers if worker.worker.name in reports]
        return sum(report.sums.get("sampled_tokens", 0.0) for report in lent)

    @property
    def _num_ended(self) -> int:
        ledger = self._run.groups.ledger
        return ledger.admitted_total - len(ledger.running)
