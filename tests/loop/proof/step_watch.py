"""Every train step of a run: the batch that the trainer is given, and the record that observers get of it."""

from __future__ import annotations

from collections import Counter

from asyncrl_cli.contracts.events import StepRecord
from asyncrl_cli.contracts.prompt_group import GroupResult, TrainBatch
from asyncrl_cli.profile.arithmetic import LoopSettings
from tests.loop.proof.books import Books
from tests.loop.proof.ledger_watch import Check, LedgerWatch
from tests.loop.proof.timesheets import Timesheets


class StepWatch:
    """`number` of the last step recorded; `warned_in`: versions in which the loop has warned of stale
    groups."""

    def __init__(
        self,
        settings: LoopSettings,
        books: Books,
        ledger: LedgerWatch,
        times: Timesheets,
        counts: Counter[str],
        check: Check,
    ) -> None:
        """`counts` is added to: batches by the staleness of their oldest token."""
        self.number = 0
        self.warned_in: set[int] = set()
        self._settings = settings
        self._books = books
        self._ledger = ledger
        self._times = times
        self._counts = counts
        self._check = check

    def batch_given(self, batch: TrainBatch) -> None:
        """The trainer is given a batch."""
        books, schedule, check = self._books, self._settings.schedule, self._check
        step, window, groups = batch.step, batch.window, batch.groups
        check(step == self.number + 1, "steps", f"step {step} after {self.number}")
        check(window == books.version, "steps", f"trained in window {window} of version {books.version}")
        in_window = batch.step_in_window
        check(
            in_window == (step - 1) % schedule.window_steps,
            "steps",
            f"step {step} is {in_window} in its window",
        )
        self._check_held(window)
        if self._settings.profile.placement.colocate:
            busy = [name for name, book in books.workers.items() if not book.paused and not book.down]
            check(not busy, "colocate", f"step {step} is trained on what {busy} have not given up")
        taken = [key for key, attempt in books.live.items() if attempt.account == "training"]
        keys = [group.key for group in groups]
        check(sorted(keys) == sorted(taken), "ledger", f"the trainer got {keys}, the ledger says {taken}")
        check(len(set(keys)) == schedule.step_groups, "steps", f"{len(set(keys))} groups in a batch")
        for group in groups:
            key, live = group.key, books.live[group.key]
            tokens = sum(meta.response_tokens for meta in group.trajectories)
            is_own = group.payload == live.payload and tokens == live.tokens
            check(is_own, "ledger", f"{key} is trained on what another group generated")
            has_all = {*batch.columns} == {*live.columns} - {"reward"} and books.is_scored(key)
            check(has_all, "scores", f"{key} is trained with the columns {batch.columns}")
            rewards = tuple(meta.reward for meta in group.trajectories)
            is_rewarded = rewards == self._ledger.rewarded.get(key, rewards)
            check(is_rewarded, "scores", f"{key} is trained with the rewards {rewards}")
        self._ledger.in_training = groups
        self._ledger.taken()
        self._check_staleness(groups, window)

    def record(self, record: StepRecord) -> None:
        books, schedule, check, step = self._books, self._settings.schedule, self._check, record.step
        self.number += 1
        check(step == self.number, "steps", f"step {step} is recorded as number {self.number}")
        check(
            record.groups == self._ledger.in_training, "steps", f"the record of step {step} has other groups"
        )
        tokens = (record.tokens_discarded, record.tokens_trained)
        counted = (self._ledger.discarded_tokens, self._ledger.trained_tokens)
        check(tokens == counted, "waste", f"{tokens} tokens are discarded and trained, counted {counted}")
        check(dict(record.ledger) == books.totals(), "ledger", f"{record.ledger}, counted {books.totals()}")
        is_short = step == schedule.train_steps and step % schedule.window_steps > 0
        windows = step // schedule.window_steps + is_short
        holds = record.version == windows == books.version
        check(holds, "version", f"version {record.version} after step {step}")
        self._times.check_record(record)

    def _check_held(self, window: int) -> None:
        """weights.mode = "sync": nothing is trained before every worker holds the weights that the last
        window made.

        One that was lost since holds none, and loads them beside training.
        """
        workers = self._books.workers.items()
        own = [(name, book) for name, book in workers if not book.is_lent]
        held = {name: book.version for name, book in own if book.version >= 0 or not book.was_lost}
        is_in_step = self._settings.profile.weights.mode == "async" or set(held.values()) <= {window}
        self._check(is_in_step, "sync", f"the trainer goes on in window {window} and the workers hold {held}")

    def _check_staleness(self, groups: tuple[GroupResult, ...], window: int) -> None:
        settings, bound = self._settings, self._settings.schedule.max_staleness
        oldest = min(meta.oldest for group in groups for meta in group.trajectories)
        newest = max(meta.newest for group in groups for meta in group.trajectories)
        trained = f"are trained in window {window}"
        self._check(newest <= window, "staleness", f"tokens of version {newest} {trained}")
        if settings.profile.async_training.on_stale != "accept":
            bound = 0 if settings.schedule.eta == 0 else bound
            is_bounded = window - oldest <= bound
            self._check(is_bounded, "staleness", f"tokens of version {oldest} {trained}, over {bound}")
        elif window - oldest > bound:
            self._counts["accepted stale batches"] += 1
            is_warned = window in self.warned_in
            self._check(is_warned, "staleness", f"stale groups {trained} without a warning")
        self._counts[f"staleness {window - oldest}"] += 1
