"""Overviews of the run, and the causes of its waits in words: why admission is closed, why a worker lacks the
newest weights, and which groups the trainer waits for.

Admission knows only the rule that closes it (`Closed`). The cause is whatever some executor is doing at that
moment. These functions find it in the same state that the loop acts on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from asyncrl_cli.contracts.events import ENDED, Overview
from asyncrl_cli.loop.admission import Closed
from asyncrl_cli.loop.fleet import WorkerSlots
from asyncrl_cli.loop.run_state import RunState
from asyncrl_cli.measure.machines import GENERATE
from asyncrl_cli.measure.meters import PROMPTS
from asyncrl_cli.measure.states import ExecutorReport, State

_SHOWN_REASONS = 2
"""How many are listed: each of hundreds of workers may have one."""


def overview(run: RunState) -> Overview:
    """The run now. Executors report late, or not at all during a long step. So where the loop itself knows
    what an executor does and waits for, that replaces what was reported. Times in states are always the
    executor's own."""
    admission, executors, phase = run.admission, run.executors, run.progress.phase
    running_eval, has_ended, stopping = run.evaluator.running, phase in ENDED, run.failure.stopping
    closed, cause = closing(run)
    reports = executors.reports.latest
    if not has_ended:
        reports = {name: _corrected(run, report, closed, cause) for name, report in reports.items()}
    return Overview(
        phase="stopping" if stopping and not has_ended else phase,
        time_s=run.progress.time_s,
        step=run.progress.step,
        version=run.version,
        admission=closed,
        admission_cause=cause,
        window_taken=admission.taken_in_window,
        window_groups=admission.window_groups,
        window_budget=admission.budget,
        governor=str(admission.governor or ""),
        lending=_lending(run),
        ledger=admission.ledger.totals(),
        reports=reports,
        worker_versions={name: worker.version for name, worker in admission.workers.items()},
        eval_running=str(running_eval) if running_eval else "",
        checkpoint=run.progress.checkpoint,
        restarting={} if stopping or has_ended else executors.restarting | executors.away,
        data=run.groups.data.status(),
    )


def _corrected(run: RunState, report: ExecutorReport, closed: str, cause: str) -> ExecutorReport:
    """The report, corrected by what the loop itself knows."""
    if report.role == "trainer":
        waits = [what for who, what in run.changes.named().items() if who.startswith("trainer")]
        state, why = run.executors.trainer_call or (State.STARVED, waits[0] if waits else "")
        if (state, report.state) == (State.BUSY, State.SCORING):  # a part of the call
            state = State.SCORING
        return replace(report, state=state, waiting_for=why)
    if report.role == "feed":
        state = State.BLOCKED if closed else State.BUSY
        return replace(report, state=state, waiting_for=closed and f"admission: {closed} ({cause})")
    if report.role == "scorer":
        gauges = report.gauges | {"waiting_groups": float(len(run.groups.unscored(report.name)))}
        is_starved = report.state is State.STARVED
        missing = run.changes.named().get(report.name, "") if is_starved else report.waiting_for
        return replace(report, waiting_for=missing, gauges=gauges)
    if report.role in ("rollout", GENERATE) and report.waiting_for == PROMPTS and closed:
        return replace(report, waiting_for=f"admission: {closed}")
    return report


def _lending(run: RunState) -> str:
    """To whom the trainer's devices are lent, and since when; "" if they are not."""
    if not (lent := run.executors.lent):
        return ""
    lent_s = run.now_s() - min(lent.values())
    return f"the trainer's devices generate since {lent_s:.0f} s: {_first_few(lent)}"


def closing(run: RunState) -> tuple[str, str]:
    """The rule that keeps admission closed, and its present cause in words; both "" if admission is open.

    The rule is `Admission.closed()`, except that it is "restart" if no worker has a process (admission counts
    those as loading).
    """
    admission, workers = run.admission, run.admission.workers.values()
    closed, cause = admission.closed(), ""
    match closed:
        case Closed.STOPPING:
            cause = "the run is stopping"
        case Closed.END:
            cause = "every group of the run has started"
        case Closed.WINDOW:
            next_opens = f"version {admission.version + 1} opens the next"
            cause = f"all {admission.budget} groups of the window have started, {next_opens}"
        case Closed.IN_FLIGHT:
            assert admission.governor is not None
            most = admission.governor.most_in_flight
            cause = f"{admission.in_flight} of at most {most} sequences run: engines preempted too many"
        case Closed.LOADING:
            cause = _first_few(lags(run))
        case Closed.SLOTS:
            up = [worker for worker in workers if not worker.down]
            in_use = sum(min(worker.used, worker.slots) for worker in up)
            queued = sum(max(0, worker.used - worker.slots) for worker in up)
            evals, running_eval = sum(worker.eval_sequences for worker in up), run.evaluator.running
            slots = f"{in_use} of {sum(worker.slots for worker in up)} in use"
            slots += f", {queued} sequences queued" if queued else ""
            if running_eval and evals:
                slots += f", {evals} by the eval of version {running_eval.version}"
            cause = _first_few([slots, *lags(run, [worker for worker in workers if worker.loading])])
        case Closed.DEADLINES:
            # Only lagging workers can be the cause: on workers with the newest weights the window's budget
            # closes first.
            cause = _first_few(lags(run, admission.refused()))
    return "restart" if closed is Closed.LOADING and admission.fleet.is_gone() else closed.value, cause


def groups_wait(run: RunState) -> str:
    """What is missing while the trainer waits for the groups of a step."""
    ledger, needed = run.groups.ledger, run.settings.schedule.step_groups
    takeable = ""
    if len(ledger.finished) >= needed:
        num_takeable = len(run.admission.takeable(needed))
        takeable = f" (only {num_takeable} takeable before groups that are due earlier)"
    groups = f"{len(ledger.finished)} finished{takeable}, {len(ledger.running)} running"
    reports = run.executors.reports.latest
    waiting = [(name, report) for name, report in reports.items() if report.state is State.WAITING]
    tools = _first_few(f"{name} {_tools(report)}" for name, report in waiting)
    return _with_admission(run, f"{needed} takeable groups: {groups}", tools)


def scores_wait(run: RunState) -> str:
    """What is missing while the trainer waits for scorers. (Enough groups have finished.)"""
    needed, num_finished = run.settings.schedule.step_groups, len(run.groups.ledger.finished)
    queues = []
    for name in run.admission.scorers:
        if queue := len(run.groups.unscored(name)):
            restart = run.executors.restarting.get(name)
            queues.append(
                f"{queue} wait for {name}" + (f", which is being restarted ({restart})" if restart else "")
            )
    takeable = f"{len(run.admission.takeable(needed))} takeable"
    return f"{needed} scored groups: {takeable}; of {num_finished} finished, {_first_few(queues)}"


def window_wait(run: RunState) -> str:
    """Colocate: what the trainer waits for before it gets the resources: first the window's groups, then
    evals and loads."""
    ledger, needed = run.groups.ledger, run.admission.takes_left
    if len(ledger.finished) == needed:
        return _first_few([*eval_holds(run), *lags(run)])
    groups = f"{len(ledger.finished)} of {needed} groups finished, {len(ledger.running)} running"
    return _with_admission(run, f"the whole window: {groups}")


def _with_admission(run: RunState, *texts: str) -> str:
    """`texts`, then the rule that keeps admission closed (the feed's wait names its cause), then the workers
    that an eval holds."""
    closed = closing(run)[0]
    waits = f"admission waits: {closed}" if closed else ""
    return "; ".join(filter(None, [*texts, waits, _first_few(eval_holds(run))]))


def lags(run: RunState, workers: Iterable[WorkerSlots] | None = None) -> list[str]:
    """Why `workers` (default: all that are present) cannot generate with the newest weights. Those that can
    are left out."""
    asked = run.admission.fleet.present() if workers is None else workers
    return [lag for worker in asked if (lag := _lag(run, worker))]


def _lag(run: RunState, worker: WorkerSlots) -> str:
    """Why the worker cannot generate with the newest weights; "" if it can."""
    name, begun, newest = worker.name, worker.begun, run.sync.newest
    if worker.away:
        return f"{name} is away" if name in run.executors.away else ""  # else it is asleep
    if worker.down:
        number = run.executors.restarting.get(name)
        return f"{name} is being restarted" + (f" ({number})" if number else "")
    if begun is not None and not worker.received:
        return f"{name} is receiving version {begun}"
    if begun is not None:
        left = _unfinished(run, worker) if run.settings.interrupt == "drain" else ""
        return f"{name} is {f'finishing {left} before it loads' if left else 'loading'} version {begun}"
    if worker.version >= run.version:
        return ""
    if hold := _hold(run, name):
        return hold
    if newest is not None and newest.version >= run.version:
        return f"{name} is about to receive version {run.version}"
    return f"version {max(run.version, run.sync.withdrawn + 1)} is being published"


def _unfinished(run: RunState, worker: WorkerSlots) -> str:
    """The responses that a drain waits for, and what these wait for if none of them runs; "" if there are
    none."""
    report, left = run.executors.reports.latest.get(worker.name), worker.unfinished_sequences
    if report is not None and not run.settings.profile.rollout.hold_slots:
        left += int(report.gauges.get("waiting_trajectories", 0))
    tools = _tools(report)
    return (f"{left} responses" + (f" ({tools})" if tools else "")) if left else ""


def _tools(report: ExecutorReport | None) -> str:
    """What the worker waits for if all its trajectories wait for tools; "" otherwise."""
    return f"waits for {report.waiting_for}" if report is not None and report.state is State.WAITING else ""


def restarts(run: RunState) -> str:
    """Which workers have no process and are being restarted."""
    return _first_few(lags(run, [worker for worker in run.admission.fleet.present() if worker.down]))


def eval_holds(run: RunState) -> list[str]:
    """For every worker that an eval runs on: which eval holds it, and for how long it has done so."""
    return [_hold(run, name) for name in run.evaluator.held_s]


def _hold(run: RunState, name: str) -> str:
    running, held_s = run.evaluator.running, run.evaluator.held_s.get(name)
    if running is None or held_s is None:
        return ""
    return f"the eval of version {running.version} has held {name} for {held_s:.0f} s"


def _first_few(reasons: Iterable[str]) -> str:
    """The first few distinct reasons, and how many more there are; "" for none."""
    different = list(dict.fromkeys(reasons))
    more = [f"{len(different) - _SHOWN_REASONS} more"] if len(different) > _SHOWN_REASONS else []
    return ", ".join([*different[:_SHOWN_REASONS], *more])
