"""Why somebody waits, in words: what keeps admission closed, a worker from the newest weights, the trainer from its groups.

Admission knows the rule that closes it (`Closed`). Behind a rule stands an executor that does something: these functions look
for it, from the same state that the loop goes by, so that what is said is what is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from asyncrl_cli.loop.admission import Closed

if TYPE_CHECKING:
    from asyncrl_cli.loop.board import Board

_SHOWN_WORKERS = 2
"""Of hundreds that wait for the same, so many are named."""


def closed_by(board: Board) -> str:
    """The rule that keeps admission closed, "" if it is open. Admission's own words, but where no worker has a process: to
    admission all of them load then."""
    admission = board.admission
    closed = admission.closed()
    return "restart" if closed is Closed.LOADING and admission.fleet.is_gone() else closed.value


def behind_closed(board: Board) -> str:
    """What stands behind that rule now, "" if admission is open."""
    admission = board.admission
    match admission.closed():
        case Closed.OPEN:
            return ""
        case Closed.STOPPING:
            return "the run stops"
        case Closed.END:
            return "every group of the run has started"
        case Closed.WINDOW:
            return f"all {admission.budget} groups of the window have started, version {admission.version + 1} opens the next"
        case Closed.LOADING:
            return _some(lags(board))
        case Closed.SLOTS:
            away = [worker.name for worker in admission.fleet.by_name.values() if worker.loading]
            return _some([_slots_in_use(board), *_lags_of(board, away)])
        case Closed.DEADLINES:
            # Only of a worker that lags: with the newest weights the window's budget closes first.
            return _some(_lags_of(board, [worker.name for worker in admission.fleet.candidates()]))


def admission_wait(board: Board) -> str:
    """`slots (64 of 64 in use)`; "" if admission is open."""
    closed = closed_by(board)
    return closed and f"{closed} ({behind_closed(board)})"


def groups_wait(board: Board) -> str:
    """What the trainer waits for when it waits for a step's groups."""
    ledger, needed = board.ledger, board.schedule.step_groups
    finished, running = len(ledger.finished), len(ledger.running)
    takeable = (
        f" (only {len(board.admission.takeable(needed))} takeable before groups that are due earlier)" if finished >= needed else ""
    )
    text = f"{needed} takeable groups: {finished} finished{takeable}, {running} running"
    return _with_admission(board, text)


def window_wait(board: Board) -> str:
    """Colocated: the trainer gets the resources once the whole window has finished and nothing else runs."""
    ledger, needed = board.ledger, board.admission.window_size
    finished = len(ledger.finished)
    if finished < needed:
        return _with_admission(board, f"the whole window: {finished} of {needed} groups finished, {len(ledger.running)} running")
    return _some([*eval_holds(board), *lags(board)])


def lags(board: Board) -> list[str]:
    """Of every worker that cannot generate with the newest weights: why."""
    return _lags_of(board, board.admission.workers)


def _lags_of(board: Board, names: Iterable[str]) -> list[str]:
    return [lag for name in names if (lag := lag_of(board, name))]


def lag_of(board: Board, name: str) -> str:
    """Why the worker cannot generate with the newest weights; "" if it can."""
    slots, begun = board.admission.workers[name], board.sync.begun.get(name)
    if slots.down:
        return f"{name} is restarted" + (f" ({board.restarting[name]})" if name in board.restarting else "")
    if begun is not None and name not in board.sync.received:
        return f"{name} receives version {begun}"
    if begun is not None and slots.unfinished_sequences and board.settings.interrupt == "drain":
        return f"{name} finishes {slots.unfinished_sequences} sequences before it loads version {begun}"
    if begun is not None:
        return f"{name} loads version {begun}"
    if board.sync.held[name] >= board.version:
        return ""
    if name in board.evaluator.held_s:
        return _hold(board, name)
    is_published = board.sync.newest is not None and board.sync.newest.version >= board.version
    return f"{name} is about to receive version {board.version}" if is_published else f"version {board.version} is being published"


def restarts(board: Board) -> str:
    """Of every worker without a process."""
    return _some(lag_of(board, worker.name) for worker in board.admission.workers.values() if worker.down)


def eval_holds(board: Board) -> list[str]:
    """Of every worker that an eval runs on."""
    return [_hold(board, name) for name in board.evaluator.held_s]


def _hold(board: Board, name: str) -> str:
    running = board.evaluator.running
    assert running is not None
    return f"the eval of version {running.version} holds {name} for {board.evaluator.held_s[name]:.0f} s so far"


def _slots_in_use(board: Board) -> str:
    up = [worker for worker in board.admission.workers.values() if not worker.down]
    evals = sum(worker.eval_sequences for worker in up)
    running = board.evaluator.running
    by_eval = f", {evals} by the eval of version {running.version}" if running is not None and evals else ""
    in_use, queued = sum(min(worker.used, worker.slots) for worker in up), sum(max(0, worker.used - worker.slots) for worker in up)
    return f"{in_use} of {sum(worker.slots for worker in up)} in use" + (f", {queued} sequences queue" if queued else "") + by_eval


def _with_admission(board: Board, text: str) -> str:
    """Whether more groups may start (the feed's own wait says why not), and who has an eval to do beside them."""
    closed, holds = closed_by(board), eval_holds(board)
    return "; ".join([text, *([f"admission waits: {closed}"] if closed else []), *([_some(holds)] if holds else [])])


def _some(reasons: Iterable[str]) -> str:
    """The first few; what several workers wait for together is said once."""
    different = list(dict.fromkeys(reasons))
    more = [f"{len(different) - _SHOWN_WORKERS} more"] if len(different) > _SHOWN_WORKERS else []
    return ", ".join([*different[:_SHOWN_WORKERS], *more])
