"""A job's phases one at a time, without the loop. `asyncrl bench` uses them to measure what the machine can
do.

Rollout workers only generate: responses have given lengths, no rewards are computed and no weights are
loaded. The job's own trainer trains made-up groups.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray

from asyncrl_cli.contracts.attempts import AttemptKey, GroupResult, TrajectoryMeta
from asyncrl_cli.contracts.ports import TrainBatch
from asyncrl_cli.contracts.trajectories import NOT_SAMPLED, GroupPayload, Segment, Trajectory
from asyncrl_cli.engines.port import Sampling, make_engine
from asyncrl_cli.job.calls import all_of, answer, start_limit
from asyncrl_cli.job.process import set_up_process
from asyncrl_cli.job.workers import make_trainer, makers_of
from asyncrl_cli.models.resolve import further_models
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan, place_of
from asyncrl_cli.profile.schema import ProcessPlace, Profile

BATCHES = 2
"""Different batches that training takes in turns."""
GENERATION_CONFIG = "generation_config.json"
NO_SUCH_TOKEN = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What to generate or train: responses number 0, 1, ... to tokenized prompts, each `rollout.n` successive
    ones to the same. Lengths and prompts are cycled through in order."""

    profile: Profile
    prompts: Sequence[list[int]]
    response_tokens: Sequence[int]

    def response(self, number: int) -> tuple[list[int], int]:
        """The prompt of a response, and the response's length in tokens."""
        prompt = self.prompts[number // self.profile.rollout.n % len(self.prompts)]
        length = self.response_tokens[number % len(self.response_tokens)]
        return prompt, min(length, self.profile.rollout.max_response_tokens)


class Alone:
    """A job's trainer and rollout workers, each to be measured alone or beside the other. The actors reserve
    no CPUs: nothing else runs in their session. Methods raise ExecutorFailed, with the actor's name and
    error.

    What was measured: `tokens_per_s` by `Capacities`' names; of measurements of one phase alone also
    `slots_used`, the mean share of slots that generate in a decode step, and `cpu_shares`, CPU time over wall
    time of the process with the smallest ratio (see `CpuTime`). On CPUs a share far below 1 means that other
    programs used the machine.
    """

    def __init__(self, work: Work, plan: JobPlan, model_dir: Path, directory: Path) -> None:
        """`directory`: for logs and what else the actors write."""
        self.plan, self._training, self._starts = plan, work.profile.async_training, start_limit(work.profile)
        place = place_of(plan, ROLLOUT, endless_model(model_dir, directory / "model"))
        makers = makers_of(plan, ROLLOUT, GenerationAlone, _reserving_nothing, directory)
        self._workers = {name: make(work, place) for name, make in makers.items()}
        further = further_models(work.profile, model_dir)
        self._trainer = make_trainer(
            plan, work.profile, model_dir, further, _reserving_nothing, run_dir=directory, log_dir=directory
        )
        step_groups = self._training.require_batches * work.profile.trainer.ppo_mini_batch_size
        groups = [made_up_group(work, number) for number in range(BATCHES * step_groups)]
        self._batches = [tuple(groups[batch::BATCHES]) for batch in range(BATCHES)]
        self._num_steps = 0
        self.tokens_per_s = defaultdict[str, list[float]](list)
        self.slots_used: list[float] = []
        self.cpu_shares: list[float] = []

    async def start(self) -> None:
        await all_of((self._ask("start"), self._trainer.start()))

    async def measure(self, at_least_s: float, generate: bool, train: bool) -> None:
        """Measure one phase alone, or both at the same time."""
        if generate:
            await self._ask("begin")
        actors = {
            ROLLOUT: self._workers.values() if generate else (),
            TRAINER: self._trainer.actors if train else (),
        }
        cpu = [
            CpuTime(self.plan.role(role).threads, await actor.__ray_call__.remote(lambda actor: os.getpid()))
            for role, working in actors.items()
            for actor in working
        ]
        began_s = time.perf_counter()
        trained_per_s = await self.train(at_least_s) if train else await asyncio.sleep(at_least_s, 0.0)
        cpu_share = min(one.spent_s() for one in cpu) / (time.perf_counter() - began_s)
        beside = "beside_" if generate and train else ""
        if train:
            self.tokens_per_s[f"trainer_{beside}tokens_per_s"].append(trained_per_s)
        if generate:
            sampled_per_s, slots_used = zip(*await self._ask("end"), strict=True)
            self.tokens_per_s[f"rollout_{beside}tokens_per_s"].append(sum(sampled_per_s))
            self.slots_used += () if train else slots_used
        self.cpu_shares += () if beside else (cpu_share,)

    async def train(self, at_least_s: float = 0.0) -> float:
        """Train all batches in whole windows, whose steps may differ, for at least so long. Returns the
        tokens trained per second of the trainer's own time."""
        window_steps, began_s = self._training.trigger_parameter_sync_step, time.perf_counter()
        tokens, seconds, is_whole = 0, 0.0, False
        while not is_whole or time.perf_counter() - began_s < at_least_s:
            step, groups = self._num_steps, self._batches[self._num_steps % BATCHES]
            batch = TrainBatch(step=step + 1, window=0, step_in_window=step % window_steps, groups=groups)
            report, _ = await self._trainer.train(batch)
            tokens += report.tokens
            seconds += report.train_s + sum(report.column_s.values())
            self._num_steps += 1
            is_whole = self._num_steps % (BATCHES * window_steps) == 0
        return tokens / seconds

    async def _ask(self, call: str) -> list[Any]:
        """The answers of all workers to a call."""
        refs = {name: getattr(actor, call).remote() for name, actor in self._workers.items()}
        return await all_of(
            answer(ref, executor=name, call=call, limit=self._starts) for name, ref in refs.items()
        )


def _reserving_nothing(role: str, index: int) -> dict[str, Any]:
    return {"num_cpus": 0}


class CpuTime:
    """CPU seconds that a process (by default this one) and its children spend from now on, per core: those of
    the busiest thread or, if that is more, the busiest process's sum divided by `threads`. (An engine may
    compute in a child.)

    A plain sum would hide that other programs take cores: two threads with half a core each also add up to 1
    s per second.
    """

    def __init__(self, threads: int, pid: int | None = None) -> None:
        self._threads = threads
        self._process = psutil.Process(pid)
        self._began_s = self._thread_seconds()

    def spent_s(self) -> float:
        spent_s = {
            pid: [seconds - self._began_s.get(pid, {}).get(thread, 0.0) for thread, seconds in own.items()]
            for pid, own in self._thread_seconds().items()
        }
        return max(max(max(own), sum(own) / self._threads) for own in spent_s.values())

    def _thread_seconds(self) -> dict[int, dict[int, float]]:
        """CPU seconds so far by process id and thread id."""
        seconds: dict[int, dict[int, float]] = {}
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error):  # a child that ends while we look
                seconds[process.pid] = {
                    thread.id: thread.user_time + thread.system_time for thread in process.threads()
                }
        return seconds


class GenerationAlone:
    """A rollout worker's engine with all slots full, as an actor."""

    def __init__(self, index: int, work: Work, place: ProcessPlace, *, log_path: Path) -> None:
        set_up_process(threads=place.threads, log_path=log_path)
        self._index, self._work, self._place = index, work, place
        self._numbers = itertools.count()
        self._num_ended = 0

    async def start(self) -> None:
        self._engine = make_engine(self._work.profile, self._place, lambda running: None)
        await self._engine.start()

    async def begin(self) -> None:
        """Fill all slots and generate until `end`. The measurement starts once as many responses have ended
        as there are slots.

        There are `n` more responses than slots: these wait in the engine's own queue, so that no slot is ever
        free.
        """
        self._num_ended, num_sources = 0, self._engine.slots + self._work.profile.rollout.n
        self._sources = asyncio.gather(*(self._generate() for _ in range(num_sources)))
        while self._num_ended < self._engine.slots:
            self._raise_failure()
            await asyncio.sleep(0.02)
        self._before = self._so_far()

    async def end(self) -> tuple[float, float]:
        """Tokens sampled per second, and the mean share of slots in use: tokens per decode step and slot."""
        seconds, tokens, steps = (
            now - before for now, before in zip(self._so_far(), self._before, strict=True)
        )
        self._raise_failure()
        self._sources.cancel()
        with suppress(asyncio.CancelledError):
            await self._sources
        return tokens / seconds, tokens / max(steps, 1) / self._engine.slots

    def _so_far(self) -> tuple[float, int, int]:
        return time.perf_counter(), self._engine.sampled_tokens, self._engine.decode_steps

    def _raise_failure(self) -> None:
        if self._sources.done():  # sources end only by failing
            self._sources.result()

    async def _generate(self) -> None:
        """One response after the other. Every worker has seeds of its own."""
        work, rollout = self._work, self._work.profile.rollout
        while True:
            number = next(self._numbers)
            prompt, length = work.response(number)
            sampling = replace(Sampling.of(rollout, rollout.temperature), max_response_tokens=length)
            seed = hash((work.profile.run.seed, self._index, number))
            await self._engine.generate(f"phase-{number}", prompt, sampling, seed)
            self._num_ended += 1


def endless_model(model_dir: Path, directory: Path) -> Path:
    """A copy of the model (by links) in `directory`, whose end-of-sequence id no token has: responses never
    end early."""
    directory.mkdir(parents=True)
    for path in model_dir.iterdir():
        if path.name != GENERATION_CONFIG:
            (directory / path.name).symlink_to(path.resolve())
    original = model_dir / GENERATION_CONFIG
    content = json.loads(original.read_text(encoding="utf-8")) if original.is_file() else {}
    (directory / GENERATION_CONFIG).write_text(
        json.dumps({**content, "eos_token_id": NO_SUCH_TOKEN}), encoding="utf-8"
    )
    return directory


def made_up_group(work: Work, number: int) -> GroupResult:
    """Group `number`. Its responses repeat the prompt's tokens; every second one has reward 1."""
    n, metas, trajectories = work.profile.rollout.n, [], []
    for index in range(number * n, (number + 1) * n):
        prompt, length = work.response(index)
        tokens = [*prompt, *itertools.islice(itertools.cycle(prompt), length)]
        logprobs, versions = [0.0] * len(prompt) + [-1.0] * length, [NOT_SAMPLED] * len(prompt) + [0] * length
        end: Any = {"reward": float(index % 2), "finish_reason": "length"}
        metas.append(
            TrajectoryMeta(
                prompt_tokens=len(prompt), response_tokens=length, version_tokens=((0, length),), **end
            )
        )
        trajectories.append(Trajectory(segments=(Segment.of(tokens, logprobs, versions),), **end))
    key = AttemptKey(str(number), 0, 0)
    payload = ray.put(GroupPayload(uid=key.uid, epoch=0, attempt=0, trajectories=tuple(trajectories)))
    return GroupResult(key=key, trajectories=tuple(metas), failures=(), failed_tokens=0, payload=(payload,))
