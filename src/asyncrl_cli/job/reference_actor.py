"""The reference with processes of its own: the actor of one of them, and all of them as the loop's scorer.

    group main     one thread: start, score. All processes get the same calls in the same order
    group control  report, meeting_point: answered at once, whatever else runs

Who waits for whom: collectives in `main` for the other processes' `main`; the driver for each call, rollout.call_timeout_s at most.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import ray

from asyncrl_cli.errors import ExecutorFailed, ExecutorLost
from asyncrl_cli.job.adapters import CALL_KEY, START_LIMIT
from asyncrl_cli.job.calls import Limit, all_of, answer
from asyncrl_cli.job.meeting import meeting_point
from asyncrl_cli.job.process import no_collection_while_starting, set_up_process
from asyncrl_cli.loop.attempts import GroupResult
from asyncrl_cli.loop.meters import ScorerMeter
from asyncrl_cli.loop.states import ExecutorReport
from asyncrl_cli.plan.job_plan import REF
from asyncrl_cli.profile.schema import Place, Profile
from asyncrl_cli.samples import GroupPayload, joined
from asyncrl_cli.train.balance import split_by_tokens

CONCURRENCY_GROUPS = {"main": 1, "control": 1}

logger = logging.getLogger(__name__)


class ReferenceActor:
    """Methods mirror `loop.ports.Scorer`, per process; `RayReference` calls them on all."""

    def __init__(self, rank: int, profile: Profile, place: Place, *, log_path: Path) -> None:
        set_up_process(threads=place.threads, log_path=log_path)
        self._rank = rank
        self._profile = profile
        self._place = place
        self._meter = ScorerMeter(REF, time.monotonic)

    def __repr__(self) -> str:
        return f"{REF}-{self._rank}"

    @ray.method(concurrency_group="control")
    def meeting_point(self) -> str:
        return meeting_point()

    @ray.method(concurrency_group="main")
    def start(self, init_method: str) -> None:
        with no_collection_while_starting():
            from asyncrl_cli.train.reference import Reference

            self._reference = Reference(self._profile, self._place, rank=self._rank, init_method=init_method)
        logger.info("%r started at %s", self, self._place)

    @ray.method(concurrency_group="main")
    def score(self, num_tokens: int, *parts: GroupPayload) -> Any:
        """This process's report, then the column of each group; each group is one or more of `parts`. `num_tokens`: sampled tokens
        that all processes score in this call."""
        with self._meter.scoring():
            column = self._reference.score(dict(enumerate(joined(parts))))
            self._meter.scored(num_tokens)
        report = self._meter.report()
        return (report, *column.values()) if column else report

    @ray.method(concurrency_group="control")
    def report(self) -> ExecutorReport:
        return self._meter.report()

    @ray.method(concurrency_group="main")
    def stop(self) -> None:
        self._reference.close()


class RayReference:
    """`loop.ports.Scorer` on all `ReferenceActor`s. A column's handle is its ObjectRef: it goes to the trainer's ranks, never
    through the driver, which owns it, so that it outlives the process that made it."""

    name = REF

    def __init__(self, make_actors: Callable[[], list[Any]], profile: Profile) -> None:
        """`make_actors()` makes the actors of all processes in their bundles, now and at every restart."""
        self.actors = make_actors()
        self.call_tokens = len(self.actors) * profile.trainer.max_tokens_per_microbatch
        self._make_actors = make_actors
        self._calls = Limit(profile.rollout.call_timeout_s, CALL_KEY)

    async def score(self, groups: Sequence[GroupResult]) -> tuple[Sequence[Any], ExecutorReport]:
        """The groups are divided between the processes by their tokens."""
        lengths = [sum(meta.prompt_tokens + meta.response_tokens for meta in group.trajectories) for group in groups]
        shares = split_by_tokens(lengths, len(self.actors))
        num_tokens = sum(group.response_tokens for group in groups)
        reports, columns = [], dict[int, Any]()
        for actor, share in zip(self.actors, shares, strict=True):
            parts = chain.from_iterable(groups[index].payload for index in share)
            made = actor.score.options(num_returns=1 + len(share)).remote(num_tokens, *parts)
            report, *own = made if share else [made]
            reports.append(report)
            columns |= dict(zip(share, own, strict=True))
        call = f"the logprobs of {len(groups)} groups"
        told = await all_of(self._answer(report, call, rank) for rank, report in enumerate(reports))
        return [columns[index] for index in range(len(groups))], told[0]

    async def report(self) -> ExecutorReport:
        report: ExecutorReport = await self._answer(self.actors[0].report.remote(), "a report")
        return report

    async def restart(self) -> None:
        """Kill all actors, dead or alive, and start others, which get their bundles once the old ones are gone."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = self._make_actors()
        await self.start()

    async def start(self) -> None:
        init_method = await self._answer(self.actors[0].meeting_point.remote(), "its start", limit=START_LIMIT)
        starts = [actor.start.remote(init_method) for actor in self.actors]
        await all_of(self._answer(ref, "its start", rank, START_LIMIT) for rank, ref in enumerate(starts))

    async def stop(self, timeout_s: float) -> None:
        stops = [actor.stop.remote() for actor in self.actors]
        await all_of(self._answer(ref, "its end", rank, Limit(timeout_s)) for rank, ref in enumerate(stops))

    async def _answer(self, ref: Any, call: str, rank: int = 0, limit: Limit | None = None) -> Any:
        """By default within `rollout.call_timeout_s`. A failure names the whole scorer, which is restarted as one: where a process
        is lost, the others' collectives fail, and that may be heard of first."""
        try:
            return await answer(ref, executor=self.name, call=f"{call} (process {rank})", limit=limit or self._calls)
        except ExecutorLost:
            raise
        except ExecutorFailed as error:
            raise ExecutorLost(error.cause, hint=error.hint, executor=self.name) from error
