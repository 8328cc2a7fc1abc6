"""Runs of the real loop on a virtual clock, for the tests of this folder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from asyncrl_cli.contracts.events import Event, Overview, StepRecord
from asyncrl_cli.contracts.ports import DataStore, Feed
from asyncrl_cli.contracts.prompt_group import TrajectoryMeta
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import ResumeFrom, World
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.simulate.responses import WorkerTimes
from asyncrl_cli.simulate.simulated_trainer import ScorerTimes, TrainerTimes
from asyncrl_cli.simulate.workload import Decoding
from asyncrl_cli.simulate.world import NumberedFeed, run_virtual
from tests.loop.keywords import loop_settings
from tests.loop.proof.faults import Faults, FaultyScorer, FaultyWorker, KeepingTrainer, KeepingWorker
from tests.loop.proof.memory import MemoryCheckpoints

MODES: dict[str, dict[str, Any]] = {
    "on-policy-pipeline": {"window_steps": 1, "eta": Fraction(0)},
    "stream-off-policy": {"window_steps": 4, "eta": Fraction(0)},
    "stale-samples": {"window_steps": 2, "eta": Fraction(1, 2)},
    "partial-rollout": {"window_steps": 2, "eta": Fraction(1, 2), "interrupt": "keep-kv"},
    "one-step-off": {"window_steps": 1, "eta": Fraction(1)},
    "colocate": {"window_steps": 2, "eta": Fraction(0), "colocate": True},
}


def pareto_tokens(rng: random.Random) -> int:
    """Long-tailed lengths: p50 about 8, now and then hundreds."""
    return min(int(5 * rng.paretovariate(1.2)), 400)


def worker_times(
    token_s: float = 0.02, response_tokens: Callable[[random.Random], int] = pareto_tokens, **times: Any
) -> WorkerTimes:
    """Every token takes `token_s`, however many sequences run; each length is drawn by itself."""
    decoding = Decoding(step_s=token_s, step_s_per_sequence=0.0)
    return WorkerTimes(
        decoding=decoding, response_tokens=lambda rng, n: [response_tokens(rng) for _ in range(n)], **times
    )


def settings(mode: str, **changes: Any) -> LoopSettings:
    plain = dict(seed=0, step_groups=4, train_steps=12, n=2, checkpoint_every_steps=3)
    return loop_settings(**(plain | MODES[mode] | changes))


class Recorder:
    """Keeps everything an observer is told, and checks conservation on the way."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps: list[StepRecord] = []
        self.ticks: list[Overview] = []

    def event(self, event: Event) -> None:
        self.events.append(event)

    def step(self, record: StepRecord) -> None:
        totals = dict(record.ledger)
        assert totals.pop("admitted_total") == sum(totals.values())
        self.steps.append(record)

    def tick(self, overview: Overview) -> None:
        self.ticks.append(overview)

    def state(self, record: StepRecord | None = None) -> dict[str, Any]:
        return {"steps": len(self.steps) + (record is not None)}

    def restore(self, state: Any) -> None:
        self.restored = state

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    def fields(self, name: str, field: str) -> list[Any]:
        return [event.fields[field] for event in self.named(name)]


@dataclass
class Ran:
    recorder: Recorder
    trainer: KeepingTrainer
    workers: list[KeepingWorker]
    pipeline: Pipeline
    checkpoints: MemoryCheckpoints
    elapsed_s: float
    error: BaseException | None = None

    @property
    def trained(self) -> list[Any]:
        return [group.key for batch in self.trainer.batches for group in batch.groups]

    @property
    def trajectories(self) -> list[tuple[int, TrajectoryMeta]]:
        """All that were trained, each with its window."""
        groups = [(batch.window, group) for batch in self.trainer.batches for group in batch.groups]
        return [(window, meta) for window, group in groups for meta in group.trajectories]

    def staleness(self) -> list[int]:
        """Of the oldest token of each trained trajectory."""
        return [window - meta.oldest for window, meta in self.trajectories]

    def spans(self) -> list[int]:
        return [meta.span for _, meta in self.trajectories]


def run_world(
    chosen: LoopSettings,
    *,
    seed: int = 0,
    workers: int = 2,
    lent: int = 0,
    slots: int = 8,
    times: dict[str, Any] | None = None,
    trainer_times: dict[str, Any] | None = None,
    faults: Faults | None = None,
    evals: int | dict[str, int] = 0,
    feed: Feed | None = None,
    data: DataStore | None = None,
    resume_from: ResumeFrom | None = None,
    stop_at_s: float | None = None,
    group_score_s: float | None = None,
    scorer: str = "ref",
    learn_s: float = 0.0,
    judge_s: float = 0.0,
) -> Ran:
    """`lent`: workers on the trainer's devices. `group_score_s`: seconds that `scorer` takes for a group
    (None: there is none), `learn_s`: that it learns from a step, `judge_s`: that it judges a trajectory of an
    eval."""

    async def main() -> Ran:
        loop = asyncio.get_running_loop()
        syncing = {"prefetch_s": lambda rng: rng.random() * 0.5, "load_s": lambda rng: rng.random() * 0.3}
        own = syncing | (times or {})
        call_timeout_s = own.pop("call_timeout_s", 600.0)
        times_of_all, names = worker_times(**own), [f"rollout-{i}" for i in range(workers + lent)]
        step_times = {"train_s": lambda batch: 0.7, "gather_s": 0.1, "publish_s": 0.05}
        step_times |= trainer_times or {}
        recorder, checkpoints = Recorder(), MemoryCheckpoints(write_s=0.4)
        team: list[KeepingWorker]
        if faults is None:
            team = [
                KeepingWorker(name, slots, times_of_all, seed, is_lent=name in names[workers:])
                for name in names
            ]
        else:
            shared: dict[str, Any] = {"faults": faults, "call_timeout_s": call_timeout_s}
            team = [
                FaultyWorker(name, slots, times_of_all, seed, is_lent=name in names[workers:], **shared)
                for name in names
            ]
        trainer = KeepingTrainer(TrainerTimes(**step_times), faults)
        score_s, call_learn_s = lambda groups: len(groups) * (group_score_s or 0.0), lambda groups: learn_s
        score_times = ScorerTimes(score_s=score_s, learn_s=call_learn_s, judge_s=judge_s, call_tokens=1)
        scorers = []
        if group_score_s is not None:
            mortal: dict[str, Any] = {"faults": faults or Faults(), "call_timeout_s": call_timeout_s}
            scorers.append(FaultyScorer(scorer, score_times, **mortal))
        sets = {"": evals} if isinstance(evals, int) else evals
        world = World(
            feed=feed or NumberedFeed(),
            trainer=trainer,
            workers=team,
            lent=names[workers:],
            scorers=scorers,
            eval_sets={
                name: [{"uid": f"e{i}", "prompt": str(i)} for i in range(number)]
                for name, number in sets.items()
            },
            observers=[recorder],
            checkpoints=checkpoints,
            data=data,
            resume_from=resume_from,
        )
        pipeline = Pipeline(chosen, world)
        if stop_at_s is not None:
            loop.call_later(stop_at_s, pipeline.request_stop)
        ran = Ran(recorder, trainer, team, pipeline, checkpoints, 0.0)
        try:
            await pipeline.run()
        except Exception as error:
            ran.error = error
        ran.elapsed_s = loop.time()
        return ran

    return run_virtual(main())
