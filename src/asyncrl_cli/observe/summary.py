"""The end of a run in a few lines: the same for the screen, plain lines and `asyncrl status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl_cli.observe.format import clock, count, number, share

_HEADLINES = {"done": "done", "stopped": "stopped on request", "failed": "failed"}


def summary_rows(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, figures) of the whole run; rows that were not measured are absent."""
    progress, totals = status["progress"], status["totals"]
    rows = [
        ("run", f"{status['name']}: {_HEADLINES.get(status['phase'], status['phase'])} ({status['profile']})"),
        (
            "trained",
            f"{progress['step']} of {progress['train_steps']} steps, {count(progress['groups_trained'])} groups, "
            f"{count(progress.get('tokens_trained'))} tokens in {clock(progress['time_s'])}",
        ),
        ("eval", _evals(status["eval"]["history"])),
        ("overlap", _overlap(totals)),
        ("idle", _idle(totals)),
        ("staleness", _staleness(status, totals)),
        ("ledger", ledger_line(status["ledger"])),
        ("checkpoint", str(status["checkpoint"])),
        ("warnings", str(status["num_warnings"]) if status["num_warnings"] else ""),
        ("error", str(status["error"])),
    ]
    return [(what, figures) for what, figures in rows if figures]


def summary_text(status: Mapping[str, Any]) -> str:
    return "\n".join(f"{what:<11}{figures}" for what, figures in summary_rows(status))


def ledger_line(ledger: Mapping[str, int]) -> str:
    """`admitted 120 = running 8 + finished 4 + ...`."""
    if not ledger:
        return ""
    states = [f"{name} {count(number)}" for name, number in ledger.items() if name != "admitted_total"]
    return f"admitted {count(ledger.get('admitted_total'))} = " + " + ".join(states)


def _evals(history: list[Mapping[str, Any]]) -> str:
    if not history:
        return ""
    ends = [history[0], history[-1]] if len(history) > 1 else history
    values = " -> ".join(f"{eval_['reward_mean']:.3f} (version {eval_['version']})" for eval_ in ends)
    return f"{values}, {count(ends[-1].get('num_prompts'))} prompts"


def _overlap(totals: Mapping[str, Any]) -> str:
    return share(totals["overlap_ratio"]) if "overlap_ratio" in totals else ""


def _idle(totals: Mapping[str, Any]) -> str:
    parts = [
        ("trainer", "trainer/idle_ratio"),
        ("rollouter", "rollouter/idle_ratio"),
        ("slots used", "rollouter/slot_utilization"),
    ]
    return ", ".join(f"{what} {share(totals[key])}" for what, key in parts if key in totals)


def _staleness(status: Mapping[str, Any], totals: Mapping[str, Any]) -> str:
    if "staleness/mean" not in totals:
        return ""
    return (
        f"mean {number(totals['staleness/mean'])}, max {totals['staleness/max']} of {status['max_staleness']} allowed; "
        f"partial {share(totals.get('fully_async/partial/partial_ratio'))}, "
        f"max span {totals.get('fully_async/partial/max_partial_span', 0)}"
    )
