"""Every ledger transition of a run, checked against what may happen to a group, and entered into `Books`.

Also what a group is made of: which worker had it, how many trajectories came back, on which weights their tokens were sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncrl_cli.loop.attempts import AttemptKey, GroupResult
from asyncrl_cli.loop.watching import Event
from asyncrl_cli.profile.arithmetic import LoopSettings
from tests.loop.proof.books import Books, LiveAttempt

Check = Callable[[bool, str, str], None]
"""`check(holds, invariant, message)` raises if it does not hold."""


class LedgerWatch:
    """Call `hear(event)` for each of the ledger's events, in order; `generated` when a worker returns a group."""

    def __init__(self, settings: LoopSettings, books: Books, check: Check) -> None:
        self.settings = settings
        self.books = books
        self.check = check
        self.fed: list[tuple[str, int]] = []
        self.num_kept: dict[AttemptKey, int] = {}
        self.payloads: dict[AttemptKey, Any] = {}
        self.tokens: dict[AttemptKey, int] = {}
        self.in_training: tuple[GroupResult, ...] = ()
        self.must_go: set[AttemptKey] = set()
        self.is_resuming = True
        self.has_exhausted = False
        self.discarded_tokens = 0
        self.trained_tokens = 0

    def hear(self, event: Event) -> None:
        assert event.key is not None
        handle: Callable[[AttemptKey, Event], None] = getattr(self, f"_{event.name}")
        handle(event.key, event)

    def state(self) -> dict[str, Any]:
        return {
            "books": self.books.state(),
            "fed": [list(prompt) for prompt in self.fed],
            "finished": [[self.payloads[key], self.tokens[key]] for key in self.books.finish_order],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.books.restore(state["books"])
        self.fed = [(uid, epoch) for uid, epoch in state["fed"]]
        for key, (payload, tokens) in zip(self.books.finish_order, state["finished"], strict=True):
            self.payloads[key], self.tokens[key] = payload, tokens

    def generated(self, worker: str, result: GroupResult) -> None:
        """A worker has returned a group: check its tokens, before the loop sees it."""
        attempt = self.books.live.get(result.key)
        tokens = sum(meta.response_tokens for meta in result.trajectories)
        self.discarded_tokens += result.failed_tokens
        self.num_kept[result.key], self.payloads[result.key] = len(result.trajectories), result.payload
        self.tokens[result.key] = tokens
        if attempt is None or attempt.account != "running":
            self.discarded_tokens += tokens
            return
        if len(result.trajectories) < 2:
            self.discarded_tokens += tokens
        self.check(attempt.worker == worker, "slots", f"{result.key} started on {attempt.worker}, came back from {worker}")
        newest = self.books.workers[worker].version
        for meta in result.trajectories:
            versions = [version for version, _ in meta.version_tokens]
            is_rising = versions == sorted(set(versions))
            self.check(is_rising, "token versions", f"{result.key}: token versions {versions} fall or repeat")
            in_reach = attempt.began <= versions[0] and versions[-1] <= newest
            self.check(in_reach, "token versions", f"{result.key}: {versions}, on weights {attempt.began} to {newest}")
            sampled = sum(count for _, count in meta.version_tokens)
            self.check(
                sampled == meta.response_tokens, "token versions", f"{sampled} of {meta.response_tokens} tokens have a version"
            )
            if self.settings.interrupt == "drain":
                self.check(meta.span == 0, "spans", f"{result.key}: a span of {meta.span} without partial rollouts")

    def _running(self, key: AttemptKey, event: Event) -> None:
        books = self.books
        name, version = event.fields["worker"], event.version
        assert version is not None
        worker = books.workers[name]
        closed = books.closed()
        self.check(not closed, "admission", f"{key} starts, but admission is closed by: {closed}")
        self.check(not worker.loading, "loads", f"{key} starts on {name} while it loads")
        self.check(version == worker.version, "loads", f"{key} starts on version {version}, {name} holds {worker.version}")
        self.check(books.room_on(worker), "slots", f"{key}: no room on {name}, {worker.used} of {worker.slots} slots are used")
        self.check(books.start_in_time(worker), "deadlines", f"{key}: started on {name} it cannot be trained in time")
        self._check_prompt(key)
        deadline = version + self.settings.schedule.max_staleness
        books.live[key] = LiveAttempt(account="running", worker=name, began=version, deadline=deadline)
        books.admitted += 1
        worker.unfinished[key] = self.settings.profile.rollout.n

    def _check_prompt(self, key: AttemptKey) -> None:
        """A prompt starts once, or again right after it was requeued; requeued ones come first."""
        books = self.books
        self.check(key not in books.live and key not in books.ended, "ledger", f"{key} starts twice")
        if books.waiting:
            before = key._replace(attempt=key.attempt - 1)
            self.check(before in books.waiting, "ledger", f"{key} starts before the requeued {books.waiting}")
            books.waiting.remove(before)
            return
        self.check(key.attempt == 0, "ledger", f"{key}: nothing requeued it")
        self.check((key.uid, key.epoch) == self.fed[-1], "ledger", f"{key} is not what the feed gave: {self.fed[-1]}")

    def _finished(self, key: AttemptKey, event: Event) -> None:
        self._expect(key, "running")
        kept = self.num_kept[key]
        self.check(kept >= 2, "ledger", f"{key} finished with {kept} trajectories")
        self.books.live[key].account = "finished"
        self.books.finish_order.append(key)
        self._free(key)

    def _training(self, key: AttemptKey, event: Event) -> None:
        books = self.books
        self._expect(key, "finished")
        self.check(books.may_take(key), "deadlines", f"{key} is taken, though others then cannot be trained in time")
        earlier = books.finish_order[: books.finish_order.index(key)]
        first = next((other for other in earlier if books.may_take(other)), key)
        self.check(first == key, "takes", f"{key} is taken before {first}, which finished earlier and may be taken")
        books.finish_order.remove(key)
        books.live[key].account = "training"
        books.taken_in_window += 1
        self.check(books.takes_left >= 0, "takes", f"{books.taken_in_window} groups are taken in a window of {books.window_size}")

    def _trained(self, key: AttemptKey, event: Event) -> None:
        self._expect(key, "training")
        is_own = any(group.key == key for group in self.in_training)
        self.check(is_own, "ledger", f"{key} counts as trained and no trainer had it")
        again = [other for other, account in self.books.ended.items() if account == "trained" and other[:2] == key[:2]]
        self.check(not again, "ledger", f"{key} is trained twice: {again}")
        self.trained_tokens += event.fields["tokens"]
        self._ends(key, "trained")

    def _dropped(self, key: AttemptKey, event: Event) -> None:
        reason = event.fields["reason"]
        if reason == "failed":
            self._expect(key, "running")
            kept = self.num_kept[key]
            self.check(kept < 2, "ledger", f"{key} is dropped with {kept} trajectories")
        else:
            self._given_up(key, "drop" if reason == "stale" else "requeue")
        self._ends(key, "dropped")

    def _requeued(self, key: AttemptKey, event: Event) -> None:
        reason = event.fields["reason"]
        self.check(self.books.live[key].account in ("running", "finished"), "ledger", f"{key} cannot be requeued")
        if reason == "stale":
            self._given_up(key, "requeue")
            self.books.stale_requeues[key.uid, key.epoch] += 1
            count = self.books.stale_requeues[key.uid, key.epoch]
            self.has_exhausted |= count > self.settings.profile.async_training.max_requeues
            may_exhaust = not self.has_exhausted or self.settings.profile.async_training.on_exhausted == "fail"
            self.check(may_exhaust, "staleness", f"{key} was requeued {count} times")
        elif reason == "worker lost":
            self._expect(key, "running")
            worker = self.books.live[key].worker
            self.check(self.books.workers[worker].down, "restarts", f"{key} is requeued, and {worker} is not down")
        else:
            self.check(self.is_resuming, "ledger", f"{key} is requeued ({reason}) in the middle of a run")
        self._ends(key, "requeued")
        self.books.waiting.append(key)

    def _given_up(self, key: AttemptKey, policy: str) -> None:
        attempt = self.books.live[key]
        self.check(
            self.settings.profile.async_training.on_stale == policy,
            "staleness",
            f"{key} is given up under {self.settings.profile.async_training.on_stale}",
        )
        self.check(attempt.deadline < self.books.version, "staleness", f"{key} is given up before its deadline {attempt.deadline}")
        if attempt.account == "finished":
            self.discarded_tokens += self.tokens[key]

    def _expect(self, key: AttemptKey, account: str) -> None:
        attempt = self.books.live.get(key)
        found = attempt.account if attempt else self.books.ended.get(key, "unknown")
        self.check(found == account, "ledger", f"{key} is {found} where it should be {account}")

    def _ends(self, key: AttemptKey, account: str) -> None:
        del self.books.live[key]
        self.must_go.discard(key)
        if key in self.books.finish_order:
            self.books.finish_order.remove(key)
        self._free(key)
        self.books.ended[key] = account

    def _free(self, key: AttemptKey) -> None:
        for worker in self.books.workers.values():
            worker.unfinished.pop(key, None)
