"""gpu_smoke.py's check of the loop: the real one, with trainer and engine in this process, on one device.

    feed -> loop -> LocalWorker (GroupRunner, transformers engine) -> LocalTrainer (PolicyTrainer in a thread
    of its own) -> ...

Colocate, where they take turns, against partial rollout, where they share the device all the time. Responses
have drawn lengths, because a model with random weights never ends one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from itertools import chain
from typing import Any

from engine_kit import RandomModel
from gpu_smoke_engine import need_batching, rollout_section
from gpu_smoke_kit import GROUP_SIZE, Figures, Machine, Wrong, trainer_on
from local_store import LocalStore

from asyncrl_cli.base.errors import Interrupted
from asyncrl_cli.contracts.environment import Answer, End, Environment, Turn
from asyncrl_cli.contracts.events import Observer, StepRecord
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.ports import PartialResult, RolloutWorker, WorkerUpdate
from asyncrl_cli.contracts.prompt_group import (
    AttemptKey,
    GroupResult,
    PartRequest,
    Prompt,
    TrainBatch,
    TrainReport,
)
from asyncrl_cli.contracts.weight_version import LoadReport, Published
from asyncrl_cli.data.trajectories import GroupPayload
from asyncrl_cli.engines.port import Completion, Sampling
from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine
from asyncrl_cli.envs.chat import load_chat
from asyncrl_cli.envs.episode import Limits, Means
from asyncrl_cli.envs.group_runner import EndedPart, GroupRunner, PartDesk
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import World
from asyncrl_cli.measure.meters import CallMeter, LongPoll, RolloutMeter
from asyncrl_cli.measure.states import ExecutorReport, State
from asyncrl_cli.observe.metrics import StepMetrics
from asyncrl_cli.profile.arithmetic import LoopSettings, max_context_tokens
from asyncrl_cli.profile.schema import (
    AsyncTrainingSection,
    CheckpointSection,
    EvalSection,
    Interrupt,
    PlacementSection,
    ProcessPlace,
    Profile,
    RunSection,
    TrainerSection,
)
from asyncrl_cli.train.step_plan import plan_train_step, training_order
from asyncrl_cli.weights.receivers import SharedWeights
from asyncrl_cli.weights.versions import mean_abs_diff

TRAIN_STEPS, WINDOW_STEPS = 8, 2
MOST_S = 30.0
SHOWN = (
    "step",
    "time_s",
    "timing/step_s",
    "timing/train_s",
    "timing/wait_data_s",
    "sync/pause_s",
    "rollouter/tokens_per_s",
)
MEDIAN_SHARE, SPREAD = 0.25, 0.7
"""Response lengths: lognormal, their median as a share of the longest, and the standard deviation of the
logarithm."""
logger = logging.getLogger("asyncrl_cli.smoke")


def check_loop(machine: Machine, figures: Figures) -> None:
    """Groups and tokens per second, and how long trainer and worker were idle, after the first window."""
    need_batching()
    schedules = {
        "colocate": (AsyncTrainingSection(trigger_parameter_sync_step=1), PlacementSection(colocate=True)),
        "partial": (
            AsyncTrainingSection(
                trigger_parameter_sync_step=WINDOW_STEPS,
                staleness_threshold=Decimal("0.5"),
                partial_rollout=True,
            ),
            PlacementSection(),
        ),
    }
    groups, slots, longest = (4, 32, 64) if machine.is_gpu else (2, 8, 24)
    for name, (training, placement) in schedules.items():
        profile = machine.profile(
            run=RunSection(train_steps=TRAIN_STEPS),
            trainer=TrainerSection(ppo_mini_batch_size=groups, lr=1e-6, max_tokens_per_microbatch=16_384),
            rollout=rollout_section(slots=slots, response_tokens=longest, n=GROUP_SIZE),
            async_training=training,
            placement=placement,
            eval=EvalSection(every_versions=0, prompts=0),
            checkpoint=CheckpointSection(every_steps=0),
        )
        lines = asyncio.run(_run(name, machine, machine.main, profile))
        figures |= {f"{name}_{key}": value for key, value in _summary(lines, groups).items()}


def _summary(lines: Sequence[Mapping[str, Any]], groups: int) -> dict[str, float]:
    """Of the steps after the first window, in which kernels are still chosen and nothing overlaps."""
    later = lines[WINDOW_STEPS:]
    if not later:
        raise Wrong(f"{len(lines)} train steps in {MOST_S:g} s")
    seconds = sum(line["timing/step_s"] for line in later)
    summary = {"groups_per_s": groups * len(later) / seconds}
    for key in (
        "trainer/tokens_per_s",
        "rollouter/tokens_per_s",
        "trainer/idle_ratio",
        "rollouter/idle_ratio",
    ):
        summary[key] = sum(line[key] * line["timing/step_s"] for line in later) / seconds
    if not all(math.isfinite(value) for value in summary.values()):
        raise Wrong("a figure is not finite")
    return summary


async def _run(name: str, machine: Machine, model: RandomModel, profile: Profile) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run, which is stopped after `MOST_S`."""
    with trainer_on(machine, model, profile) as policy, ThreadPoolExecutor(1) as thread:
        store = LocalStore()
        trainer = LocalTrainer(policy, profile, thread, store)
        worker = LocalWorker(profile, machine.place(model), store)
        recorder = _Recorder(name, profile.async_training.trigger_parameter_sync_step)
        try:
            await worker.start()
            data = _Directory(store)
            world = World(feed=_Feed(), trainer=trainer, workers=[worker], observers=[recorder], data=data)
            pipeline = Pipeline(LoopSettings.of(profile), world)
            stop = asyncio.get_running_loop().call_later(MOST_S, pipeline.request_stop)
            with suppress(Interrupted):
                await pipeline.run()
            stop.cancel()
        finally:
            await worker.close()
    return recorder.lines


class _Directory:
    """Implements `contracts.ports.DataStore`."""

    def __init__(self, store: LocalStore) -> None:
        self.clear, self.pinned = store.clear, store.pinned
        self._store = store

    async def keys(self) -> list[str]:
        return self._store.keys()

    def stats(self) -> dict[str, int]:
        return self._store.stats()


class _Recorder(Observer):
    """Keeps the lines, and shows them in the log as they come."""

    def __init__(self, name: str, window_steps: int) -> None:
        self._name = name
        self.lines: list[dict[str, Any]] = []
        self._metrics = StepMetrics(trigger_parameter_sync_step=window_steps, started_s=0.0)

    def step(self, record: StepRecord) -> None:
        self.lines.append(line := self._metrics.update(record))
        logger.info("%s: %s", self._name, {key: line[key] for key in SHOWN if key in line})


class _Feed:
    """Implements `contracts.ports.Feed` with words of random letters."""

    def __init__(self) -> None:
        self._given = 0

    def next(self) -> Prompt:
        self._given += 1
        return self.find(str(self._given), 0)

    def find(self, uid: str, epoch: int) -> Prompt:
        word = "".join(random.Random(uid).choices("abcdefghijklmnopqrstuvwxyz", k=24))
        return Prompt(uid=uid, epoch=epoch, item={"uid": uid, "prompt": word})

    def state(self) -> dict[str, Any]:
        return {"given": self._given}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._given = state["given"]

    def ended(self, group: GroupResult) -> None:
        pass

    def figures(self) -> dict[str, float]:
        return {}


class _ByChance(Environment):
    """One turn, rewarded by chance."""

    async def start(self, item: Item) -> Turn:
        return Turn(messages=({"role": "user", "content": item["prompt"]},), is_last=True)

    async def step(self, answer: Answer) -> End:
        return End(reward=float(random.Random(self.episode).random() < 0.5))


class _DrawnLengths(TransformersEngine):
    """Ends each response at a length drawn from its seed."""

    async def generate(
        self, request_id: str, prompt_tokens: list[int], sampling: Sampling, seed: int, **how: Any
    ) -> Completion:
        longest = sampling.max_response_tokens
        drawn = random.Random(seed).lognormvariate(math.log(MEDIAN_SHARE * longest), SPREAD)
        sampling = replace(sampling, max_response_tokens=max(1, min(longest, round(drawn))))
        return await super().generate(request_id, prompt_tokens, sampling, seed, **how)


class LocalTrainer:
    """Implements `contracts.ports.Trainer`: a `PolicyTrainer`, called in the one thread of `thread`."""

    def __init__(self, trainer: Any, profile: Profile, thread: ThreadPoolExecutor, store: LocalStore) -> None:
        self._trainer, self._profile, self._thread, self._store = trainer, profile, thread, store
        self._meter = CallMeter("trainer-0", "trainer", "groups", time.monotonic)

    async def train(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        minibatches, seed = self._profile.async_training.require_batches, self._profile.run.seed
        groups = training_order(batch.groups, num_minibatches=minibatches, seed=seed, step=batch.step)
        (plan,) = plan_train_step(groups, self._profile, ranks=1, step=batch.step, window=batch.window)
        given = {index: self._payload(groups[index]) for index in plan.groups}
        began_s = time.monotonic()
        with self._meter.doing(State.BUSY):
            report = await self._call(self._trainer.train, batch.step_in_window, plan, given)
        self._meter.add(
            busy_s=time.monotonic() - began_s, trained_tokens=report.tokens, gauges={"step": batch.step}
        )
        return report, self._meter.report()

    def _payload(self, group: GroupResult) -> GroupPayload:
        parts = self._store.get(self._store.stored(group.payload or ()))
        uid, epoch, attempt = group.key
        trajectories = tuple(chain.from_iterable(parts))
        return GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=trajectories)

    async def gather(self, version: int) -> tuple[float, ExecutorReport]:
        with self._meter.doing(State.SYNCING, "weights to be gathered"):
            gather_s = await self._call(self._trainer.gather, version)
        return gather_s, self._meter.report()

    async def publish(self, version: int) -> Published:
        began_s = time.monotonic()
        manifest, buckets = await asyncio.to_thread(self._trainer.published, version)
        publish_s = time.monotonic() - began_s
        return Published(
            version=version, num_bytes=manifest.num_bytes, publish_s=publish_s, handle=(manifest, buckets)
        )

    async def snapshot(self, step: int) -> None:
        await self._call(self._trainer.snapshot, step)

    async def report(self) -> ExecutorReport:
        return self._meter.report()

    async def _call(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


class LocalWorker(RolloutWorker):
    """Implements `contracts.ports.RolloutWorker` as `job.rollout_host` does, without Ray, evals and tools."""

    name = "rollout-0"

    def __init__(self, profile: Profile, place: ProcessPlace, store: LocalStore) -> None:
        self._store = store
        self.slots = profile.rollout.slots
        self._changes = LongPoll()
        self._meter = RolloutMeter(self.name, self.slots, time.monotonic, self._changes.note)
        self._engine = _DrawnLengths(profile, place, self._meter.running)
        chat = load_chat(place.model_dir, trust_remote_code=False, max_tokens=max_context_tokens(profile))
        places = Slots(self.slots, hold=True)
        means = Means(self._engine, chat, _ByChance, Limits.of(profile), places, self._meter.waiting)
        self._runner = GroupRunner(means, Sampling.of(profile.rollout, profile.rollout.temperature))
        self._desk = PartDesk(self._play, self._changes)
        self._received: tuple[Any, Any] | None = None

    async def start(self) -> None:
        await self._engine.start()

    async def close(self) -> None:
        await self._engine.close()

    async def _play(self, request: PartRequest, on_sequence: Callable[[int], None]) -> EndedPart:
        result, payload = await self._runner.run(request, on_sequence)
        stored = self._store.put(str(request.key), payload.trajectories)
        self._store.hold(stored)
        return replace(result, payload=stored.key), stored

    def submit(self, request: PartRequest) -> None:
        self._desk.begin([request])

    async def next_update(self, seen: int) -> WorkerUpdate:
        seen = await self._changes.after(seen)
        ended = tuple(result for result, _ in self._desk.take(most=4))
        counters = self._engine.counters()
        report = self._meter.report(
            version=self._engine.version,
            sampled_tokens=self._engine.sampled_tokens,
            decode_steps=self._engine.decode_steps,
            running_tokens=self._runner.running_tokens,
            sums=counters.sums,
            gauges=counters.gauges,
        )
        freed = {key: number for key, number in self._desk.freed_slots.items() if number}
        return WorkerUpdate(seen=seen, ended=ended, freed_slots=freed, reports=(report,))

    async def prefetch(self, published: Published) -> float:
        began_s = time.monotonic()
        manifest, buckets = published.handle
        self._received = manifest, await asyncio.to_thread(SharedWeights, buckets)
        return time.monotonic() - began_s

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        assert self._received is not None
        manifest, weights = self._received
        self._meter.load_begins(interrupt)
        pause = await self._engine.load(weights, version, interrupt)
        scores = await self._engine.score(
            [list(tokens) for tokens in manifest.probe_tokens], manifest.temperature
        )
        self._meter.load_ended()
        return LoadReport(
            version=version,
            send_s=pause.fetch_s,
            load_s=pause.load_s,
            pause_s=pause.pause_s + scores.pause_s,
            logprob_abs_diff=mean_abs_diff(scores.logprobs, manifest.probe_logprobs),
        )

    async def abort(self, key: AttemptKey) -> None:
        await self._runner.abort(key)

    async def partial_responses(self) -> PartialResult:
        return self._runner.partial_responses()[0]

    async def pause(self) -> PartialResult:
        self._meter.pause(True)
        await self._engine.sleep()
        return PartialResult()

    async def end(self) -> None:
        pass

    async def resume(self) -> None:
        await self._engine.wake()
        self._meter.pause(False)
