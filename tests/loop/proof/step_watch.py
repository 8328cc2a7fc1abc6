"""Every train step of a run: the batch that the trainer is given, and the record that observers get of it."""

from __future__ import annotations

from collections import Counter

from asyncrl_cli.contracts.events import StepRecord
from asyncrl_cli.contracts.prompt_group import GroupResult
from asyncrl_cli.contracts.train_step import TrainBatch
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
        books, settings = self._books, self._settings
        step, window, step_in_window, groups = batch.step, batch.window, batch.step_in_window, batch.groups
        self._check(step == self.number + 1, "steps", f"step {step} after {self.number}")
        self._check(
            window == books.version, "steps", f"trained in window {window}, the version is {books.version}"
        )
        self._check(
            step_in_window == (step - 1) % settings.schedule.window_steps,
            "steps",
            f"step {step} is {step_in_window} in its window",
        )
        self._check_held(window)
        taken = [key for key, attempt in books.live.items() if attempt.account == "training"]
        keys = [group.key for group in groups]
        self._check(
            sorted(keys) == sorted(taken), "ledger", f"the trainer got {keys}, the ledger says {taken}"
        )
        num_groups = len(set(keys))
        self._check(
            num_groups == settings.schedule.step_groups,
            "steps",
            f"{num_groups} groups in a batch of {settings.schedule.step_groups}",
        )
        for group in groups:
            tokens = sum(meta.response_tokens for meta in group.trajectories)
            live = books.live[group.key]
            is_own = group.payload == live.payload and tokens == live.tokens
            self._check(is_own, "ledger", f"{group.key} is trained on what another group generated")
            columns = {name: column for name, column in live.columns.items() if name != "reward"}
            has_all = dict(batch.columns[group.key]) == columns and books.is_scored(group.key)
            self._check(
                has_all, "scores", f"{group.key} is trained with the columns {batch.columns[group.key]}"
            )
            rewards = tuple(meta.reward for meta in group.trajectories)
            is_rewarded = rewards == self._ledger.rewarded.get(group.key, rewards)
            self._check(is_rewarded, "scores", f"{group.key} is trained with the rewards {rewards}")
        self._ledger.in_training = groups
        self._ledger.taken()
        self._check_staleness(groups, window)

    def record(self, record: StepRecord) -> None:
        books, settings = self._books, self._settings
        self.number += 1
        self._check(
            record.step == self.number, "steps", f"step {record.step} is recorded as number {self.number}"
        )
        self._check(
            record.groups == self._ledger.in_training,
            "steps",
            f"the record of step {record.step} has other groups",
        )
        tokens = (record.tokens_discarded, record.tokens_trained)
        mine = (self._ledger.discarded_tokens, self._ledger.trained_tokens)
        self._check(tokens == mine, "waste", f"{tokens} tokens are discarded and trained, counted {mine}")
        trained = record.ledger["trained"]
        self._check(trained == books.trained, "ledger", f"{trained} trained, counted {books.trained}")
        self._check(
            dict(record.ledger) == books.totals(), "ledger", f"{record.ledger}, counted {books.totals()}"
        )
        is_short = (
            record.step == settings.schedule.train_steps and record.step % settings.schedule.window_steps > 0
        )
        windows = record.step // settings.schedule.window_steps + is_short
        self._check(
            record.version == windows == books.version,
            "version",
            f"version {record.version} after step {record.step}",
        )
        self._times.check_record(record)

    def _check_held(self, window: int) -> None:
        """weights.mode = "sync": nothing is trained before every worker holds the weights that the last
        window made.

        One that was lost since holds none, and loads them beside training.
        """
        workers = self._books.workers.items()
        held = {
            name: worker.version for name, worker in workers if worker.version >= 0 or not worker.was_lost
        }
        is_in_step = self._settings.profile.weights.mode == "async" or set(held.values()) <= {window}
        self._check(is_in_step, "sync", f"the trainer goes on in window {window} and the workers hold {held}")

    def _check_staleness(self, groups: tuple[GroupResult, ...], window: int) -> None:
        settings = self._settings
        oldest = min(meta.oldest for group in groups for meta in group.trajectories)
        newest = max(meta.newest for group in groups for meta in group.trajectories)
        self._check(
            newest <= window, "staleness", f"tokens of version {newest} are trained in window {window}"
        )
        bound = 0 if settings.schedule.eta == 0 else settings.schedule.max_staleness
        if settings.profile.async_training.on_stale != "accept":
            self._check(
                window - oldest <= bound,
                "staleness",
                f"tokens of version {oldest} are trained in window {window}, over {bound}",
            )
        elif window - oldest > settings.schedule.max_staleness:
            self._counts["accepted stale batches"] += 1
            self._check(
                window in self.warned_in,
                "staleness",
                f"stale groups were accepted in window {window} without a warning",
            )
        self._counts[f"staleness {window - oldest}"] += 1
