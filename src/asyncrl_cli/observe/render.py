"""One status as lines of coloured text: the live screen, `asyncrl status` and its `--watch` all show these.

What leads is what a run is about: how full the slots are, who idles and why, how stale the data is. A rule above each block says
which time its figures cover. Sections stand side by side on a wide terminal and below each other on a narrow one; where lines run
out, the least important go.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from asyncrl_cli.loop.reports import WAITS_FOR_RESTART
from asyncrl_cli.loop.watching import ENDED
from asyncrl_cli.observe.format import NOTHING, bar, clock, count, duration, number, share, small, sparkline
from asyncrl_cli.observe.summary import ledger_line, summary_rows

WIDE = 84
LABEL = 11
STATE_STYLES = {
    "busy": "green",
    "starved": "yellow",
    "blocked": "magenta",
    "loading": "cyan",
    "syncing": "cyan",
    "paused": "blue",
    "done": "dim",
    "failed": "bold red",
    "restarting": "bold yellow",
}
PHASE_STYLES = {"running": "bold green", "failed": "bold red", "stopping": "bold yellow", "done": "bold green"}

Status = Mapping[str, Any]


def render(status: Status, *, width: int, height: int, remark: str = "") -> Text:
    """The status in at most `height` lines of at most `width` cells. `remark` is a warning about the status itself."""
    periods, is_over = status["periods"], status["phase"] in ENDED
    top = _header(status, width) + ([_styled(remark, "bold red")] if remark else [])
    moment = "at the end" if is_over else "as last said" if remark else "now"
    use = [_rule(periods["utilization"], "" if is_over else f"states and waits: {moment}", width), *_utilization(status, width)]
    details = [_rule(periods["steps"], "", width), *_beside(_staleness(status), _learning(status, width), width)]
    costs = [_rule({"words": moment}, "", width), *_sync(status, width), *_ledger(status, width)]
    around = len(top) + len(use) + len(details) + len(costs)
    executors = _executors(status, width, max_rows=max(1, height - around - 1))
    lines = [*top, *use, *executors, *details, *costs]
    lines += _notes(status, max(1, height - len(lines)))
    for line in lines:
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="crop").join(lines[:height])


def render_summary(status: Status) -> Table:
    """The totals of an ended run, wrapped in their column."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=LABEL - 1, no_wrap=True, style="dim bold")
    table.add_column(overflow="fold")
    for what, figures in summary_rows(status):
        table.add_row(what, Text(figures, style="bold red" if what == "error" else ""))
    return table


def _header(status: Status, width: int) -> list[Text]:
    progress, admission = status["progress"], status["admission"]
    title = Text.assemble(("━━ asyncrl ", "bold"), (status["name"], "bold cyan"), f" · {status['profile']} ")
    phase = Text(f" {status['phase']} ━━", style=PHASE_STYLES.get(status["phase"], "bold"))
    title.truncate(max(0, width - phase.cell_len), overflow="ellipsis")
    title.append("━" * (width - title.cell_len - phase.cell_len), "dim")
    left = f"step {progress['step']}/{progress['train_steps']} "
    times = f" {progress['fraction']:>4.0%}  {clock(progress['time_s'])} gone"
    if "eta_s" in progress and status["phase"] == "running" and not status.get("restarting"):
        times += f", {clock(progress['eta_s'])} left"
    done = Text(left, style="bold")
    done.append_text(_meter(progress["fraction"], width - len(left) - len(times), "cyan")).append(times)
    counts = [
        f"version {progress['version']}",
        f"groups {count(progress['groups_trained'])}/{count(progress['groups_total'])}",
    ]
    if status.get("doing"):
        counts = [f"starting: {status['doing']}"]
    if admission and status["phase"] not in ENDED:
        taken, groups = admission["window_taken"], admission["window_groups"]
        counts.append(f"window {taken}/{groups} taken, budget {admission['window_budget']}")
    lines = [title + phase, done, *_wrapped(Text(), counts, " · ", width, "dim")]
    if admission and status["phase"] not in ENDED:
        closed = f"waits: {admission['closed_by']} ({admission['cause']})"
        lines += _prose(_label("admission"), closed if admission["closed_by"] else "open", width)
    return lines


def _rule(period: Mapping[str, Any] | None, also: str, width: int) -> Text:
    """Which time the figures below cover, in a line of its own."""
    said = f"── {period['words'] if period else 'no step yet'} " + (f"── {also} " if also else "")
    return Text(said + "─" * max(0, width - len(said)), style="dim")


def _utilization(status: Status, width: int) -> list[Text]:
    figures = status["utilization"]
    slots = figures.get("rollouter_slot_utilization")
    meter = max(10, min(30, width // 4))
    first = _label("slots used").append(f"{share(slots):>4} ", style=f"bold {_good_high(slots)}")
    first.append_text(_meter(slots, meter, _good_high(slots)))
    first.append("  overlap ", "dim").append(f"{share(figures.get('overlap_ratio')):>4}", "bold")
    if status["phase"] not in ENDED:
        now = f"{count(figures.get('running_sequences'))}/{count(figures.get('slots'))}"
        first.append("  now ", "dim").append(now)
    first.append("  " + sparkline(figures["slot_history"], min(30, width - first.cell_len - 2), low=0, high=1), "cyan")
    return [first, *_side(status, "rollouter", "rollout", width), *_side(status, "trainer", "trainer", width)]


def _side(status: Status, name: str, role: str, width: int) -> list[Text]:
    """How idle a side is and how fast; who of it does not work at the moment, and what for."""
    figures = status["utilization"]
    idle, rate = figures.get(f"{name}_idle_ratio"), figures.get(f"{name}_tokens_per_s")
    line = _label(name).append("idle ", "dim").append(f"{share(idle):>4}", style=f"bold {_good_low(idle)}")
    line.append(f"  {count(rate):>7} ").append("tokens/s  ", "dim")
    mine = [executor for executor in status["executors"] if executor["role"] == role]
    waiting = [executor for executor in mine if executor["state"] != "busy"] or mine[:1]
    if not waiting:
        return [line]
    first = waiting[0]
    state, attempt = _state(first, status)
    line.append(f"{state}{attempt}", STATE_STYLES.get(state, ""))
    if not first["waiting_for"] or state in ("busy", "restarting"):
        return [line]
    return _prose(line.append("  "), f"waits for {first['waiting_for']}", width)


def _state(executor: Mapping[str, Any], status: Status) -> tuple[str, str]:
    """In words for people: a worker whose process is being replaced is not failed. And of a worker which of its restarts it is."""
    if executor["state"] != "failed" or executor["waiting_for"] != WAITS_FOR_RESTART:
        return executor["state"], ""
    attempt = status.get("restarting", {}).get(executor["name"])
    return "restarting", f" ({attempt})" if attempt else ""


def _executors(status: Status, width: int, max_rows: int) -> list[Text]:
    shown = status["executors"]
    if len(shown) > max_rows:  # the sides' own lines tell of the others
        shown = sorted(shown, key=lambda executor: executor["role"] != "rollout")[: max(1, max_rows - 1)]
    lines = [_executor(executor, status, width) for executor in shown]
    if len(status["executors"]) > len(shown):
        lines.append(_styled(f"... and {len(status['executors']) - len(shown)} more executors", "dim"))
    return lines


def _executor(executor: Mapping[str, Any], status: Status, width: int) -> Text:
    """Name, state, strip of its time in states, its version and sequences, and how full its engine's cache is."""
    now, attempt = _state(executor, status)
    line = _label(executor["name"]).append(f"{now + attempt:<9}", STATE_STYLES.get(now, ""))
    if now == "restarting":
        line.append(" ")
    total_s = sum(executor["state_s"].values())
    line.append_text(_strip(executor["state_s"], total_s, max(8, min(24, width // 5))))
    if total_s > 0:
        line.append(f" busy {executor['state_s'].get('busy', 0.0) / total_s:>4.0%}", "dim")
        others = {state: seconds / total_s for state, seconds in executor["state_s"].items() if state != "busy"}
        state = max(others, key=lambda name: others[name], default="")
        line.append(f"  {state} {others[state]:.0%}" if state and others[state] >= 0.005 else "", "dim")
    if now == "restarting":
        return line
    if executor["name"] in status["versions"]:
        line.append(f"  v{status['versions'][executor['name']]}", "bold")
    gauges = executor["gauges"]
    if "running_sequences" in gauges:
        line.append(f"  {count(gauges['running_sequences'])}/{count(gauges.get('slots'))} {_engine(gauges)}", "dim")
    elif executor["waiting_for"] and executor["role"] == "reward":  # the others have lines of their own above
        line.append(f"  waits for {executor['waiting_for']}", "dim")
    return line


def _engine(gauges: Mapping[str, float]) -> str:
    """What an engine tells of itself, in few letters: a hundred columns are full."""
    if "kv_cache_usage" not in gauges:
        return "sequences"
    waiting = gauges.get("engine_waiting", 0)
    return f"seqs  kv {share(gauges['kv_cache_usage'])}" + (f"  waiting {count(waiting)}" if waiting else "")


def _strip(state_s: Mapping[str, float], total_s: float, width: int) -> Text:
    """Time in states as coloured cells; every state that took time keeps its order of size."""
    strip = Text()
    if total_s <= 0:
        return strip.append("·" * width, "dim")
    filled, reached_s = 0, 0.0
    for state, seconds in sorted(state_s.items(), key=lambda entry: -entry[1]):
        reached_s += seconds
        end = round(reached_s / total_s * width)
        strip.append("█" * (end - filled), STATE_STYLES.get(state, ""))
        filled = end
    return strip


def _staleness(status: Status) -> list[Text]:
    figures, partial = status["staleness"], status["partial"]
    top = _label("staleness").append(f"mean {number(figures.get('mean'))}  max {figures.get('max', NOTHING)}")
    top.append(f"  bound {figures['bound']}" + ("" if status["on_stale"] == "wait" else f" ({status['on_stale']})"), "dim")
    histogram: Sequence[int] = figures.get("histogram", [])
    largest = max(histogram, default=0) or 1
    lines = [top]
    for age, trajectories in list(enumerate(histogram))[:4]:
        row = Text(f"{age:>{LABEL - 2}}  ", style="dim")
        row.append(bar(trajectories / largest, 16), "magenta" if age else "green").append(f" {count(trajectories)}")
        lines.append(row)
    if len(histogram) > 4:
        lines[-1].append(f"  (+{count(sum(histogram[4:]))} older)", "dim")
    spans = _label("partial").append(share(partial.get("partial_ratio")))
    return [*lines, spans.append(f"  max span {partial.get('max_partial_span', NOTHING)}", "dim")]


def _learning(status: Status, width: int) -> list[Text]:
    reward, evals = status["reward"], status["eval"]
    lines = [_label("reward").append(f"{number(reward.get('mean'), 3)} ", "bold").append("last step ", "dim")]
    lines[0].append(sparkline(reward["history"], 20), "green")
    history = evals["history"]
    held_out = _label("eval")
    if history:
        scores = [entry["reward_mean"] for entry in history]
        held_out.append(f"{number(scores[-1], 3)} ", "bold").append(sparkline(scores, 18), "green")
        held_out.append(f" from {number(scores[0], 3)} (v{history[0]['version']}..{history[-1]['version']})", "dim")
    else:
        held_out.append(NOTHING)
    lines.append(held_out)
    if evals["running"]:
        lines.append(_label("").append(f"now {evals['running']}", "yellow"))
    timing = status["timing"]
    step = [
        f"{'' if name == 'step' else name + ' '}{duration(timing.get(f'{name}_s'))}"
        for name in _PARTS
        if timing.get(f"{name}_s", 0.0) >= 5e-4
    ]
    room = width if width < WIDE else width - _half(width)
    return [*lines, *_wrapped(_label("mean step"), step or [NOTHING], "  ", room)]


def _sync(status: Status, width: int) -> list[Text]:
    sync = status["sync"]
    if not sync:
        return []
    parts = [f"v{sync['version']}", *(f"{phase} {duration(sync.get(f'{phase}_s'))}" for phase in _PHASES)]
    if "logprob_abs_diff" in sync:
        parts.append(f"|logprob diff| {small(sync['logprob_abs_diff'])}")
    return _wrapped(_label("sync"), parts, "  ", width)


def _ledger(status: Status, width: int) -> list[Text]:
    lines = _wrapped(_label("ledger"), ledger_line(status["ledger"]).split(" + "), " + ", width)
    if status["checkpoint"] or status["tokens_discarded"]:
        last = _label("checkpoint").append(status["checkpoint"] or "-")
        lines.append(last.append(f"  tokens discarded so far {count(status['tokens_discarded'])}", "dim"))
    return lines


def _notes(status: Status, room: int) -> list[Text]:
    """The newest log lines, and the error of a failed run above all."""
    styles = {"warning": "yellow", "failed": "bold red"}
    notes = [
        Text(f"{clock(note['time_s']):>9}  ", style="dim").append(note["text"], styles.get(note["event"], ""))
        for note in status["notes"][-room:]
    ]
    if status["error"]:
        notes = [_styled(f"failed: {status['error'].splitlines()[0]}", "bold red"), *notes[1:]]
    return notes[:room]


def _beside(left: list[Text], right: list[Text], width: int) -> list[Text]:
    if width < WIDE:
        return left + right
    half = _half(width)
    joined = []
    for index in range(max(len(left), len(right))):
        line = left[index].copy() if index < len(left) else Text()
        line.truncate(half - 2, pad=True)
        joined.append(line.append("  ").append_text(right[index] if index < len(right) else Text()))
    return joined


def _half(width: int) -> int:
    return max(36, width // 2 - 8)


def _wrapped(label: Text, parts: Sequence[str], separator: str, width: int, style: str = "") -> list[Text]:
    """Parts after a label, broken between parts where the line is full; further lines are indented like the first."""
    indent = " " * label.cell_len
    lines = [label]
    for index, part in enumerate(parts):
        piece = part + (separator if index + 1 < len(parts) else "")
        if lines[-1].cell_len + len(piece.rstrip()) > width and lines[-1].cell_len > len(indent):
            lines.append(Text(indent))
        lines[-1].append(piece, style)
    return lines


def _prose(start: Text, text: str, width: int) -> list[Text]:
    """A sentence after `start`, broken between words: on its line if that has room for it, else below, on two lines at most."""
    if start.cell_len + len(text) <= width:
        return [start.append(text, "dim")]
    room = max(12, width - LABEL)
    if start.cell_len <= LABEL:
        first, *rest = textwrap.wrap(text, room, max_lines=3, placeholder=" ...")
        return [start.append(first, "dim"), *(Text(" " * LABEL + line, style="dim") for line in rest)]
    return [start, *(Text(" " * LABEL + line, style="dim") for line in textwrap.wrap(text, room, max_lines=2, placeholder=" ..."))]


def _label(name: str) -> Text:
    text = Text()
    text.append(f"{name[: LABEL - 1]:<{LABEL}}", "dim bold")
    return text


def _styled(text: str, style: str) -> Text:
    return Text(text, style=style)


def _meter(fraction: float | None, width: int, style: str) -> Text:
    width = max(4, width)
    if fraction is None:
        return Text("·" * width, style="dim")
    filled = round(min(1.0, max(0.0, fraction)) * width)
    return Text("━" * filled, style=style).append("─" * (width - filled), "dim")


def _good_high(value: float | None) -> str:
    return "" if value is None else "green" if value >= 0.7 else "yellow" if value >= 0.4 else "red"


def _good_low(value: float | None) -> str:
    return "" if value is None else "green" if value <= 0.15 else "yellow" if value <= 0.4 else "red"


_PHASES = ("gather", "send", "load", "pause")
_PARTS = ("step", "train", "wait_data", "old_logprob", "gather", "checkpoint", "eval", "other")
