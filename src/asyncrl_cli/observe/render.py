"""One status as lines of coloured text: the live screen, `asyncrl status` and `asyncrl watch` show these.

The most important figures come first: how full the slots are, who idles and why, how stale the data is. A
rule above each block says which time its figures cover. Some sections stand side by side on a wide terminal
and below each other on a narrow one.

The machines (measure/machines.py) have a row each, and below them the rollout workers and other scorers. If
the terminal has too few lines, notes go first, then rows (`ROW_PRIORITY`), then blocks from below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import wrap

from rich.table import Table
from rich.text import Text

from asyncrl_cli.contracts.events import ENDED
from asyncrl_cli.contracts.status import CoveredTime, ExecutorStatus, Figure, Status
from asyncrl_cli.measure.machines import MACHINES, machine_of
from asyncrl_cli.measure.states import WAITS_FOR_RESTART
from asyncrl_cli.observe.format import (
    NOTHING,
    by_set,
    clock,
    count,
    duration,
    is_number,
    ledger_line,
    listed,
    number,
    scored,
    share,
    size,
    small,
    sparkline,
    summary_rows,
)
from asyncrl_cli.observe.terminal import JOINT, LABEL, beside, flow, joined, label, meter, rule, strip

WIDE = 84
STATE_STYLES = {
    "busy": "green",
    "starved": "yellow",
    "waiting for tools": "bright_yellow",
    "blocked": "magenta",
    "scoring": "bright_green",
    "loading": "cyan",
    "syncing": "cyan",
    "sending": "bright_cyan",
    "paused": "blue",
    "done": "dim",
    "failed": "bold red",
    "restarting": "bold yellow",
}
PHASE_STYLES = {
    "running": "bold green",
    "failed": "bold red",
    "stopping": "bold yellow",
    "done": "bold green",
}
SIDES = ("rollout", "scorer", "trainer")
ROW_PRIORITY = (
    *("train", "generate", "rollout", "param_update", "reward", "logp", "ref_logp"),
    *("dataloader", "worker", "scorer"),
)
"""Rows of machines, of workers and of scorers that are no machines: the first are the last to be dropped."""
LEAST_ROWS = 5
"""At least this many of the rows get space before any block below them does."""
ROW_LABEL = 13
MOST_STATES = 4
"""Limit for the states that are named. A worker has less room."""
MOST_WAITS = 6
SYNC_PARTS = ("gather", "send", "load", "pause")
STEP_PARTS = (
    *("step", "train", "wait_data", "wait_scores", "old_logprob", "ref", "teacher"),
    *("critic", "gather", "checkpoint", "eval", "other"),
)


def render(status: Status, *, width: int, height: int, remark: str = "") -> Text:
    """The status in at most `height` lines of at most `width` cells. `remark` is a warning about the status
    itself."""
    moment = "at the end" if _is_over(status) else "as last reported" if remark else "now"
    top = _header(status, width) + [Text(line, "bold red") for line in wrap(remark, width)]
    if not status.executors:  # the run is starting: there is nothing else to show
        return _page([*top, *_notes(status, height - len(top))], width, height)
    states = "" if _is_over(status) else f"states and waits: {moment}"
    use = [_rule(status.periods.utilization, states, width), *_utilization(status, width)]
    room = height - len(top) - len(use) - bool(status.error)
    rows = _rows(status, width)  # some of them, and a line about the rest, come before the blocks
    below = _blocks(status, moment, width, room - min(len(rows), LEAST_ROWS))
    lines = [*top, *use, *_chosen(rows, max(1, room - len(below))), *below]
    return _page([*lines, *_notes(status, max(0, height - len(lines)))], width, height)


def render_summary(status: Status) -> Table:
    """The totals of an ended run as a table of two columns; long figures wrap in theirs."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=LABEL - 1, no_wrap=True, style="dim bold")
    table.add_column(overflow="fold")
    for what, figures in summary_rows(status):
        table.add_row(what, Text(figures, "bold red" if what == "error" else ""))
    return table


def _page(lines: Sequence[Text], width: int, height: int) -> Text:
    for line in lines:
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="crop").join(lines[:height])


def _is_over(status: Status) -> bool:
    return status.phase in ENDED


def _rule(time: CoveredTime | None, also: str, width: int) -> Text:
    """A line that says which time the figures below it cover."""
    return rule(f"── {time.words if time else 'no step yet'} " + (f"── {also} " if also else ""), width)


def _blocks(status: Status, moment: str, width: int, room: int) -> list[Text]:
    """The blocks on staleness and learning, side by side if there is room, then those on turns, filtered
    groups, the last sync and the ledger: up to the first one that does not fit whole."""
    half = max(36, width // 2 - 8) if width >= WIDE and status.periods.steps else 0
    staleness = _staleness(status) if status.periods.steps else []
    learning = _learning(status, width - half)
    both = [beside(staleness, learning, half)] if half else [staleness, learning]
    filtered, sync, synced = list[Text](), status.sync, list[Text]()
    if status.filtered_ratio is not None:  # dynamic sampling
        line = label("filtered").append(share(status.filtered_ratio))
        line.append(" of groups had equal rewards  reward with them ", "dim")
        filtered = [line.append(number(status.reward.get("unfiltered_mean"), 3), "dim")]
    if sync:
        parts = [f"{part} {duration(sync.get(f'{part}_s'))}" for part in SYNC_PARTS]
        if "logprob_abs_diff" in sync:
            parts.append(f"|logprob diff| {small(sync['logprob_abs_diff'])}")
        synced = flow(label("sync"), joined([f"v{sync.get('version')}", *parts], "  "), width, "")
    ledger = flow(label("ledger"), joined(ledger_line(status.ledger).split(" + "), " + "), width, "")
    if status.checkpoint or status.tokens_discarded:
        last = label("checkpoint").append(status.checkpoint or "-")
        ledger.append(last.append(f"  tokens discarded so far {count(status.tokens_discarded)}", "dim"))
    lines: list[Text] = []
    for heading, blocks in (
        (_rule(status.periods.steps, "", width), [*both, _turns(status, width), filtered]),
        (rule(f"── {moment} ", width), [synced, ledger, _data(status)]),
    ):
        above = [heading]
        for block in filter(None, blocks):
            if len(lines) + len(above) + len(block) > room:
                return lines
            lines, above = [*lines, *above, *block], []
    return lines


def waits_text(status: Status) -> str:
    """What is being waited for, as far as the status knows, in one line."""
    waits = [
        f"{name} is down ({'restart ' * why[0].isdigit()}{why})" for name, why in status.restarting.items()
    ]
    waits += [f"eval of {status.eval.running}"] if status.eval.running else []
    for one in status.executors:
        if one.role in SIDES and one.name not in status.restarting:
            waits.append(f"{one.name} {f'waits for {one.waiting_for}' if one.waiting_for else one.state}")
    return "; ".join(waits[:MOST_WAITS])


def _header(status: Status, width: int) -> list[Text]:
    progress, admission = status.progress, None if _is_over(status) else status.admission
    title = Text.assemble(("━━ asyncrl ", "bold"), (status.name, "bold cyan"), f" · {status.profile} ")
    phase = Text(f" {status.phase} ━━", PHASE_STYLES.get(status.phase, "bold"))
    title.truncate(max(0, width - phase.cell_len), overflow="ellipsis")
    title.append("━" * (width - title.cell_len - phase.cell_len), "dim")
    left = f"step {progress.step}/{progress.train_steps} "
    times = f" {progress.fraction:>4.0%}  {clock(progress.time_s)} elapsed"
    if progress.eta_s is not None and status.phase == "running" and not status.restarting:
        times += f", {clock(progress.eta_s)} left"
    done = Text(left, "bold").append_text(meter(progress.fraction, width - len(left) - len(times), "cyan"))
    groups = f"groups {count(progress.groups_trained)}/{count(progress.groups_total)}"
    counts = [f"starting: {status.doing}"] if status.doing else [f"version {progress.version}", groups]
    if admission:
        taken = f"window {admission.window_taken}/{admission.window_groups} taken"
        counts.append(f"{taken}, budget {admission.window_budget}")
    if status.admission:
        counts += filter(None, [status.admission.governor, status.admission.lending])
    lines = [title + phase, done.append(times), *flow(Text(), joined(counts, " · "), width)]
    if admission:
        closed = f"waits: {admission.closed_by} ({admission.cause})" if admission.closed_by else "open"
        lines += flow(label("admission"), closed, width, max_lines=3)
    return lines


def _utilization(status: Status, width: int) -> list[Text]:
    figures = status.utilization
    slots = figures.get("rollouter_slot_utilization")
    style = _graded(slots, 0.7, 0.4)
    first = label("slots used").append(f"{share(slots):>4} ", f"bold {style}")
    first.append_text(meter(slots, max(10, min(30, width // 4)), style))
    first.append("  overlap ", "dim").append(f"{share(figures.get('overlap_ratio')):>4}", "bold")
    if not _is_over(status):
        now = f"{count(figures.get('running_sequences'))}/{count(figures.get('slots'))}"
        first.append("  now ", "dim").append(now)
    room = min(30, width - first.cell_len - 2)
    first.append("  " + sparkline(listed(figures, "slot_history"), room, low=0, high=1), "cyan")
    by_role = {role: [one for one in status.executors if one.role == role] for role in SIDES}
    sides = {
        "rollouter": by_role["rollout"],
        **{scorer.name: [scorer] for scorer in by_role["scorer"]},
        "trainer": by_role["trainer"],
    }
    lines = [first]
    for name, executors in sides.items():
        # How idle and how fast the side is, and one of its executors that is not busy: what that waits for.
        idle = figures.get(f"{name}_idle_ratio")
        style = _graded(1 - idle if is_number(idle) else None, 0.85, 0.6)
        line = label(name).append("idle ", "dim").append(f"{share(idle):>4}", f"bold {style}")
        line.append(f"  {count(figures.get(f'{name}_tokens_per_s')):>7} ").append("tokens/s  ", "dim")
        lines.append(line)
        if not executors:
            continue
        shown = next((one for one in executors if one.state != "busy"), executors[0])
        _append_state(line, shown, status)
        if shown.waiting_for and shown.state != "busy" and not _is_restarting(shown):
            waits = f"waits for {shown.waiting_for}"
            lines[-1:] = flow(line.append("  "), waits, width, max_lines=3)
    return lines


def _graded(value: object, good: float, fair: float) -> str:
    return "" if not is_number(value) else "green" if value >= good else "yellow" if value >= fair else "red"


def _is_restarting(executor: ExecutorStatus) -> bool:
    """Whether the executor's process is being replaced: its state is `failed` meanwhile."""
    return executor.state == "failed" and executor.waiting_for == WAITS_FOR_RESTART


def _append_state(line: Text, executor: ExecutorStatus, status: Status, width: int = 0) -> None:
    """Append the executor's state; for a restart with its number, as in `restarting (1 of 3)`."""
    state = "restarting" if _is_restarting(executor) else executor.state
    attempt = status.restarting.get(executor.name) if state == "restarting" else None
    line.append(f"{state} ({attempt})" if attempt else f"{state:<{width}}", STATE_STYLES.get(state, ""))


def _rows(status: Status, width: int) -> list[tuple[str, Text]]:
    """(name in ROW_PRIORITY, row) of each machine that the run has, of each worker if there are several, and
    of each further scorer."""
    of_machines: dict[str, list[ExecutorStatus]] = {name: [] for name in MACHINES}
    others = list[tuple[str, Text]]()
    for one in status.executors:
        if machine := machine_of(one.name, one.role):
            of_machines[machine].append(one)
        else:
            others.append(("scorer", _row(one.name, [one], status, width)))
    machines = [(name, _row(name, found, status, width)) for name, found in of_machines.items() if found]
    workers = of_machines["rollout"] if len(of_machines["rollout"]) > 1 else []
    return [*machines, *(("worker", _row(one.name, [one], status, width)) for one in workers), *others]


def _chosen(rows: list[tuple[str, Text]], most: int) -> list[Text]:
    left = sorted(range(len(rows)), key=lambda place: ROW_PRIORITY.index(rows[place][0]))[max(1, most - 1) :]
    if len(rows) <= most:
        return [row for _, row in rows]
    lines = [row for place, (_, row) in enumerate(rows) if place not in left]
    return [*lines, Text(f"... and {len(left)} more rows", "dim")] if most > 1 else lines


def _row(name: str, executors: Sequence[ExecutorStatus], status: Status, width: int) -> Text:
    """Name, state, a strip of the time in states, and the states with the most of it. Then what a single
    worker or scorer holds, or what is waited for. Of several executors, one that is not busy counts."""
    shown = next((one for one in executors if one.state != "busy"), executors[0])
    gauges = shown.gauges if len(executors) == 1 else {}
    line, is_worker = label(name, ROW_LABEL), "running_sequences" in gauges
    state_s = Counter[str]()
    for one in executors:
        state_s.update(one.state_s)
    _append_state(line, shown, status, width=9)
    line.append(" " if _is_restarting(shown) else "")
    line.append_text(strip(state_s, STATE_STYLES, max(8, min(16, width // 6))))
    if (total_s := sum(state_s.values())) > 0:
        most = 2 if is_worker else MOST_STATES
        parts = [f"{state} {share(s / total_s)}" for state, s in state_s.most_common(most) if s > 0]
        line.append("".join(f"  {part}" for part in parts), "dim")
    if _is_restarting(shown):
        return line
    if is_worker and shown.name in status.versions:
        line.append(f"  v{status.versions[shown.name]}", "bold")
    if is_worker and not _is_over(status):
        running = f"{count(gauges['running_sequences'])}/{count(gauges.get('slots'))}"
        line.append(f"  {running} {_engine(gauges)}", "dim")
    elif "waiting_groups" in gauges and not _is_over(status):
        line.append(f"  {count(gauges['waiting_groups'])} groups wait for it", "dim")
    elif shown.waiting_for and shown.role not in SIDES:  # these have it above
        line.append(f"  waits for {shown.waiting_for}", "dim")
    return line


def _engine(gauges: Mapping[str, Figure]) -> str:
    """The KV cache's use and the engine's queue, abbreviated to fit into 100 columns."""
    if "kv_cache_usage" not in gauges:
        return "sequences"
    waiting = gauges.get("engine_waiting", 0)
    return f"seqs  kv {share(gauges['kv_cache_usage'])}" + (f"  waiting {count(waiting)}" if waiting else "")


def _staleness(status: Status) -> list[Text]:
    figures, partial = status.staleness, status.partial
    shown = f"mean {number(figures.get('mean'))}  max {figures.get('max', NOTHING)}"
    first = label("staleness").append(shown)
    policy = "" if status.on_stale == "wait" else f" ({status.on_stale})"
    lines = [first.append(f"  bound {status.max_staleness}{policy}", "dim")]
    histogram = listed(figures, "histogram")
    for age, trajectories in enumerate(histogram[:4]):
        cells = meter(trajectories / max(1, *histogram), 16, "magenta" if age else "green")
        row = Text(f"{age:>{LABEL - 2}}  ", "dim").append_text(cells)
        lines.append(row.append(f" {count(trajectories)}"))
    if len(histogram) > 4:
        lines[-1].append(f"  (+{count(sum(histogram[4:]))} older)", "dim")
    spans = label("partial").append(share(partial.get("partial_ratio")))
    return [*lines, spans.append(f"  max span {partial.get('max_partial_span', NOTHING)}", "dim")]


def _learning(status: Status, width: int) -> list[Text]:
    reward, lines = status.reward, list[Text]()
    if "mean" in reward:
        trained = label("reward").append(f"{number(reward['mean'], 3)} ", "bold").append("last step ", "dim")
        lines.append(trained.append(sparkline(listed(reward, "history"), 20), "green"))
    for name, points in by_set(status.eval.history).items():
        first, last = points[0], points[-1]
        curve = sparkline([point["reward_mean"] for point in points], 18)
        line = label("eval").append(f"{scored(last)} ", "bold").append(curve, "green")
        began = f" from {number(first['reward_mean'], 3)} (v{first['version']}..{last['version']})"
        lines.append(line.append(began, "dim").append(f" {name}" if name else ""))
    if status.eval.running and not _is_over(status):
        name = "" if status.eval.history else "eval"
        lines.append(label(name).append(f"now {status.eval.running}", "yellow"))
    taken_s = {part: status.timing.get(f"{part}_s") for part in STEP_PARTS}
    parts = [f"{part} {duration(s)}" for part, s in taken_s.items() if is_number(s) and s >= 5e-4]
    if parts:
        lines += flow(label("mean step"), joined(parts, "  ").removeprefix(f"step{JOINT}"), width, "")
    return lines


def _turns(status: Status, width: int) -> list[Text]:
    """Turns and tools per trajectory, and failures so far by kind; nothing for tasks without any."""
    env, turns = status.env or {}, list[str]()
    if "turns_mean" in env:
        turns = [f"mean {number(env['turns_mean'], 1)}", f"max {count(env.get('turns_max'))}"]
        turns.append(f"tools {duration(env.get('tool_s'))}")
        turns += [f"forks {count(env['forks'])}"] if env.get("forks") else []
    failures = {key.removeprefix("failed/"): total for key, total in env.items() if key.startswith("failed/")}
    figures = [*turns, *(f"{count(total)} failed ({kind})" for kind, total in failures.items())]
    return flow(label("turns" if turns else "failures"), joined(figures, "  "), width, "") if figures else []


def _data(status: Status) -> list[Text]:
    """What the data store holds; nothing if it is empty and was never without an owner for a key."""
    data = status.data
    if data is None or not (data.keys or data.orphans):
        return []
    line = label("data").append(f"{count(data.keys)} keys, {size(data.bytes)}")
    line.append(f"  fetched per step {size(data.bytes_fetched_per_step)}", "dim")
    return [line.append(f"  orphans {count(data.orphans)}", "yellow") if data.orphans else line]


def _notes(status: Status, room: int) -> list[Text]:
    """The newest notes (events), below the error of a failed run."""
    styles = {"warning": "yellow", "failed": "bold red"}
    notes = [
        Text(f"{clock(note.time_s):>9}  ", "dim").append(note.text, styles.get(note.event or "", ""))
        for note in status.notes[-room:]
    ]
    if status.error:
        notes = [Text(f"failed: {status.error.splitlines()[0]}", "bold red"), *notes[1:]]
    return notes[:room]
