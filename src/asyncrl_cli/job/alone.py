"""One phase of a job alone, without the loop: rollout workers that only generate, trainer ranks that only train.

`asyncrl bench` measures with them what the machine can do. Each worker and rank is an actor, as in the job. Prompts are the task's;
responses have given lengths, cycled through in order. No rewards are computed and no weights are loaded.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from asyncrl_cli.engines.port import Completion, Sampling, make_engine
from asyncrl_cli.job.process import set_up_process
from asyncrl_cli.loop.attempts import AttemptKey, GroupResult
from asyncrl_cli.loop.meters import RolloutMeter
from asyncrl_cli.profile.schema import Place, Profile
from asyncrl_cli.samples import GroupPayload

if TYPE_CHECKING:
    from asyncrl_cli.train.balance import RankPlan

GENERATION_CONFIG = "generation_config.json"
NO_SUCH_TOKEN = 1_000_000_000
BATCHES = 2
"""Different batches that training takes in turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The input of each process of a phase. `directory`: where they write logs, and where trainer ranks find each other."""

    profile: Profile
    place: Place
    items: Sequence[Mapping[str, Any]]
    response_tokens: Sequence[int]
    directory: Path

    def prompts(self) -> list[list[int]]:
        from asyncrl_cli.envs.episode import load_tokenizer, render_prompts

        tokenizer = load_tokenizer(self.place.model_dir, trust_remote_code=self.profile.model.trust_remote_code)
        return render_prompts(tokenizer, self.items)

    def length(self, number: int) -> int:
        """Tokens of response `number`."""
        return min(self.response_tokens[number % len(self.response_tokens)], self.profile.rollout.max_response_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """What a process did in `seconds`. `tokens`: sampled by it, or trained by all ranks together.

    `cpu_s` is measured by `CpuTime`: on a CPU, much less than `seconds` means that other programs used the machine.
    `running_mean`: the mean number of running sequences (generation only).
    """

    tokens: int
    seconds: float
    cpu_s: float
    running_mean: float = 0.0


class Phase:
    """The actors of one phase, which start at once. They reserve no CPUs: nothing else runs in their session.

    Methods raise ExecutorFailed, with the actor's name and error, if one fails or does not answer within `START_LIMIT`.
    """

    def __init__(self, name: str, actor: type, work: Work) -> None:
        import ray

        make = ray.remote(num_cpus=0, max_restarts=0)(actor).remote
        self._actors = {f"{name}-{index}": make(index, work) for index in range(work.place.workers)}
        self._starts = {name: actor.start.remote() for name, actor in self._actors.items()}

    def ready(self) -> None:
        """Wait until every actor has started."""
        self._answers("its start", self._starts)

    def ask(self, method: str, *arguments: Any) -> list[Worked]:
        """Call `method` of all actors at the same time. Returns their answers, by index."""
        return self._answers(method, {name: getattr(actor, method).remote(*arguments) for name, actor in self._actors.items()})

    def _answers(self, call: str, refs: Mapping[str, Awaitable[Any]]) -> list[Any]:
        from asyncrl_cli.job.adapters import START_LIMIT
        from asyncrl_cli.job.calls import all_of, answer

        async def answers() -> list[Any]:
            return await all_of(answer(ref, executor=name, call=call, limit=START_LIMIT) for name, ref in refs.items())

        return asyncio.run(answers())


class GenerationAlone:
    """A rollout worker's engine with all slots full."""

    def __init__(self, index: int, work: Work) -> None:
        set_up_process(threads=work.place.threads, log_path=work.directory / f"generation-{index}.log")
        self._index, self._work = index, work
        self._numbers = itertools.count()
        self._num_ended = 0

    async def start(self) -> None:
        work = self._work
        self._prompts = work.prompts()
        self._meter = RolloutMeter("generation", work.profile.rollout.slots, time.perf_counter, lambda: None)
        self._engine = make_engine(work.profile, work.place, self._meter.running)
        await self._engine.start()

    async def begin(self) -> None:
        """Fill all slots and generate until `end`. The measurement starts once as many responses have ended as there are slots.

        There are `n` more responses than slots: these wait in the engine's own queue, so that no slot is ever free.
        """
        self._num_ended, num_sources = 0, self._engine.slots + self._work.profile.rollout.n
        self._sources = asyncio.gather(*(self._generate() for _ in range(num_sources)))
        while self._num_ended < self._engine.slots:
            self._raise_failure()
            await asyncio.sleep(0.02)
        self._cpu = CpuTime(self._work.place.threads)
        self._before = time.perf_counter(), self._engine.sampled_tokens, self._running_s()

    async def end(self) -> Worked:
        began_s, tokens, running_s = self._before
        seconds = time.perf_counter() - began_s
        worked = Worked(
            tokens=self._engine.sampled_tokens - tokens,
            seconds=seconds,
            cpu_s=self._cpu.spent_s(),
            running_mean=(self._running_s() - running_s) / seconds,
        )
        self._raise_failure()
        self._sources.cancel()
        with suppress(asyncio.CancelledError):
            await self._sources
        return worked

    def _running_s(self) -> float:
        """Integral of the number of running sequences over time."""
        return self._meter.report(version=0, sampled_tokens=0, decode_steps=0, running_tokens=0).sums["running_sequence_s"]

    def _raise_failure(self) -> None:
        if self._sources.done():  # sources end only by failing
            self._sources.result()

    async def _generate(self) -> None:
        """One response after the other. Each `n` successive numbers share a prompt; every process has seeds of its own."""
        work, rollout = self._work, self._work.profile.rollout
        while True:
            number = next(self._numbers)
            sampling = replace(Sampling.of(rollout, rollout.temperature), max_response_tokens=work.length(number))
            seed = hash((work.profile.run.seed, self._index, number))
            prompt = self._prompts[number // rollout.n % len(self._prompts)]
            await self._engine.generate(f"phase-{number}", prompt, sampling, seed)
            self._num_ended += 1


def endless_model(model_dir: Path, directory: Path) -> Path:
    """A copy of the model (by links) in `directory`, whose end-of-sequence id no token has: responses never end early."""
    directory.mkdir(parents=True)
    for path in model_dir.iterdir():
        if path.name != GENERATION_CONFIG:
            (directory / path.name).symlink_to(path.resolve())
    original = model_dir / GENERATION_CONFIG
    content = json.loads(original.read_text(encoding="utf-8")) if original.is_file() else {}
    (directory / GENERATION_CONFIG).write_text(json.dumps({**content, "eos_token_id": NO_SUCH_TOKEN}), encoding="utf-8")
    return directory


class TrainingAlone:
    """One trainer rank, which trains made-up batches over and over. All ranks must be asked for the same number of steps."""

    def __init__(self, rank: int, work: Work) -> None:
        set_up_process(threads=work.place.threads, log_path=work.directory / f"training-{rank}.log")
        self._rank, self._work = rank, work
        self._batches: list[tuple[RankPlan, dict[int, GroupPayload]]] = []
        self._step = 0

    def start(self) -> None:
        from asyncrl_cli.train.balance import plan_train_step
        from asyncrl_cli.train.policy_trainer import PolicyTrainer

        work, training, prompts = self._work, self._work.profile.async_training, self._work.prompts()
        step_groups = training.require_batches * work.profile.trainer.ppo_mini_batch_size
        for batch in range(BATCHES):
            numbers = range(batch * step_groups, (batch + 1) * step_groups)
            groups = [made_up_group(work, number, prompts[number % len(prompts)]) for number in numbers]
            plans = plan_train_step(
                [result for result, _ in groups],
                ranks=work.place.workers,
                num_minibatches=training.require_batches,
                normalize=work.profile.algorithm.normalize_advantages,
            )
            self._batches.append((plans[self._rank], dict(enumerate(payload for _, payload in groups))))
        init_method = f"file://{work.directory}/meeting"
        self._trainer = PolicyTrainer(work.profile, work.place, rank=self._rank, init_method=init_method, total_optimizer_steps=1)

    def measure(self, num_steps: int) -> Worked:
        """Train `num_steps` steps. The time includes waiting for the slowest rank in each step."""
        began_s, cpu, tokens = time.perf_counter(), CpuTime(self._work.place.threads), 0
        for _ in range(num_steps):
            plan, payloads = self._batches[self._step % BATCHES]
            step_in_window = self._step % self._work.profile.async_training.trigger_parameter_sync_step
            self._step += 1
            tokens += self._trainer.train(step_in_window=step_in_window, plan=plan, payloads=payloads).tokens
        return Worked(tokens=tokens, seconds=time.perf_counter() - began_s, cpu_s=cpu.spent_s())


def made_up_group(work: Work, number: int, prompt: list[int]) -> tuple[GroupResult, GroupPayload]:
    """A group whose responses repeat the prompt's tokens; every second one has reward 1."""
    from asyncrl_cli.envs.episode import Episode

    n, episodes = work.profile.rollout.n, []
    for index in range(n):
        length = work.length(number * n + index)
        tokens = list(itertools.islice(itertools.cycle(prompt), length))
        completion = Completion(tokens=tokens, logprobs=[-1.0] * length, versions=[0] * length, finish_reason="length")
        reward = float(index % 2)
        episodes.append(Episode("", {}, seed=0, prompt_tokens=prompt, completion=completion, reward=reward))
    key, metas = AttemptKey(str(number), 0, 0), tuple(episode.meta() for episode in episodes)
    result = GroupResult(key=key, trajectories=metas, failures=(), failed_tokens=0, payload=None)
    return result, GroupPayload(uid=key.uid, epoch=0, attempt=0, trajectories=tuple(episode.trajectory() for episode in episodes))


class CpuTime:
    """CPU seconds that this process and its children spend from now on, per core: those of the busiest thread or, if that is
    more, the busiest process's sum divided by `threads`. (An engine may compute in a child.)

    A plain sum would hide that other programs take cores: two threads with half a core each also add up to 1 s per second.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._began_s = _thread_seconds()

    def spent_s(self) -> float:
        spent_s = {
            pid: [seconds - self._began_s.get(pid, {}).get(thread, 0.0) for thread, seconds in own.items()]
            for pid, own in _thread_seconds().items()
        }
        return max(max(max(own), sum(own) / self._threads) for own in spent_s.values())


def _thread_seconds() -> dict[int, dict[int, float]]:
    """CPU seconds so far by process id and thread id, of this process and all its descendants."""
    seconds: dict[int, dict[int, float]] = {}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # a child that ends while we look
            seconds[process.pid] = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    return seconds
