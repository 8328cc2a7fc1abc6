"""Evals: each scores one version on the eval sets' prompts, on the workers that hold that version.

A worker that has loaded a version whose eval is due works on the eval until no tries are left; its next load
waits until then. Evals take slots but no window budget. If a worker's process dies, its tries go back into
the queue. If it was the last one on the eval, another worker that holds the version goes on with it, or the
next version that a worker loads is scored instead. Each set has its own result: mean@n and best@N.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from math import comb
from statistics import fmean, median

from asyncrl_cli.base.errors import ExecutorLost
from asyncrl_cli.contracts.events import EvalSummary
from asyncrl_cli.contracts.item import Item, messages_of
from asyncrl_cli.contracts.ports import (
    LONGEST_TEXT,
    EvalOutcome,
    EvalRequest,
    EvalResult,
    EvalTry,
    RolloutWorker,
    Scorer,
)
from asyncrl_cli.contracts.prompt_group import TrajectoryFailure, TrajectoryMeta
from asyncrl_cli.loop.changes import Change, Changes
from asyncrl_cli.loop.data_keys import DataKeys
from asyncrl_cli.loop.fleet import WorkerSlots
from asyncrl_cli.profile.schema import Profile

_CALLS_IN_FLIGHT = 4
"""Concurrent eval calls per worker. Each takes an eighth of the worker's slots (a quarter when nothing else
will run), so that the longest responses of one call do not leave the eval's whole share of the slots
empty."""
SHOWN_PROMPTS = 8
"""Of each set: their answers are part of the eval's event, for reports."""


class RunningEval:
    """The eval of one version."""

    def __init__(self, version: int, tries: Sequence[EvalTry], started_s: float) -> None:
        self.version = version
        self.num_tries = len(tries)
        self.queue = deque(tries)
        self.started_s = started_s
        self.eval_s = 0.0
        """The seconds that it had run when its last worker was lost."""
        self.helpers: dict[str, float] = {}
        """By worker that the eval runs on: since when it does."""
        self.timed_out = False
        self.ended: list[tuple[EvalTry, EvalOutcome]] = []
        self.texts: dict[tuple[str, str], str] = {}
        """By set and uid."""

    def next(self, at_most: int) -> tuple[EvalTry, ...]:
        return tuple(self.queue.popleft() for _ in range(min(at_most, len(self.queue))))

    def put_back(self, tries: Sequence[EvalTry]) -> None:
        """These have no outcome, because their worker was lost or the eval timed out."""
        self.queue.extendleft(reversed(tries))

    def __str__(self) -> str:
        return f"version {self.version}: {len(self.ended)} of {self.num_tries} trajectories"


class Evaluator:
    """Decides when an eval is due, runs it, and integrates the time during which one runs."""

    def __init__(
        self,
        sets: Mapping[str, Sequence[Item]],
        profile: Profile,
        changes: Changes,
        event: Callable[..., None],
        judge: Scorer | None = None,
        data: DataKeys | None = None,
    ) -> None:
        """Call inside the running event loop. `event(name, **fields)` notifies the observers; `judge` is the
        reward model, which reads the tries' `data`."""
        samples = range(profile.eval.samples_per_prompt)
        shown = SHOWN_PROMPTS if profile.logging.samples_every_steps else 0
        self.tries = [
            EvalTry(item, name, sample, is_shown=number < shown and sample == 0)
            for name, items in sets.items()
            for number, item in enumerate(items)
            for sample in samples
        ]
        self.last_version: int | None = None
        """The last version whose eval has begun."""
        self.running: RunningEval | None = None
        self.ended: list[EvalSummary] = []
        """Results that no step's record contains yet."""
        self._profile, self._judge, self._data = profile, judge, data
        self._changes = changes
        self._event = event
        self._now = asyncio.get_running_loop().time
        self._ended_s = 0.0
        self._version_before: int | None = None
        self._left: RunningEval | None = None
        """An eval whose last worker was lost."""

    @property
    def last_ended(self) -> int | None:
        """The last version whose eval has ended."""
        return self._version_before if self.running is not None else self.last_version

    @property
    def held_s(self) -> dict[str, float]:
        """For each worker of the running eval: the seconds for which the eval has held it. Its next load
        waits."""
        helpers = self.running.helpers if self.running is not None else {}
        return {name: self._now() - since_s for name, since_s in helpers.items()}

    @property
    def active_s(self) -> float:
        """Seconds during which an eval ran, so far."""
        return self._ended_s + (self._now() - self.running.started_s if self.running else 0.0)

    def due(self, version: int, is_last: bool) -> bool:
        # In a deterministic run a restarted worker may load an older version again.
        if not self.tries or (self.last_version is not None and version <= self.last_version):
            return False
        every_versions = self._profile.eval.every_versions
        return version == 0 or is_last or 0 < every_versions <= version - (self.last_version or 0)

    def is_left_to(self, slots: WorkerSlots, *, is_last: bool) -> bool:
        """Whether an eval of the version that the worker holds waits for a worker: its last one was lost, or
        it is the run's last and the one that was to begin it was lost before it had loaded that version."""
        if self.running is not None or slots.loading:
            return False
        left = self._left is not None and self._left.version == slots.version
        return left or (is_last and self.due(slots.version, is_last))

    async def work(self, worker: RolloutWorker, slots: WorkerSlots, *, is_last: bool) -> None:
        """Start, join or take over the eval of `slots.version`, if it is due. A worker's sync loop calls this
        after each load, and when `is_left_to` says so."""
        if self.running is None and (
            self.is_left_to(slots, is_last=is_last) or self.due(slots.version, is_last)
        ):
            self._begin(slots.version)
        current = self.running
        if current is None or current.version != slots.version:
            return
        chunk = max(1, slots.slots // (_CALLS_IN_FLIGHT if is_last else 2 * _CALLS_IN_FLIGHT))
        current.helpers[worker.name] = self._now()
        try:
            async with asyncio.timeout_at(current.started_s + self._profile.eval.timeout_s):
                # a lost worker may put tries back after the last call has begun
                while current.queue and not current.timed_out:
                    async with asyncio.TaskGroup() as calls:
                        for _ in range(_CALLS_IN_FLIGHT):
                            calls.create_task(self._score(current, worker, slots, chunk))
        except TimeoutError:
            current.timed_out = True
            await worker.abort_evals()
        finally:
            del current.helpers[worker.name]
        if not current.helpers and self.running is current:
            self._end(current)

    def _begin(self, version: int) -> None:
        """Begin the eval of a version, or go on with it as if it had not stood still meanwhile."""
        left, self._left = self._left, None
        if left is not None and left.version == version:
            left.started_s = self._now() - left.eval_s
            self._ended_s -= left.eval_s
            self.running = left
        else:
            self.running = RunningEval(version, self.tries, self._now())
        self._version_before, self.last_version = self.last_version, version

    def worker_lost(self) -> int | None:
        """Call when a worker's process is gone and its eval calls have ended, which puts their tries back
        into the queue.

        If no other worker works on the eval, it is due again: the next worker that holds its version goes on
        with it, unless a worker begins that of a newer version first. Returns the version of an eval that was
        left, else None.
        """
        current = self.running
        if current is None or current.helpers:
            return None
        current.eval_s = self._now() - current.started_s
        self._ended_s = self.active_s
        self.running, self.last_version, self._left = None, self._version_before, current
        return current.version

    async def _score(
        self, current: RunningEval, worker: RolloutWorker, slots: WorkerSlots, chunk: int
    ) -> None:
        while current.queue and not current.timed_out:
            tries, outcomes = current.next(chunk), None
            request = EvalRequest(version=current.version, tries=tries, seed=self._profile.run.seed)
            slots.change_evals(len(tries))
            try:
                try:
                    result = await worker.evaluate(request)
                finally:
                    slots.change_evals(-len(tries))
                    self._changes.notify(Change.SLOTS)
                outcomes = await self._judged(tries, result)
            finally:
                if outcomes is None:
                    current.put_back(tries)
            for number, text in result.texts.items():
                entry = tries[number]
                current.texts[entry.eval_set, entry.item["uid"]] = text
            current.ended += zip(tries, outcomes, strict=True)

    async def _judged(self, tries: Sequence[EvalTry], result: EvalResult) -> tuple[EvalOutcome, ...]:
        """The outcomes, with the scores of the reward model, if there is one, added. If it is lost meanwhile,
        these trajectories count as failed; scorer_tasks.py restarts it or stops the run."""
        if self._judge is None or self._data is None:
            return result.outcomes
        both, weight = zip(tries, result.outcomes, strict=True), self._profile.reward_model.weight
        items = [entry.item for entry, outcome in both if not isinstance(outcome, TrajectoryFailure)]
        try:
            with self._data.lent([result.payload] if result.payload is not None else []):
                scores = iter(await self._judge.judge(result, items) if items else ())
        except ExecutorLost as error:
            lost = TrajectoryFailure("reward", str(error))
            return tuple(one if isinstance(one, TrajectoryFailure) else lost for one in result.outcomes)
        return tuple(
            one if isinstance(one, TrajectoryFailure) else one.judged(next(scores), weight)
            for one in result.outcomes
        )

    def _end(self, current: RunningEval) -> None:
        """Notify the observers of the eval's result on each set."""
        self._ended_s = self.active_s
        self.running = None
        version, eval_s = current.version, self._now() - current.started_s
        names = dict.fromkeys(entry.eval_set for entry in self.tries)
        if current.timed_out:
            limit, names = f"eval.timeout_s = {self._profile.eval.timeout_s:g}", {}
            message = f"the eval of version {version} gave no result within {limit}"
            self._event("warning", message=message)
        for name in names:
            ended = [(entry, outcome) for entry, outcome in current.ended if entry.eval_set == name]
            failures = [outcome for _, outcome in ended if isinstance(outcome, TrajectoryFailure)]
            summary = summary_of(ended, version=version, eval_s=eval_s)
            if summary is None:
                what = f"the eval of version {version}" + (f" on {name}" if name else "")
                last = failures[-1].text or failures[-1].kind
                self._event("warning", message=f"{what} scored no prompt; the last failure: {last}")
                continue
            self.ended.append(summary)
            fields: dict[str, object] = {"eval_set": name} if name else {}
            if failures:
                fields["failures"] = dict(Counter(failure.kind for failure in failures))
            if summary.interval is not None:
                fields["reward_low"], fields["reward_high"] = summary.interval
            shown = ("eval_s", "reward_mean", "num_prompts", "prompts", "rewards")
            fields |= {key: getattr(summary, key) for key in shown}
            if current.texts:
                fields["samples"] = [
                    sample_of(entry.item, current.texts[name, entry.item["uid"]], outcome.reward)
                    for entry, outcome in ended
                    if entry.is_shown and isinstance(outcome, TrajectoryMeta)
                ]
            self._event("eval", version=version, **fields)
        self._changes.notify()


def sample_of(item: Item, text: str, reward: float) -> dict[str, object]:
    """An answer for people to read, with the end of its prompt, and the reference answer if there is one."""
    prompt = "\n".join(message["content"] for message in messages_of(item["prompt"]))
    expected = {} if item["answer"] is None else {"answer": str(item["answer"])[:LONGEST_TEXT]}
    return {"uid": item["uid"], "prompt": prompt[-LONGEST_TEXT:], "text": text, "reward": reward, **expected}


def summary_of(
    ended: Sequence[tuple[EvalTry, EvalOutcome]], *, version: int, eval_s: float
) -> EvalSummary | None:
    """Summarise the trajectories of one set; None if none of them has a score."""
    scored = [(entry, outcome) for entry, outcome in ended if isinstance(outcome, TrajectoryMeta)]
    if not scored:
        return None
    rewards: dict[str, list[float]] = {uid: [] for uid in sorted({entry.item["uid"] for entry, _ in ended})}
    for entry, meta in scored:
        rewards[entry.item["uid"]].append(meta.reward)
    means = tuple(fmean(known) if known else None for known in rewards.values())
    samples = 1 + max(entry.sample for entry, _ in ended)
    sizes = [*(2**power for power in range(1, samples.bit_length()) if 2**power < samples), samples]
    best = []
    for size in sizes if samples > 1 else ():
        # A prompt counts only if it has that many scored samples.
        if enough := [best_of(scores, size) for scores in rewards.values() if len(scores) >= size]:
            best.append((size, fmean(enough)))
    return EvalSummary(
        version=version,
        reward_mean=fmean(mean for mean in means if mean is not None),
        num_prompts=sum(mean is not None for mean in means),
        response_tokens_median=median(meta.response_tokens for _, meta in scored),
        eval_s=eval_s,
        num_failed=len(ended) - len(scored),
        eval_set=ended[0][0].eval_set,
        samples_per_prompt=samples,
        truncated_ratio=fmean(meta.finish_reason != "stop" for _, meta in scored),
        best=tuple(best),
        rewards=means,
        prompts=sha256("\n".join(rewards).encode()).hexdigest()[:16],
    )


def best_of(rewards: Sequence[float], size: int) -> float:
    """The expected best of `size` samples of a prompt: an unbiased estimate from at least as many samples.

    It is the exact mean of the best over all choices of `size` different samples. For rewards of 0 and 1 it
    is the estimator of pass@k (Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation
    1). verl draws 1,000 times with replacement instead, so one sample may count twice: its best@N is lower on
    average.
    """
    ways = comb(len(rewards), size)
    return sum(reward * (comb(rank, size - 1) / ways) for rank, reward in enumerate(sorted(rewards)))
