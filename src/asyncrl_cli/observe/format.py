"""Figures for people, as plain text: durations, counts, shares and sparklines.

Also the texts that the screen, the plain lines and `asyncrl status` share: events, the ledger, the summary of
an ended run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from rich.filesize import decimal

if TYPE_CHECKING:  # `asyncrl --help` needs some of these functions, and no pydantic
    from asyncrl_cli.contracts.status import EvalPoint, Figures, Status

SPARKS = "▁▂▃▄▅▆▇█"
NOTHING = "-"
SHOWN_WARNINGS = 3
MOST_SHOWN = 1e15
"""From here on, numbers are shown as powers of ten, and are no figures of a chart."""
T = TypeVar("T")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and abs(value) < math.inf


def duration(seconds: object) -> str:
    """`1:02:03` from a minute on, `4.2 s` or `12 ms` below."""
    if not is_number(seconds) or seconds >= 60:
        return clock(seconds)
    if seconds >= 0.0995:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 9.95e-3 or seconds == 0 else f"{seconds * 1e3:.1f} ms"


def clock(seconds: object) -> str:
    """`0:01:34`, `3:02:03`."""
    if not is_number(seconds) or abs(seconds) >= MOST_SHOWN:
        return _written(seconds, "")
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


def _written(value: object, form: str) -> str:
    """`-` for an absent value, never 0. Values that are not finite ("nan", "inf") are strings in JSON and are
    shown as such."""
    if not is_number(value):
        return NOTHING if value is None else str(value)
    return format(value, form if abs(value) < MOST_SHOWN else ".3g")


def number(value: object, digits: int = 2) -> str:
    return _written(value, f".{digits}f")


def share(value: object) -> str:
    """`81%`; `<1%` for what would be rounded to nothing."""
    return "<1%" if is_number(value) and 0 < value < 0.005 else _written(value, ".0%")


count = partial(_written, form=",.0f")
"""`12,345`."""
small = partial(_written, form=".2g")
"""`2.1e-07`, `0`."""


def size(num_bytes: object) -> str:
    """`1.2 MB`, in powers of 1000."""
    return decimal(int(num_bytes)) if is_number(num_bytes) else _written(num_bytes, "")


def listed(figures: Figures, key: str) -> list[float]:
    """The finite numbers of a list of figures; none if it is missing."""
    found = figures.get(key)
    return [value for value in found if is_number(value)] if isinstance(found, list) else []


def evenly(items: Sequence[T], most: int) -> Sequence[T]:
    """At most `most` of the items, evenly chosen. The first and the last are among them."""
    if len(items) <= most:
        return items
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def sparkline(
    values: Sequence[object], width: int, *, low: float | None = None, high: float | None = None
) -> str:
    """At most the last `width` values, scaled to `low` ... `high` (default: their own extremes). Non-finite
    values are skipped."""
    shown = [value for value in list(values)[-width:] if is_number(value)]
    if not shown or width <= 0:
        return ""
    low = min(shown) if low is None else low
    high = max(shown) if high is None else high
    if high <= low:
        return SPARKS[3] * len(shown)
    steps = [(min(high, max(low, value)) - low) / (high - low) for value in shown]
    return "".join(SPARKS[round(step * (len(SPARKS) - 1))] for step in steps)


LEADING: Mapping[str, tuple[str, Callable[[object], str]]] = {
    "rollouter/slot_utilization": ("slots used", share),
    "rollouter/idle_ratio": ("rollouter idle", share),
    "trainer/idle_ratio": ("trainer idle", share),
    "overlap_ratio": ("overlap", share),
    "rollouter/tokens_per_s": ("tokens/s rollouter", count),
    "trainer/tokens_per_s": ("trainer", count),
}
"""The figures shown first in every view: metric -> (label, formatter)."""


def event_text(event: Mapping[str, Any]) -> str | None:
    """The event as one line of text; None if its kind is not shown to people."""
    match event["event"]:
        case "warning" | "remark":
            return str(event.get("message", ""))
        case "failed":
            return f"failed: {event.get('error', '')}"
        case "restarted":
            return f"{event.get('worker')} was restarted in {duration(event.get('restart_s'))}"
        case "resumed":
            return f"resumed from step {event.get('from_step')}"
        case "checkpointed":
            return f"checkpoint of step {event.get('step')}"
        case "eval":
            on = f" on {event['eval_set']}" if "eval_set" in event else ""
            failures = event.get("failures", {}).items()
            failed = ", ".join(f"{amount} failed ({kind})" for kind, amount in failures)
            score = f"eval of version {event.get('version')}{on}: {scored(event)}"
            return f"{score}, {failed}" if failed else score
    return None


def step_text(status: Status) -> str:
    """One line with the figures that the screen shows first, under the same labels and over the same
    period."""
    progress, use, staleness, periods = status.progress, status.utilization, status.staleness, status.periods
    assert periods.steps is not None
    current = periods.utilization if periods.utilization != periods.steps else None
    unfiltered = status.reward.get("unfiltered_mean")
    figures = [
        f"step {progress.step}/{progress.train_steps} v{progress.version}",
        f"reward {number(status.reward.get('mean'), 3)}",
        *([] if unfiltered is None else [f"with filtered groups {number(unfiltered, 3)}"]),
        f"{periods.steps.words}: staleness {number(staleness.get('mean'))}/{staleness.get('max', NOTHING)}",
        *([f"{current.words}:"] if current else []),
        f"slots used {share(use.get('rollouter_slot_utilization'))}",
        f"trainer idle {share(use.get('trainer_idle_ratio'))}",
        f"rollouter idle {share(use.get('rollouter_idle_ratio'))}",
        f"tokens/s {count(use.get('rollouter_tokens_per_s'))}",
    ]
    return "  ".join(figures)


def line_text(line: Mapping[str, Any]) -> str:
    """A train step's metrics as one line of the driver's log."""
    figures = [
        f"step {line['step']}",
        f"v{line['version']}",
        f"reward {number(line.get('reward/mean'), 3)}",
        f"staleness {number(line.get('staleness/mean'))}/{line.get('staleness/max', NOTHING)}",
        f"trainer idle {share(line.get('trainer/idle_ratio'))}",
        f"rollouter idle {share(line.get('rollouter/idle_ratio'))}",
        duration(line.get("timing/step_s")),
    ]
    return "  ".join(figures)


def summary_rows(status: Status) -> list[tuple[str, str]]:
    """(label, figures) rows for the whole run, with the screen's labels. Rows without a measured value are
    left out."""
    progress, totals = status.progress, status.totals
    steps = f"{progress.step} of {progress.train_steps} steps, {count(progress.groups_trained)} groups"
    if progress.tokens_trained is not None:
        steps += f", {count(progress.tokens_trained)} tokens"
    phase = "stopped on request" if status.phase == "stopped" else status.phase
    leading = [f"{label} {form(totals.get(key))}" for key, (label, form) in LEADING.items()]
    lent_s, lent_tokens = (totals.get(f"placement/lent_{what}") for what in ("s", "tokens"))
    lent = f"the trainer's devices for {duration(lent_s)}: {count(lent_tokens)} tokens"
    evals, data = by_set(status.eval.history).items(), status.data
    orphans = f"{count(data.orphans)} keys of the data store had no owner" if data and data.orphans else ""
    rows = [
        ("run", f"{status.name}: {phase} ({status.profile})"),
        ("trained", f"{steps} in {clock(progress.time_s)}"),
        *((f"eval {name}".strip(), evals_text(points)) for name, points in evals),
        ("whole run", ", ".join(leading) if totals.keys() & LEADING else ""),
        ("staleness", _staleness(status)),
        ("governor", _governor(status)),
        ("lent", "" if lent_s is None else lent),
        ("ledger", ledger_line(status.ledger)),
        ("orphans", orphans),
        ("checkpoint", status.checkpoint),
        ("warnings", _warnings(status)),
        ("error", status.error),
    ]
    return [(what, figures) for what, figures in rows if figures]


def ledger_line(ledger: Mapping[str, int]) -> str:
    """`admitted 120 = running 8 + finished 4 + ...`."""
    accounts = [f"{name} {count(number)}" for name, number in ledger.items() if name != "admitted_total"]
    return f"admitted {count(ledger.get('admitted_total'))} = " + " + ".join(accounts) if ledger else ""


def by_set(history: Iterable[EvalPoint]) -> dict[str, list[EvalPoint]]:
    """The points of each eval set; "" is the held-out split."""
    found: dict[str, list[EvalPoint]] = {}
    for point in history:
        found.setdefault(point.get("eval_set", ""), []).append(point)
    return found


def _warnings(status: Status) -> str:
    """How many there were, and the newest of them."""
    newest = [f"{clock(warning.time_s)} {warning.text}" for warning in status.warnings[-SHOWN_WARNINGS:]]
    if (more := status.num_warnings - len(newest)) > 0:
        newest.append(f"{more} more, in events.jsonl")
    return f"{status.num_warnings}: {'; '.join(newest)}" if status.num_warnings else ""


def evals_text(points: Sequence[EvalPoint]) -> str:
    """The first and the last point: `0.300 (version 0) -> 0.700 (version 4), 512 prompts`."""
    ends = [points[0], points[-1]] if len(points) > 1 else points
    values = " -> ".join(f"{scored(point)} (version {point['version']})" for point in ends)
    return f"{values}, {count(ends[-1].get('num_prompts'))} prompts"


def scored(point: Mapping[str, object]) -> str:
    """An eval's mean reward and, if it is known, its 95% interval: `0.250 [0.102..0.431]`."""
    mean, low, high = (number(point.get(f"reward_{key}"), 3) for key in ("mean", "low", "high"))
    return f"{mean} [{low}..{high}]" if "reward_low" in point else mean


def _governor(status: Status) -> str:
    """Where its levers were last, and the whole run's KL."""
    governor = status.admission.governor if status.admission else ""
    return f"{governor}; mean KL {number(status.totals.get('correction/kl'), 4)}" if governor else ""


def _staleness(status: Status) -> str:
    totals = status.totals
    if "staleness/mean" not in totals:
        return ""
    oldest = f"max {totals.get('staleness/max')} of {status.max_staleness} allowed"
    partial_share = share(totals.get("fully_async/partial/partial_ratio"))
    span = totals.get("fully_async/partial/max_partial_span", NOTHING)
    return f"mean {number(totals['staleness/mean'])}, {oldest}; partial {partial_share}, max span {span}"
