"""Every group of the run: its prompt, its place in admission, its account in the ledger, its result.

The only writer of `Admission` and `Ledger`: one method per transition, so that the two never disagree and each
transition is one event. No I/O, no waiting.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.loop.admission import Admission
from asyncrl_cli.loop.codec import decode_key, decode_result, encode_key, encode_result
from asyncrl_cli.loop.ledger import Account, Ledger
from asyncrl_cli.loop.ports import AttemptKey, Feed, GroupRequest, GroupResult, Prompt
from asyncrl_cli.loop.settings import LoopSettings

_FAILED_RATIO_FROM_TRAJECTORIES = 64
"""Trajectories after which the share of failed ones is judged: fewer say too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    """A prompt with the number of the attempt and how often staleness has requeued it."""

    prompt: Prompt
    attempt: int = 0
    requeues: int = 0

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.prompt.uid, self.prompt.epoch, self.attempt)


class Groups:
    def __init__(
        self,
        settings: LoopSettings,
        admission: Admission,
        feed: Feed,
        on_transition: Callable[[AttemptKey, Account, Mapping[str, Any]], None],
    ) -> None:
        self.admission = admission
        self.ledger = Ledger()
        self.tokens_discarded = 0
        self.tokens_trained = 0
        self._settings = settings
        self._feed = feed
        self._on_transition = on_transition
        self._again: deque[_Try] = deque()
        self._tries: dict[AttemptKey, _Try] = {}
        self._workers: dict[AttemptKey, str] = {}
        self._results: dict[AttemptKey, GroupResult] = {}
        self._trajectories = 0
        self._failed_trajectories = 0

    def start(self) -> tuple[str, GroupRequest] | None:
        """Admit the next prompt if admission is open: the worker's name and what it should generate."""
        worker = self.admission.choose()
        if worker is None:
            return None
        attempt = self._again.popleft() if self._again else _Try(prompt=self._feed.next())
        key = attempt.key
        self._tries[key], self._workers[key] = attempt, worker.name
        self.admission.admit(key, worker)
        self.ledger.admit(key)
        self._on_transition(key, Account.RUNNING, {"worker": worker.name, "version": worker.version})
        request = GroupRequest(key=key, item=attempt.prompt.item, n=self._settings.n, seed=self._seed(key))
        return worker.name, request

    def finish(self, result: GroupResult) -> None:
        """A group came back. One that was given up meanwhile only adds its tokens to the waste."""
        key = result.key
        self.tokens_discarded += result.failed_tokens
        if key not in self.admission.running:
            self.tokens_discarded += _response_tokens(result)
            return
        self._count_failures(result)
        if len(result.trajectories) < 2:
            self.tokens_discarded += _response_tokens(result)
            self._end(key, Account.DROPPED, "failed")
            return
        self.admission.finish(key, self._workers.pop(key))
        self._results[key] = result
        self.ledger.move(key, Account.FINISHED)
        self._on_transition(key, Account.FINISHED, {})

    def takeable(self, num_groups: int) -> bool:
        if len(self.admission.finished) < num_groups:
            return False
        return len(self.admission.takeable(num_groups)) == num_groups

    def take(self, num_groups: int) -> tuple[GroupResult, ...]:
        keys = self.admission.takeable(num_groups)
        assert len(keys) == num_groups
        self.admission.take(keys)
        for key in keys:
            self.ledger.move(key, Account.TRAINING)
            self._on_transition(key, Account.TRAINING, {})
        return tuple(self._results.pop(key) for key in keys)

    def trained(self, groups: Sequence[GroupResult]) -> None:
        self.admission.trained([group.key for group in groups])
        for group in groups:
            self.tokens_trained += _response_tokens(group)
            del self._tries[group.key]
            self.ledger.move(group.key, Account.TRAINED)
            self._on_transition(group.key, Account.TRAINED, {"tokens": _response_tokens(group)})

    def publish(self) -> list[tuple[str, AttemptKey]]:
        """A new version: give up what has passed its deadline, if the policy says so. Returns (worker, group) to abort."""
        late = self.admission.publish()
        if self._settings.on_stale not in ("drop", "requeue"):
            return []
        aborts = [(self._workers[key], key) for key in late if key in self._workers]
        exhausted = [key for key in late if self._tries[key].requeues >= self._settings.max_requeues]
        for key in late:
            self._give_up(key)
        if exhausted and (self._settings.on_stale, self._settings.on_exhausted) == ("requeue", "fail"):
            raise AsyncrlError(
                f"prompt {exhausted[0].uid} was requeued {self._settings.max_requeues} times for staleness and was stale again",
                hint='raise async_training.max_staleness, or set async_training.on_exhausted = "drop"',
            )
        return aborts

    def lost(self, worker: str) -> int:
        """The worker's process is gone: the prompts that ran there start again, before new ones. Returns how many.

        `max_requeues` does not count these attempts: they say something about the worker, nothing about the prompt.
        """
        keys = [key for key, name in self._workers.items() if name == worker]
        for key in keys:
            attempt = self._tries[key]
            self._end(key, Account.REQUEUED, "worker lost")
            self._again.append(_next_attempt(attempt, requeues=attempt.requeues))
        return len(keys)

    def state(self) -> dict[str, Any]:
        """JSON of everything but payloads and the prompts' items; the order of `finished` is that of `payloads()`."""
        admission = self.admission
        return {
            "version": admission.version,
            "taken_in_window": admission.taken_in_window,
            "trained_groups": admission.trained_groups,
            "tokens_discarded": self.tokens_discarded,
            "tokens_trained": self.tokens_trained,
            "trajectories": [self._trajectories, self._failed_trajectories],
            "ledger": self.ledger.state(),
            "feed": self._feed.state(),
            "running": [self._encode(self._tries[key]) for key in admission.running],
            "again": [self._encode(attempt) for attempt in self._again],
            "finished": [
                {
                    "deadline": deadline,
                    "try": self._encode(self._tries[key]),
                    "result": encode_result(self._results[key]),
                }
                for key, deadline in admission.finished.items()
            ],
        }

    def payloads(self) -> tuple[Any, ...]:
        return tuple(self._results[key].payload for key in self.admission.finished)

    def restore(self, state: Mapping[str, Any], payloads: Sequence[Any], running_tokens: int) -> None:
        """Continue from `state`. Groups that were running start again: a new attempt, their tokens are waste."""
        admission = self.admission
        admission.version = state["version"]
        admission.taken_in_window = state["taken_in_window"]
        admission.trained_groups = state["trained_groups"]
        self.tokens_discarded = state["tokens_discarded"] + running_tokens
        self.tokens_trained = state["tokens_trained"]
        self._trajectories, self._failed_trajectories = state["trajectories"]
        self.ledger.restore(state["ledger"])
        self._feed.restore(state["feed"])
        for entry, payload in zip(state["finished"], payloads, strict=True):
            result = decode_result(entry["result"], payload)
            admission.restore_finished(result.key, entry["deadline"])
            self._results[result.key] = result
            self._tries[result.key] = self._decode(entry["try"])
        for data in state["running"]:
            attempt = self._decode(data)
            self.ledger.move(attempt.key, Account.REQUEUED, "resumed")
            self._on_transition(attempt.key, Account.REQUEUED, {"reason": "resumed"})
            self._again.append(_next_attempt(attempt, requeues=attempt.requeues))
        self._again.extend(self._decode(data) for data in state["again"])

    def _give_up(self, key: AttemptKey) -> None:
        """A group has passed its deadline: requeue its prompt, or drop it for good.

        A prompt that fails the run is requeued too: the checkpoint of the failed run has it, and no late group.
        """
        attempt = self._tries[key]
        if key in self._results:
            self.tokens_discarded += _response_tokens(self._results[key])
        if self._settings.on_stale == "drop":
            self._end(key, Account.DROPPED, "stale")
        elif attempt.requeues >= self._settings.max_requeues and self._settings.on_exhausted == "drop":
            self._end(key, Account.DROPPED, "requeued too often")
        else:
            self._end(key, Account.REQUEUED, "stale")
            self._again.append(_next_attempt(attempt, requeues=attempt.requeues + 1))

    def _end(self, key: AttemptKey, account: Account, reason: str) -> None:
        self.admission.discard(key, self._workers.pop(key, None))
        self._results.pop(key, None)
        del self._tries[key]
        self.ledger.move(key, account, reason)
        self._on_transition(key, account, {"reason": reason})

    def _count_failures(self, result: GroupResult) -> None:
        self._trajectories += len(result.trajectories) + len(result.failures)
        self._failed_trajectories += len(result.failures)
        if self._trajectories < _FAILED_RATIO_FROM_TRAJECTORIES:
            return
        if self._failed_trajectories > self._settings.max_failed_ratio * self._trajectories:
            raise AsyncrlError(
                f"{self._failed_trajectories} of {self._trajectories} trajectories failed, more than task.max_failed_ratio = "
                f"{self._settings.max_failed_ratio} allows; the last one: {(result.failures or ('an earlier one',))[-1]}",
                hint="mend the reward (the run's log has every failure), or raise task.max_failed_ratio",
            )

    def _seed(self, key: AttemptKey) -> int:
        digest = hashlib.blake2b(f"{self._settings.seed}/{key}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) >> 1

    @staticmethod
    def _encode(attempt: _Try) -> dict[str, Any]:
        return {"key": encode_key(attempt.key), "requeues": attempt.requeues}

    def _decode(self, data: Mapping[str, Any]) -> _Try:
        key = decode_key(data["key"])
        return _Try(prompt=self._feed.find(key.uid, key.epoch), attempt=key.attempt, requeues=data["requeues"])


def _next_attempt(attempt: _Try, *, requeues: int) -> _Try:
    return _Try(prompt=attempt.prompt, attempt=attempt.attempt + 1, requeues=requeues)


def _response_tokens(result: GroupResult) -> int:
    return sum(meta.response_tokens for meta in result.trajectories)
