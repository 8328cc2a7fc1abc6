"""Evals: each scores one version on held-out prompts, on the workers that hold that version.

A worker that has loaded a version whose eval is due helps until no prompts are left; its next load waits until then. Evals
take slots but no window budget. If a worker's process dies, its eval prompts go back to the queue.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl_cli.loop.changes import Change, Changes
from asyncrl_cli.loop.fleet import WorkerSlots
from asyncrl_cli.loop.ports import EvalRequest, EvalResult, RolloutWorker
from asyncrl_cli.loop.watching import EvalSummary
from asyncrl_cli.profile.schema import Profile

_CALLS_IN_FLIGHT = 4
"""Eval calls per worker at once. Each takes an eighth of the worker's slots (a quarter when nothing else will run), so that one
call's longest responses do not leave the eval's share of the slots empty."""


class Evaluator:
    """Decides when an eval is due, runs it, and integrates the time during which one runs."""

    def __init__(self, items: Sequence[Mapping[str, Any]], profile: Profile, changes: Changes, event: Callable[..., None]) -> None:
        """Call inside the running event loop. `event(name, **fields)` tells the run's observers."""
        self.items = list(items)
        self.last_version: int | None = None
        self.running: _Eval | None = None
        self.ended: list[EvalSummary] = []
        """Results that are in no step's record yet."""
        self._profile = profile
        self._changes = changes
        self._event = event
        self._now = asyncio.get_running_loop().time
        self._ended_s = 0.0
        self._version_before: int | None = None

    @property
    def held_s(self) -> dict[str, float]:
        """Seconds for which the running eval has held each of its workers, whose next load waits."""
        return {} if self.running is None else {name: self._now() - since_s for name, since_s in self.running.helpers.items()}

    @property
    def active_s(self) -> float:
        """Seconds during which an eval ran, so far."""
        return self._ended_s + (self._now() - self.running.started_s if self.running else 0.0)

    def due(self, version: int, is_last: bool) -> bool:
        if not self.items or version == self.last_version:
            return False
        every_versions = self._profile.eval.every_versions
        return version == 0 or is_last or 0 < every_versions <= version - (self.last_version or 0)

    async def work(self, worker: RolloutWorker, slots: WorkerSlots, *, is_last: bool) -> None:
        """Start or help the eval of `slots.version`, if it is due. Called by a worker's sync loop after each load."""
        if self.running is None and self.due(slots.version, is_last):
            self.running = _Eval(slots.version, self.items, self._now())
            self._version_before, self.last_version = self.last_version, slots.version
        current = self.running
        if current is None or current.version != slots.version:
            return
        chunk = max(1, slots.slots // (_CALLS_IN_FLIGHT if is_last else 2 * _CALLS_IN_FLIGHT))
        current.helpers[worker.name] = self._now()
        try:
            async with asyncio.timeout_at(current.started_s + self._profile.eval.timeout_s), asyncio.TaskGroup() as calls:
                for _ in range(_CALLS_IN_FLIGHT):
                    calls.create_task(self._score(current, worker, slots, chunk))
        except TimeoutError:
            current.timed_out = True
            await worker.abort_evals()
        finally:
            del current.helpers[worker.name]
        if not current.helpers and self.running is current:
            self._end(current)

    def worker_lost(self) -> int | None:
        """Call when a worker's process is gone and its eval calls have ended, which puts their prompts back into the queue.

        If no other worker helps, the eval is given up, and due again on the next version that a worker loads. Returns the version
        of an eval that is given up, else None.
        """
        current = self.running
        if current is None or current.helpers:
            return None
        self._ended_s = self.active_s
        self.running, self.last_version = None, self._version_before
        return current.version

    async def _score(self, current: _Eval, worker: RolloutWorker, slots: WorkerSlots, chunk: int) -> None:
        while current.queue and not current.timed_out:
            items = tuple(current.queue.popleft() for _ in range(min(chunk, len(current.queue))))
            slots.change_evals(len(items))
            request, result = EvalRequest(version=current.version, items=items, seed=self._profile.run.seed), None
            try:
                result = await worker.evaluate(request)
            finally:
                slots.change_evals(-len(items))
                self._changes.notify(Change.SLOTS)
                if result is None:
                    current.queue.extendleft(reversed(items))
            current.results.append(result)

    def _end(self, current: _Eval) -> None:
        self._ended_s = self.active_s
        self.running = None
        version, summary = current.version, current.summary(self._now() - current.started_s)
        if summary is None:
            limit = f"eval.timeout_s = {self._profile.eval.timeout_s:g}"
            self._event("warning", message=f"the eval of version {version} gave no result within {limit}")
        else:
            self.ended.append(summary)
            scored = {"reward_mean": summary.reward_mean, "num_prompts": summary.num_prompts}
            self._event("eval", version=version, eval_s=summary.eval_s, **scored)
        self._changes.notify()


class _Eval:
    def __init__(self, version: int, items: Sequence[Mapping[str, Any]], started_s: float) -> None:
        self.version = version
        self.num_prompts = len(items)
        self.queue = deque(items)
        self.started_s = started_s
        self.helpers: dict[str, float] = {}
        """The workers that the eval runs on, and since when."""
        self.timed_out = False
        self.results: list[EvalResult] = []

    def __str__(self) -> str:
        scored = sum(len(result.rewards) + len(result.failures) for result in self.results)
        return f"version {self.version}: {scored} of {self.num_prompts} prompts"

    def summary(self, eval_s: float) -> EvalSummary | None:
        """The eval's result; None if it timed out or scored nothing."""
        rewards = [reward for result in self.results for reward in result.rewards]
        lengths = [tokens for result in self.results for tokens in result.response_tokens]
        if self.timed_out or not rewards:
            return None
        return EvalSummary(
            version=self.version,
            reward_mean=statistics.fmean(rewards),
            num_prompts=len(rewards),
            response_tokens_median=statistics.median(lengths),
            eval_s=eval_s,
            num_failed=sum(len(result.failures) for result in self.results),
        )
