"""What must hold in every run of the loop, checked after every event of it (docs/simulation.md).

`Invariants` is an Observer. It hears every ledger transition, step and tick; `watched.py` wraps the ports, so
that it also hears every call to an executor. From both it keeps books of its own (`books.py`) and compares:

    ledger       admitted = running + finished + training + trained + dropped + requeued, here and in the loop
    admission    slots (and prefetch), window budget, deadlines, length of the run; open exactly when it
                 should be
    takes        finish order as far as deadlines allow; R groups; never more than the window holds
    filter       with algorithm.filter_groups a group of equal rewards is never trained, and no other is left
                 out for them
    staleness    strict bound unless `on_stale = "accept"`; 0 if eta is 0; versions never fall within a
                 trajectory
    scores       a group is taken with every scorer's column; scored once (twice only after a loss), first
                 what can be taken first
    loads        versions rise, nothing starts in a load, at most two published versions are on their way
    sync         with weights.mode = "sync" a window is trained only when every worker holds its version
    time         every executor's states, and the parts of every step, sum to the time that passed
    limits       too many failures or groups left out end the run, and nothing else does in their name
    resume       what a checkpoint has of running responses is neither forgotten nor made again
    lending      a worker on the trainer's devices never computes beside it, wakes with the newest weights,
                 and what it stops goes on elsewhere
    restarts     as many as allowed, of workers that are down; only their responses are lost, which are placed
                 again before any new group, and nothing starts before a load
    data         every key of a live group is held, nobody reads what was cleared, and nothing is orphaned but
                 by a worker's death between a put and its report
    ends         at the right number of groups, with nothing left over, within the limits of a stop
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from asyncrl_cli.base.errors import Interrupted
from asyncrl_cli.contracts.events import Event, Overview, StepRecord
from asyncrl_cli.profile.arithmetic import LoopSettings
from tests.loop.proof.books import Books, WorkerBook
from tests.loop.proof.data_watch import DataWatch
from tests.loop.proof.ledger_watch import LedgerWatch
from tests.loop.proof.loop_watch import LoopWatch
from tests.loop.proof.step_watch import StepWatch
from tests.loop.proof.timesheets import Timesheets

if TYPE_CHECKING:
    from asyncrl_cli.loop.pipeline import Pipeline


class InvariantError(AssertionError):
    """`invariant` is the name of what was broken."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant


class Invariants:
    """Implements `contracts.ports.Observer`. Call `watch(pipeline)` when the pipeline is made, `end(error)`
    when it has ended."""

    def __init__(
        self,
        settings: LoopSettings,
        workers: Mapping[str, int],
        *,
        seed: int = 0,
        scorers: tuple[str, ...] = (),
        num_eval_prompts: int = 0,
        lent: Collection[str] = (),
    ) -> None:
        """`workers`: slots by name; `lent`: those on the trainer's devices. `seed`: what a failure names."""
        self.settings = settings
        self.seed = seed
        self._num_eval_prompts = num_eval_prompts
        self._held_at_last_step: dict[str, int] = {}
        books = {name: WorkerBook(slots=slots) for name, slots in workers.items()}
        for name in lent:
            books[name].is_lent = books[name].paused = True
            books[name].sleep(True)
        self.books = Books(settings=settings, workers=books, scorers=scorers)
        self.violation: InvariantError | None = None
        self.counts: Counter[str] = Counter()
        self.trace: list[tuple[float, str]] = []
        self.ledger = LedgerWatch(settings, self.books, self.check)
        self.published = -1
        self.lost: Counter[str] = Counter()
        self.is_lent = False
        self.trainer_does = ""
        self.failed_with: list[str] = []
        self.last_tick: Overview | None = None
        self.stop_s: float | None = None
        self._now = asyncio.get_running_loop().time
        self.times = Timesheets(workers, self._now(), self.check)
        self.steps = StepWatch(settings, self.books, self.ledger, self.times, self.counts, self.check)
        self.data = DataWatch(self)
        self._checkpointed_step = -1
        self._loop: LoopWatch | None = None

    def watch(self, pipeline: Pipeline) -> None:
        """From now on the loop's own counters are compared, too."""
        groups, ledger = pipeline.state.groups, self.ledger
        self.books.governor = pipeline.state.admission.governor
        self._loop = LoopWatch(groups, self.settings, self.books, self.check)
        tokens = (groups.tokens_discarded, groups.tokens_trained)
        counted = (ledger.discarded_tokens, ledger.trained_tokens)
        self.check_same("waste", "tokens discarded and trained at the start", tokens, counted)
        self._loop.everything()
        self.data.watch(groups)
        self.data.check_live()

    def event(self, event: Event) -> None:
        self.counts[event.name] += 1
        self.note(
            f"{event.name} {event.key or ''} {dict(event.fields) or ''} v{event.version} step {event.step}"
        )
        if event.key is not None:
            self.ledger.hear(event)
        else:
            handle: Callable[[Event], None] = getattr(self, f"_on_{event.name}")
            handle(event)
        if event.name not in ("dropped", "requeued"):
            late = self.ledger.must_go
            self.check(not late, "staleness", f"{late} are past their deadline and still there")
        if (
            self._loop is not None and event.name != "failed"
        ):  # what failed may have failed within a transition
            self._loop.ledger()
        if event.name not in ("training", "trained", "failed", "resumed", "requeued", "dropped"):
            self._compare_everything()

    def step(self, record: StepRecord) -> None:
        self.counts["steps"] += 1
        self.note(f"step {record.step}")
        self.steps.record(record)
        self._compare_everything()
        if record.step == self.settings.schedule.train_steps:  # who comes back later is not waited for
            self._held_at_last_step = self._held()

    def tick(self, overview: Overview) -> None:
        self.counts["ticks"] += 1
        books = self.books
        self.check_same("ledger", "a tick's ledger", overview.ledger, books.totals())
        self.check_same("version", "a tick's version", overview.version, books.version)
        if overview.phase not in ("done", "stopped", "failed"):
            for name, worker in books.workers.items():
                held = overview.worker_versions[name]
                has_none = worker.version < 0 and (held < books.version or books.version == 0)
                is_right = held == worker.version or has_none
                self.check(is_right, "loads", f"{name} holds {worker.version}, the loop says {held}")
            self.times.check_report(overview.reports["feed"])
            exceeded = self.ledger.limits.exceeded()
            holds = not exceeded or books.stopping
            self.check(holds, "limits", f"the run goes on, and {exceeded} are exceeded")
            self._compare_everything()
        self.last_tick = overview

    def state(self, record: StepRecord | None = None) -> dict[str, Any]:
        """Called when a snapshot is frozen: then nothing may be in training, and no group that has ended may
        run."""
        trained, in_training = self.books.trained, self.books.totals()["training"]
        self.check(in_training == 0, "snapshot", f"{in_training} groups are in training at a snapshot")
        step = self.steps.number + (record is not None)
        expected = step * self.settings.schedule.step_groups
        self.check(
            trained == expected, "snapshot", f"{trained} groups trained at the snapshot of step {step}"
        )
        running = {key: attempt for key, attempt in self.books.live.items() if attempt.account == "running"}
        whole = [key for key, attempt in running.items() if attempt.has_ended]
        self.check(not whole, "snapshot", f"{whole} have ended, and run at the snapshot of step {step}")
        return {"ledger": self.ledger.state(), "step": step}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.ledger.restore(state["ledger"])
        self.steps.number = self._checkpointed_step = state["step"]

    def end(self, error: BaseException | None, stop_limit_s: float) -> None:
        """The run has ended: nothing is left over if it is done, and a stop was quick."""
        if self.violation is not None:
            raise self.violation
        phase = "done" if error is None else "stopped" if isinstance(error, Interrupted) else "failed"
        assert self.last_tick is not None
        self.check_same("ends", "the phase of the last tick", self.last_tick.phase, phase)
        has_failed = phase == "failed"
        self.check_same("ends", "failed events", self.failed_with, [str(error)] if has_failed else [])
        must_fail = self.ledger.has_exhausted and not has_failed
        self.check(not must_fail, "ends", "a prompt was requeued too often, and the run has not failed")
        if error is None:
            self._check_whole()
        if self.stop_s is not None:
            took_s = self._now() - self.stop_s
            is_quick = took_s <= stop_limit_s
            self.check(is_quick, "ends", f"the stop took {took_s} s, more than {stop_limit_s} s")

    def _held(self) -> dict[str, int]:
        """The newest version that each worker has had, of those that are present."""
        present = {name: worker for name, worker in self.books.workers.items() if not worker.away}
        return {name: max(worker.version, worker.held_when_lost) for name, worker in present.items()}

    def _check_whole(self) -> None:
        books, schedule, same = self.books, self.settings.schedule, self.check_same
        same("ends", "trained groups", books.trained, schedule.groups)
        left = (books.live, books.waiting)
        self.check(not any(left), "ends", f"{books.totals()} at the end, left are {left}")
        num_windows = -(-schedule.train_steps // schedule.window_steps)
        same("ends", "the last version", books.version, num_windows)
        held = self._held_at_last_step or self._held()
        same("ends", "what the workers held", set(held.values()), {num_windows})
        outcomes = [key[:2] for key, account in books.ended.items() if account != "requeued"]
        same("ends", "prompts trained or dropped", len(set(outcomes)), len(self.ledger.fed))

    def check(self, holds: bool, invariant: str, message: str) -> None:
        if not holds:
            self._break(invariant, message)

    def check_same(self, invariant: str, what: str, found: object, counted: object) -> None:
        self.check(found == counted, invariant, f"{what}: {found}, should be {counted}")

    def note(self, text: str) -> None:
        self.trace.append((self._now(), text))

    def stop_requested(self) -> None:
        self.note("a stop is requested")
        self.books.stopping = True
        if self.stop_s is None:
            self.stop_s = self._now()

    def gathered(self, version: int) -> None:
        """The version rises now: only the first publish of a run repeats the version it was at."""
        self.is_lent, books = False, self.books
        if version == books.version and self.published < 0:
            return
        self.check(version == books.version + 1, "version", f"version {version} after {books.version}")
        self.check(books.takes_left == 0, "steps", f"a window ends with {books.takes_left} groups to take")
        self.check(books.totals()["training"] == 0, "steps", "a window ends within a train step")
        books.version, books.taken_in_window = version, 0
        for attempt in books.live.values():
            attempt.columns.pop("prox", None)
        for name, worker in books.workers.items():
            if not worker.loading:
                books.travel.set_out(name, worker.unfinished)
        late = books.late()
        on_stale = self.settings.profile.async_training.on_stale
        is_kept = on_stale != "wait" or not late
        self.check(is_kept, "staleness", f"version {version} and {late} are untaken, past their deadline")
        if on_stale in ("drop", "requeue"):
            self.ledger.must_go = set(late)

    def _on_published(self, event: Event) -> None:
        assert event.version is not None
        is_next = self.published < event.version <= self.books.version
        gathered = f"after {self.published}, gathered is {self.books.version}"
        self.check(is_next, "version", f"version {event.version} is published {gathered}")
        self.published = event.version

    def _on_loaded(self, event: Event) -> None:
        name = event.fields["worker"]
        self.check_same("loads", f"what {name} holds", event.version, self.books.workers[name].version)

    def _on_checkpointed(self, event: Event) -> None:
        assert event.step is not None
        step, before = event.step, self._checkpointed_step
        self.check(step > before, "snapshot", f"checkpoint {step} after {before}")
        self._checkpointed_step = step

    def _on_failed(self, event: Event) -> None:
        self.failed_with.append(event.fields["error"])
        self.ledger.must_go.clear()
        self.books.stopping = True
        if self.stop_s is None:
            self.stop_s = self._now()

    def _on_lost(self, event: Event) -> None:
        name, allowed = event.fields["worker"], self.settings.profile.rollout.max_restarts
        self.lost[name] += 1
        times = self.lost[name]
        is_allowed = times <= allowed
        self.check(is_allowed, "restarts", f"{name} is restarted {times} times, {allowed} are allowed")
        self.check_same(
            "restarts", f"restarts left of {name}", event.fields["restarts_left"], allowed - times
        )
        if name in self.books.scorers:
            self.ledger.scorer_lost(name)
            return
        self._lose(name)

    def _lose(self, name: str) -> None:
        self.ledger.discarded_tokens += self.books.workers[name].lost()
        self.books.travel.lost(name)
        self.ledger.lost(name)

    def _on_away(self, event: Event) -> None:
        """The run goes on without a worker: enough others are there, or about to be."""
        name, least = event.fields["worker"], self.settings.profile.rollout.min_workers
        book = self.books.workers[name]
        others = [one for one in self.books.workers.values() if one is not book and not one.is_lent]
        here = sum(not other.away for other in others)
        is_enough = least is not None and here >= least
        is_enough |= book.is_lent
        self.check(is_enough, "restarts", f"{name} is away, {here} others are not, {least} are needed")
        if not book.down or book.is_lent:
            self._lose(name)
        book.away = True

    def _on_lent(self, event: Event) -> None:
        """The trainer has nothing to do."""
        num_groups = self.settings.schedule.step_groups
        ready = self.books.takeable(num_groups, unscored=True)
        self.check(len(ready) < num_groups, "lending", f"devices are lent, and {ready} could be taken")
        self.check(not self.trainer_does, "lending", f"devices are lent during {self.trainer_does}")

    def _on_recalled(self, event: Event) -> None:
        kept = [name for name, book in self.books.workers.items() if book.has_device]
        self.check(not kept, "lending", f"{kept} still have devices of the trainer")

    def _on_restarted(self, event: Event) -> None:
        name = event.fields["worker"]
        if name in self.books.scorers:
            return
        book = self.books.workers[name]
        self.check(book.down and book.loading, "restarts", f"{name} is back, and was not down")
        book.down = book.away = False

    def _on_resumed(self, event: Event) -> None:
        self.check_same("snapshot", "resumed from step", event.fields["from_step"], self.steps.number)

    def _on_warning(self, event: Event) -> None:
        if "of the data store" not in event.fields["message"]:
            self.steps.warned_in.add(self.books.version)
        if timed_out := re.match(r"the eval of version (\d+) gave no result within", event.fields["message"]):
            self.data.timed_out.add(int(timed_out[1]))

    def _on_orphans(self, event: Event) -> None:
        self.data.swept(event)

    def _on_eval(self, event: Event) -> None:
        assert event.version is not None
        self.check(event.version <= self.books.version, "version", f"an eval of version {event.version}")
        num_ended = event.fields["num_prompts"] + sum(event.fields.get("failures", {}).values())
        self.check_same("evals", "prompts that were scored", num_ended, self._num_eval_prompts)

    def _compare_everything(self) -> None:
        if self._loop is not None:
            self._loop.everything()
            self.data.check_live()

    def _break(self, invariant: str, message: str) -> NoReturn:
        error = InvariantError(invariant, f"seed {self.seed}, {self._now():.3f} s, {invariant}: {message}")
        self.violation = self.violation or error
        self.note(f"BROKEN {error}")
        raise error
