"""Every ledger transition of a run, checked against what may happen to a group, and entered into `Books`.

Also what a group is made of: which workers had its responses, how many trajectories came back, on which
weights their tokens were sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl_cli.contracts.events import Event
from asyncrl_cli.contracts.ports import PartialResult
from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult, PartKey, PartRequest, PartResult
from asyncrl_cli.profile.arithmetic import LoopSettings
from tests.loop.proof.books import Books, LiveAttempt, PartBook
from tests.loop.proof.limits_book import LimitsBook

Check = Callable[[bool, str, str], None]
"""`check(holds, invariant, message)` raises if it does not hold."""


class LedgerWatch:
    """Call `hear(event)` for each event of a group, in order; `submitted` when a worker is asked for a part,
    `part_ended` when it returns one, `lost` when it has died."""

    def __init__(self, settings: LoopSettings, books: Books, check: Check) -> None:
        self.settings = settings
        self.books = books
        self.check = check
        self.fed: list[tuple[str, int]] = []
        self.in_training: tuple[GroupResult, ...] = ()
        self.must_go: set[AttemptKey] = set()
        self.computed: set[tuple[str, AttemptKey]] = set()
        self.rewarded: dict[AttemptKey, tuple[float, ...]] = {}
        """Rewards with the reward model's scores."""
        self.asked: set[PartKey] = set()
        self.limits = LimitsBook(settings)
        self.has_exhausted = False
        self.discarded_tokens = 0
        self.trained_tokens = 0

    def hear(self, event: Event) -> None:
        assert event.key is not None
        handle: Callable[[AttemptKey, Event], None] = getattr(self, f"_{event.name}")
        handle(event.key, event)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what a worker says it cannot keep is lost to a resumed run, whose tokens count as
        discarded."""
        lost_tokens = sum(worker.so_far.rest_tokens for worker in self.books.workers.values())
        state = {
            "books": self.books.state(),
            "fed": [list(prompt) for prompt in self.fed],
            "tokens": [self.discarded_tokens + lost_tokens, self.trained_tokens],
        }
        for worker in self.books.workers.values():
            worker.so_far = PartialResult()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self.books.restore(state["books"])
        self.fed = [(uid, epoch) for uid, epoch in state["fed"]]
        self.discarded_tokens, self.trained_tokens = state["tokens"]

    def submitted(self, worker: str, request: PartRequest) -> None:
        """A worker is asked for a part: the one that was announced, of responses that nobody else has."""
        (key, number), same, asked = request.key, self._same, request.key
        attempt = self.books.live.get(key)
        part = attempt.parts.get(number) if attempt is not None else None
        if attempt is None or part is None:
            self.check(False, "ledger", f"{asked} was never placed")
            return
        self.check(asked not in self.asked, "ledger", f"{asked} is asked for twice")
        same("slots", f"the worker that is asked for {asked}", worker, part.worker)
        same("slots", f"responses of {asked}", len(request.indices), part.num_responses)
        same("ledger", f"indices of {asked}", request.indices, part.indices)
        same("resume", f"what {asked} goes on with", dict(request.partial), part.partial)
        self.asked.add(request.key)

    def part_ended(self, worker: str, result: PartResult) -> None:
        """A worker has returned a part: check its tokens, before the loop sees it."""
        key, number = result.key
        attempt = self.books.live.get(key)
        part = attempt.parts.get(number) if attempt is not None else None
        tokens = sum(meta.response_tokens for meta in result.trajectories)
        self.discarded_tokens += result.failed_tokens
        if attempt is None or part is None or attempt.account != "running":
            self.discarded_tokens += tokens
            return
        self.check(not part.has_ended, "ledger", f"{result.key} has ended twice")
        self._same("slots", f"the worker that returns {result.key}", worker, part.worker)
        part.has_ended = True
        attempt.num_kept += len(result.trajectories)
        attempt.num_broken += sum(failure.kind != "mixed" for failure in result.failures)
        attempt.rewards.update(meta.reward for meta in result.trajectories)
        attempt.tokens += tokens
        attempt.payloads[number] = result.payload
        del self.books.workers[worker].unfinished[result.key]
        book = self.books.workers[worker]
        newest = max(book.version, book.held_when_lost) if book.is_lent else book.version
        self._check_tokens(result, part.version, newest)
        self._check_kept(result, part)

    def _check_tokens(self, result: PartResult, began: int, newest: int) -> None:
        for meta in result.trajectories:
            versions = [version for version, _ in meta.version_tokens]
            tokens = f"{result.key}: token versions {versions}"
            is_rising = versions == sorted(set(versions))
            self.check(is_rising, "token versions", f"{tokens} fall or repeat")
            in_reach = began <= versions[0] and versions[-1] <= newest
            self.check(in_reach, "token versions", f"{tokens}, on weights {began} to {newest}")
            sampled = sum(count for _, count in meta.version_tokens)
            self._same("token versions", "tokens with a version", sampled, meta.response_tokens)
            if not self._trains_mixed:
                self._same("spans", f"{tokens}, without partial rollouts: the span", meta.span, 0)

    def _check_kept(self, result: PartResult, part: PartBook) -> None:
        """What its responses went on from is among its tokens."""
        samples_again = self.settings.profile.async_training.mixed_versions == "requeue"
        if result.failures or samples_again or self.settings.interrupt == "restart":
            return
        kept, has = Counter[int](), Counter[int]()
        for one in part.partial.values():
            kept.update(dict(one.version_tokens))
        for meta in result.trajectories:
            has.update(dict(meta.version_tokens))
        went_on = f"{result.key} went on from tokens of {dict(kept)}"
        self.check(kept <= has, "resume", f"{went_on}, and has {dict(has)}")

    def lost(self, worker: str) -> None:
        """The worker's process is gone, and with it the parts that ran there; those that have ended stay."""
        for key in self.books.workers[worker].unfinished:
            attempt = self.books.live[key.attempt]
            attempt.num_lost += attempt.parts.pop(key.number).num_responses
        self.books.workers[worker].unfinished.clear()

    def recalled(self, worker: str, found: PartialResult) -> None:
        """A lent worker has stopped these parts: they go on elsewhere, from what it says that they have."""
        self.discarded_tokens += found.rest_tokens
        for key in found.stopped:
            self.books.workers[worker].unfinished.pop(key, None)
            kept, attempt = dict(found.responses.get(key, {})), self.books.live.get(key.attempt)
            if attempt is None or attempt.account != "running" or key.number not in attempt.parts:
                self.discarded_tokens += sum(one.tokens for one in kept.values())
                continue
            indices = attempt.parts[key.number].indices
            self.check(set(kept) <= set(indices), "lending", f"{key} has {indices}, and keeps {list(kept)}")
            attempt.num_lost += attempt.parts.pop(key.number).num_responses
            attempt.kept |= kept

    def _running(self, key: AttemptKey, event: Event) -> None:
        books, placed = self.books, event.fields["workers"]
        self._same("restarts", f"what is to be placed again before {key} starts", books.lost_first(), None)
        self._check_placed(key, event, self.settings.profile.rollout.n)
        in_time = books.start_in_time(books.oldest(placed))
        self.check(in_time, "deadlines", f"{key}: started on {placed} it cannot be trained in time")
        self._check_prompt(key)
        books.live[key] = LiveAttempt(account="running")
        books.admitted += 1
        self._place(key, placed)

    def _replaced(self, key: AttemptKey, event: Event) -> None:
        """Responses that were lost start again, within the bound of their group."""
        self._expect(key, "running")
        self._same("restarts", "what is placed again", key, self.books.lost_first())
        attempt = self.books.live[key]
        self._check_placed(key, event, attempt.num_lost)
        before, attempt.num_lost = attempt.deadline, 0
        self._place(key, event.fields["workers"])
        is_rising = attempt.deadline >= before
        self.check(is_rising, "deadlines", f"{key}: the deadline {before} falls to {attempt.deadline}")

    def _check_placed(self, key: AttemptKey, event: Event, num_responses: int) -> None:
        books, placed, same = self.books, event.fields["workers"], self._same
        closed, counted = books.closed(), books.placement_now()
        self.check(not closed, "admission", f"{key} starts, but admission is closed by: {closed}")
        same("slots", f"responses of {key} that are placed", sum(placed.values()), num_responses)
        for name in placed:
            self.check(not books.workers[name].loading, "loads", f"{key} starts on {name} while it loads")
        same("slots", f"where {key} is placed", placed, counted)
        same("loads", f"the version that {key} starts on", event.version, books.oldest(placed))

    def _place(self, key: AttemptKey, placed: Mapping[str, int]) -> None:
        attempt, workers = self.books.live[key], self.books.workers
        for name, num_responses in placed.items():
            part = self._part_on(attempt, name, num_responses)
            attempt.parts[attempt.num_parts] = part
            workers[name].unfinished[PartKey(key, attempt.num_parts)] = num_responses
            attempt.num_parts += 1
        self.check(not attempt.kept, "resume", f"{key}: what was kept of {list(attempt.kept)} is forgotten")
        attempt.deadline = attempt.began + self.settings.schedule.max_staleness

    def _part_on(self, attempt: LiveAttempt, worker: str, num_responses: int) -> PartBook:
        """The first responses that nobody has. Without partial rollouts an unfinished one goes on with its
        own version alone, and only if it gets a slot now."""
        book, n = self.books.workers[worker], self.settings.profile.rollout.n
        version, free_slots = book.version, max(0, book.slots - book.used)
        placed = {index for part in attempt.parts.values() for index in part.indices}
        indices = tuple(index for index in range(n) if index not in placed)[:num_responses]
        part = PartBook(worker=worker, version=version, num_responses=num_responses, indices=indices)
        for place, index in enumerate(indices):
            if (kept := attempt.kept.pop(index, None)) is None:
                continue
            is_of_now = {v for v, _ in kept.version_tokens} == {version} and place < free_slots
            if kept.is_whole or self._trains_mixed or is_of_now:
                part.partial[index] = kept
                part.version = min(part.version, *(v for v, _ in kept.version_tokens))
            else:
                self.discarded_tokens += kept.tokens
        return part

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
        self._same("ledger", "the prompt that starts", (key.uid, key.epoch), self.fed[-1])

    def _finished(self, key: AttemptKey, event: Event) -> None:
        self._check_whole(key)
        kept = self.books.live[key].num_kept
        self.check(kept >= 2, "ledger", f"{key} finished with {kept} trajectories")
        is_judged = "reward" not in self.books.scorers
        is_left_in = is_judged and self._is_equal(key)
        self.check(not is_left_in, "filter", f"{key} finished, and its rewards are equal")
        self._count(key)
        if is_judged:
            self.limits.judged(is_equal=False)
        self.books.live[key].account = "finished"
        self.books.finish_order.append(key)

    def _count(self, key: AttemptKey) -> None:
        self.limits.group_ended(self.books.live[key].num_broken)

    @property
    def _trains_mixed(self) -> bool:
        """Whether a trajectory of several versions may be trained."""
        mixed = self.settings.profile.async_training.mixed_versions
        return self.settings.interrupt in ("keep-kv", "recompute-kv") and mixed == "train"

    def _is_equal(self, key: AttemptKey) -> bool:
        """Whether the group is to be left out for equal rewards."""
        rewards = set(self.rewarded.get(key, ())) or self.books.live[key].rewards
        return self.settings.profile.algorithm.filter_groups and len(rewards) == 1

    def _check_whole(self, key: AttemptKey) -> None:
        """Every response of a running group has come back, exactly once."""
        self._expect(key, "running")
        attempt = self.books.live[key]
        running = [number for number, part in attempt.parts.items() if not part.has_ended]
        self.check(not running and not attempt.num_lost, "ledger", f"{key} ends while parts {running} run")
        indices = sorted(index for part in attempt.parts.values() for index in part.indices)
        self._same("ledger", f"responses of {key}", indices, [*range(self.settings.profile.rollout.n)])

    def _scored(self, key: AttemptKey, event: Event) -> None:
        scorer = event.fields["scorer"]
        self._expect(key, "finished")
        columns = self.books.live[key].columns
        self.check(scorer not in columns, "scores", f"{key} is scored twice by {scorer}")
        is_scored = (scorer, key) in self.computed
        self.check(is_scored, "scores", f"{key} counts as scored, and {scorer} has not scored it")
        columns[scorer] = (scorer, key)
        if scorer == "reward":
            self.limits.judged(is_equal=self._is_equal(key))

    def taken(self) -> None:
        """The next step's groups are chosen: other groups' values are of another critic than they will be
        trained with."""
        self.computed = {(scorer, key) for scorer, key in self.computed if scorer != "critic"}
        for attempt in self.books.live.values():
            if attempt.account == "finished":
                attempt.columns.pop("critic", None)

    def scorer_lost(self, scorer: str) -> None:
        """Its columns may be lost with it, but for rewards, which are values."""
        for attempt in self.books.live.values():
            if attempt.account == "finished" and scorer != "reward":
                attempt.columns.pop(scorer, None)

    def _training(self, key: AttemptKey, event: Event) -> None:
        books = self.books
        self._expect(key, "finished")
        may_take, columns = books.may_take(key), list(books.live[key].columns)
        self.check(may_take, "deadlines", f"{key} is taken, though others then cannot be trained in time")
        self.check(books.is_scored(key), "scores", f"{key} is taken with the columns {columns}")
        self.check(not self._is_equal(key), "filter", f"{key} is taken, and its rewards are equal")
        earlier = books.finish_order[: books.finish_order.index(key)]
        first = next((other for other in earlier if books.is_scored(other) and books.may_take(other)), key)
        self._same("takes", "what is taken first of what finished", key, first)
        books.finish_order.remove(key)
        books.live[key].account = "training"
        books.taken_in_window += 1
        window = f"{books.taken_in_window} groups are taken in a window of {books.window_size}"
        self.check(books.takes_left >= 0, "takes", window)

    def _trained(self, key: AttemptKey, event: Event) -> None:
        self._expect(key, "training")
        is_own = any(group.key == key for group in self.in_training)
        self.check(is_own, "ledger", f"{key} counts as trained and no trainer had it")
        ended = self.books.ended.items()
        again = [other for other, account in ended if account == "trained" and other[:2] == key[:2]]
        self.check(not again, "ledger", f"{key} is trained twice: {again}")
        self.trained_tokens += event.fields["tokens"]
        self._ends(key, "trained")

    def _dropped(self, key: AttemptKey, event: Event) -> None:
        reason = event.fields["reason"]
        if reason in ("failed", "mixed"):
            self._check_whole(key)
            kept, broken = self.books.live[key].num_kept, self.books.live[key].num_broken
            self.check(kept < 2, "ledger", f"{key} is dropped with {kept} trajectories")
            why = "mixed" if self.settings.profile.rollout.n - broken >= 2 else "failed"
            self._same("ledger", f"why {key} is dropped, {broken} of its trajectories failed", reason, why)
            self._count(key)
            self.discarded_tokens += self.books.live[key].tokens
        elif reason == "equal rewards":
            if "reward" in self.books.scorers:
                self._expect(key, "finished")
            else:
                self._check_whole(key)
                self._count(key)
                self.limits.judged(is_equal=True)
            rewards = self.books.live[key].rewards
            self.check(self._is_equal(key), "filter", f"{key} is left out with rewards {rewards}")
            self.discarded_tokens += self.books.live[key].tokens
        else:
            self._given_up(key, "drop" if reason == "stale" else "requeue")
        self._ends(key, "dropped")

    def _requeued(self, key: AttemptKey, event: Event) -> None:
        may_end = self.books.live[key].account in ("running", "finished")
        self.check(may_end, "ledger", f"{key} cannot be requeued")
        self._same("ledger", f"why {key} is requeued", event.fields["reason"], "stale")
        self._given_up(key, "requeue")
        self.books.stale_requeues[key.uid, key.epoch] += 1
        count, training = self.books.stale_requeues[key.uid, key.epoch], self.settings.profile.async_training
        self.has_exhausted |= count > training.max_requeues
        may_exhaust = not self.has_exhausted or training.on_exhausted == "fail"
        self.check(may_exhaust, "staleness", f"{key} was requeued {count} times")
        self._ends(key, "requeued")
        self.books.waiting.append(key)

    def _given_up(self, key: AttemptKey, policy: str) -> None:
        attempt, deadline = self.books.live[key], self.books.live[key].deadline
        on_stale = self.settings.profile.async_training.on_stale
        self._same("staleness", f"the policy that gives up {key}", policy, on_stale)
        is_late = deadline < self.books.version
        self.check(is_late, "staleness", f"{key} is given up before its deadline {deadline}")
        self.discarded_tokens += attempt.tokens + attempt.kept_tokens

    def _expect(self, key: AttemptKey, account: str) -> None:
        attempt = self.books.live.get(key)
        found = attempt.account if attempt else self.books.ended.get(key, "unknown")
        self._same("ledger", f"the account of {key}", found, account)

    def _same(self, invariant: str, what: str, found: object, counted: object) -> None:
        self.check(found == counted, invariant, f"{what}: {found}, should be {counted}")

    def _ends(self, key: AttemptKey, account: str) -> None:
        del self.books.live[key]
        self.must_go.discard(key)
        if key in self.books.finish_order:
            self.books.finish_order.remove(key)
        self.books.ended[key] = account
        for worker in self.books.workers.values():
            worker.unfinished = {
                part: left for part, left in worker.unfinished.items() if part.attempt != key
            }
