"""Snapshots of the run, and the causes of its waits in words: why admission is closed, why a worker lacks the
newest weights, and which groups the trainer waits for.

Admission knows only the rule that closes it (`Closed`). The cause is whatever some executor is doing at that
moment. These functions find it in the same state that the loop acts on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from asyncrl_cli.contracts.events import ENDED, Snapshot
from asyncrl_cli.loop.admission import Closed
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.fleet import WorkerSlots
from asyncrl_cli.measure.states import ExecutorReport, State

_SHOWN_WORKERS = 2
"""How many reasons are listed: hundreds of workers may each have one."""


def snapshot(board: Board) -> Snapshot:
    """The run now. Executors report late, or not at all during a long step. So where the loop itself knows
    what an executor does and waits for, that replaces what was reported. Times in states are always the
    executor's own."""
    admission, running_eval, has_ended = board.admission, board.evaluator.running, board.phase in ENDED
    closed, cause = closing(board)
    return Snapshot(
        phase="stopping" if board.stopping and not has_ended else board.phase,
        time_s=board.time_before_s + board.now_s(),
        step=board.step,
        version=board.version,
        admission=closed,
        admission_cause=cause,
        window_taken=admission.taken_in_window,
        window_groups=admission.window_groups,
        window_budget=admission.budget,
        ledger=board.ledger.totals(),
        reports={name: _as_known(board, report, closed) for name, report in board.reports.latest.items()},
        worker_versions={name: worker.version for name, worker in admission.workers.items()},
        eval_running=str(running_eval) if running_eval else "",
        checkpoint=board.checkpoint,
        restarting={} if board.stopping or has_ended else board.restarting | board.away,
    )


def _as_known(board: Board, report: ExecutorReport, closed: str) -> ExecutorReport:
    """The report, corrected by what the loop itself knows. `closed`: the rule that keeps admission closed."""
    if board.phase in ENDED:
        return report
    if report.role == "trainer":
        waits = [what for who, what in board.changes.named().items() if who.startswith("trainer")]
        state, why = board.trainer_call or (State.STARVED, waits[0] if waits else "")
        return replace(report, state=state, waiting_for=why)
    if report.role == "feed":
        wait = admission_wait(board)
        return replace(
            report, state=State.BLOCKED if wait else State.BUSY, waiting_for=wait and f"admission: {wait}"
        )
    if report.role == "scorer":
        gauges = report.gauges | {"waiting_groups": float(len(board.groups.unscored(report.name)))}
        missing = (
            board.changes.named().get(report.name, "")
            if report.state is State.STARVED
            else report.waiting_for
        )
        return replace(report, waiting_for=missing, gauges=gauges)
    if report.role == "rollout" and report.state is State.STARVED and closed:
        return replace(report, waiting_for=f"admission: {closed}")
    return report


def closing(board: Board) -> tuple[str, str]:
    """The rule that keeps admission closed, and its present cause in words; both "" if admission is open.

    The rule is `Admission.closed()`, except that it is "restart" if no worker has a process (admission counts
    those as loading).
    """
    admission = board.admission
    closed = admission.closed()
    match closed:
        case Closed.OPEN:
            cause = ""
        case Closed.STOPPING:
            cause = "the run is stopping"
        case Closed.END:
            cause = "every group of the run has started"
        case Closed.WINDOW:
            cause = (
                f"all {admission.budget} groups of the window have started, version "
                f"{admission.version + 1} opens the next"
            )
        case Closed.LOADING:
            cause = _some(lags(board))
        case Closed.SLOTS:
            asleep = [worker for worker in admission.workers.values() if worker.loading]
            cause = _some([_slots_in_use(board), *lags(board, asleep)])
        case Closed.DEADLINES:
            # Only lagging workers can be the cause: on workers with the newest weights the window's budget
            # closes first.
            cause = _some(lags(board, admission.refused()))
    return "restart" if closed is Closed.LOADING and admission.fleet.is_gone() else closed.value, cause


def admission_wait(board: Board) -> str:
    """Rule and cause as one text, like `slots (64 of 64 in use)`; "" if admission is open."""
    closed, cause = closing(board)
    return closed and f"{closed} ({cause})"


def groups_wait(board: Board) -> str:
    """What is missing while the trainer waits for the groups of a step."""
    ledger, needed = board.ledger, board.schedule.step_groups
    finished, running = len(ledger.finished), len(ledger.running)
    takeable = ""
    if finished >= needed:
        takeable = (
            f" (only {len(board.admission.takeable(needed))} takeable before groups that are due earlier)"
        )
    tools = _some(
        f"{name} {waits}" for name, report in board.reports.latest.items() if (waits := _tools(report))
    )
    return _with_admission(
        board, f"{needed} takeable groups: {finished} finished{takeable}, {running} running", tools
    )


def scores_wait(board: Board) -> str:
    """What is missing while the trainer waits for scorers. (Enough groups have finished.)"""
    needed, finished = board.schedule.step_groups, len(board.ledger.finished)
    queues = {scorer.name: len(board.groups.unscored(scorer.name)) for scorer in board.scorers}
    restarts = {name: f", which is being restarted ({number})" for name, number in board.restarting.items()}
    waits = _some(
        f"{queue} wait for {name}{restarts.get(name, '')}" for name, queue in queues.items() if queue
    )
    return (
        f"{needed} scored groups: {len(board.admission.takeable(needed))} takeable; of {finished} "
        f"finished, {waits}"
    )


def window_wait(board: Board) -> str:
    """Colocate: what the trainer waits for before it gets the resources: first the window's groups, then
    evals and loads."""
    ledger, needed = board.ledger, board.admission.window_size
    finished = len(ledger.finished)
    if finished < needed:
        return _with_admission(
            board, f"the whole window: {finished} of {needed} groups finished, {len(ledger.running)} running"
        )
    return _some([*eval_holds(board), *lags(board)])


def lags(board: Board, workers: Iterable[WorkerSlots] | None = None) -> list[str]:
    """Why `workers` (default: all that are present) cannot generate with the newest weights. Those that can
    are left out."""
    asked = board.admission.fleet.present() if workers is None else workers
    return [lag for worker in asked if (lag := _lag(board, worker))]


def _lag(board: Board, worker: WorkerSlots) -> str:
    """Why the worker cannot generate with the newest weights; "" if it can."""
    name, begun = worker.name, worker.begun
    if worker.away:
        return f"{name} is away"
    if worker.down:
        return f"{name} is being restarted" + (
            f" ({board.restarting[name]})" if name in board.restarting else ""
        )
    if begun is not None and not worker.received:
        return f"{name} is receiving version {begun}"
    if begun is not None and board.settings.interrupt == "drain" and (left := _unfinished(board, worker)):
        return f"{name} is finishing {left} before it loads version {begun}"
    if begun is not None:
        return f"{name} is loading version {begun}"
    if worker.version >= board.version:
        return ""
    if name in board.evaluator.held_s:
        return _hold(board, name)
    if board.sync.newest is not None and board.sync.newest.version >= board.version:
        return f"{name} is about to receive version {board.version}"
    return f"version {max(board.version, board.sync.withdrawn + 1)} is being published"


def _unfinished(board: Board, worker: WorkerSlots) -> str:
    """The responses that a drain waits for, and what these wait for if none of them runs; "" if there are
    none."""
    report = board.reports.latest.get(worker.name)
    without_slot = (
        0
        if report is None or board.profile.rollout.hold_slots
        else report.gauges.get("waiting_trajectories", 0)
    )
    left = worker.unfinished_sequences + int(without_slot)
    tools = _tools(report)
    return (f"{left} responses" + (f" ({tools})" if tools else "")) if left else ""


def _tools(report: ExecutorReport | None) -> str:
    """What the worker waits for if all its trajectories wait for tools; "" otherwise."""
    return f"waits for {report.waiting_for}" if report is not None and report.state is State.WAITING else ""


def older_loads(board: Board) -> str:
    """What the trainer waits for before it may publish one more version: what each worker with an unfinished
    load is doing."""
    begun = [worker for worker in board.admission.workers.values() if worker.begun is not None]
    return f"workers to finish older loads: {', '.join(lags(board, begun))}"


def restarts(board: Board) -> str:
    """Which workers have no process and are being restarted."""
    return _some(lags(board, [worker for worker in board.admission.fleet.present() if worker.down]))


def eval_holds(board: Board) -> list[str]:
    """For every worker that an eval runs on: which eval holds it, and for how long it has done so."""
    return [_hold(board, name) for name in board.evaluator.held_s]


def _hold(board: Board, name: str) -> str:
    running = board.evaluator.running
    assert running is not None
    return f"the eval of version {running.version} has held {name} for {board.evaluator.held_s[name]:.0f} s"


def _slots_in_use(board: Board) -> str:
    up = [worker for worker in board.admission.workers.values() if not worker.down]
    evals = sum(worker.eval_sequences for worker in up)
    running = board.evaluator.running
    by_eval = f", {evals} by the eval of version {running.version}" if running is not None and evals else ""
    in_use, queued = (
        sum(min(worker.used, worker.slots) for worker in up),
        sum(max(0, worker.used - worker.slots) for worker in up),
    )
    return (
        (f"{in_use} of {sum(worker.slots for worker in up)} in use")
        + (f", {queued} sequences queued" if queued else "")
        + by_eval
    )


def _with_admission(board: Board, *texts: str) -> str:
    """`texts`, then the rule that keeps admission closed (the feed's wait names its cause), then the workers
    that an eval holds."""
    closed = closing(board)[0]
    return "; ".join(
        filter(None, [*texts, closed and f"admission waits: {closed}", _some(eval_holds(board))])
    )


def _some(reasons: Iterable[str]) -> str:
    """The first few distinct reasons, and how many more there are; "" for none."""
    different = list(dict.fromkeys(reasons))
    more = [f"{len(different) - _SHOWN_WORKERS} more"] if len(different) > _SHOWN_WORKERS else []
    return ", ".join([*different[:_SHOWN_WORKERS], *more])
