"""Claims about groups, versions and metrics, from the run's events and timeline."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from operator import itemgetter

from asyncrl_cli.audit.claims import Claim
from asyncrl_cli.audit.run_files import RunFiles
from asyncrl_cli.base.errors import counted

ENDED = ("trained", "dropped", "requeued")
STAGES = ("running", "finished", "training", *ENDED)
Span = tuple[str, float, float]
ExecutorAttempt = tuple[str, int]
"""An executor's name, and the number of resumes before."""
NEXT = {
    "": {"running"},
    "running": {"finished", "dropped", "requeued"},
    "finished": {"training", "dropped", "requeued"},
    "training": {"trained"},
}
SLACK_S = 0.05
"""Events and lines of metrics are stamped one after the other."""
CLOCKS_S = 0.1
"""How well clocks of two processes are known to agree while others use the cores."""
IDLE = {
    "trainer": {"starved", "blocked", "syncing", "paused"},
    "rollout": {"starved", "waiting for tools", "blocked", "loading", "syncing", "paused", "failed", "done"},
}


def step_groups(files: RunFiles) -> int:
    """R."""
    batches = int(files.section("async_training")["require_batches"])
    return batches * int(files.section("trainer")["ppo_mini_batch_size"])


def bound(files: RunFiles) -> int:
    """The run's strict bound of staleness, in versions."""
    training = files.section("async_training")
    given = training.get("max_staleness")
    return math.ceil(Fraction(training["staleness_threshold"])) if given is None else int(given)


def account_claims(files: RunFiles) -> Iterator[Claim]:
    yield _whole(files)
    yield from _groups(files)
    yield _windows(files)
    yield from _staleness(files)
    if files.section("placement").get("lend"):
        yield _devices(files)
    yield from (_idle(files, role, key) for role, key in (("trainer", "trainer"), ("rollout", "rollouter")))


def _whole(files: RunFiles) -> Claim:
    claim = Claim("files", "every line can be read, and there is one of metrics for each train step")
    for step, line in enumerate(files.metrics, start=1):
        claim.check(line.get("step") == step, f"line {step} of metrics.jsonl is of step {line.get('step')}")
    trained = max((event.get("step", 0) for event in files.named("trained")), default=0)
    # the last step of a run that was killed may lack its line
    steps = (trained,) if files.is_done else (trained, trained - 1)
    claim.check(files.last_step in steps, f"metrics end at step {files.last_step}, events at {trained}")
    asked = files.section("run").get("train_steps")
    if files.is_done and asked is not None:
        claim.check(files.last_step == asked, f"{files.last_step} of {asked} steps have metrics")
    return claim


def _groups(files: RunFiles) -> Iterator[Claim]:
    order = Claim("groups", "every admitted group goes through its stages, once, and is accounted for")
    once = Claim("trained once", "no prompt of an epoch is trained twice, and a step trains R groups")
    counters = Claim("ledger", "the counters of the metrics are those of the events", limit=0.0)
    stages, prompts, steps = dict[str, str](), Counter[tuple[str, int]](), Counter[int]()
    times = defaultdict[str, list[float]](list)
    tokens = Counter[int]()
    # a deterministic run generates what was lost with a node anew, under the same key
    follows = {**NEXT, "requeued": {"running"}} if files.section("run").get("deterministic") else NEXT
    legs = list[tuple[int, dict[str, int]]]()  # the last step of each, and how many events it has
    for event in files.named(*STAGES, "resumed"):
        if event["event"] == "resumed":
            legs.append((event.get("from_step", 0), {stage: len(own) for stage, own in times.items()}))
            continue
        key, stage = str(event.get("group")), str(event["event"])
        before = stages.get(key, "")
        order.check(stage in follows.get(before, ()), f"{key} is {stage} after {before or 'nothing'}")
        if stage in ("dropped", "requeued"):
            order.check(event.get("reason"), f"{key} is {stage} without a reason")
        stages[key] = stage
        times[stage].append(event["time_s"])
        if stage == "trained":
            prompts[event["uid"], event["epoch"]] += 1
            steps[event["step"]] += 1
            tokens[event["step"]] += event["tokens"]
    if files.is_done:
        for key, stage in stages.items():
            order.check(stage in ENDED, f"the run is done, but {key} is still {stage}")
    for (uid, epoch), number in prompts.items():
        once.check(number == 1, f"prompt {uid} of epoch {epoch} is trained {number} times")
    size = step_groups(files)
    for step, number in steps.items():
        once.check(number == size, f"step {step} trains {number} groups, and not {size}")
    trained_tokens = 0
    for line in files.metrics:
        step, where = line.get("step", 0), f"step {line.get('step')}"
        trained_tokens += tokens[step]
        counters.near(line.get("groups_trained"), step * size, f"{where}: groups_trained")
        counters.near(line.get("tokens_trained"), trained_tokens, f"{where}: tokens_trained")
        live = [line.get(f"ledger/{stage}", -1) for stage in STAGES]
        counters.near(line.get("ledger/admitted_total"), sum(live), f"{where}: ledger/admitted_total")
        # the last line of a run that was extended later is of after its checkpoint's time
        most = next((counts for last_step, counts in legs if step <= last_step), None)
        for name, stage in (("admitted_total", "running"), *((stage, stage) for stage in ENDED)):
            value = line.get(f"ledger/{name}", -1)
            own = times[stage] if most is None else times[stage][: most.get(stage, 0)]
            low, high = (bisect_right(own, line["time_s"] + slack) for slack in (-SLACK_S, SLACK_S))
            text = f"{where}: ledger/{name} is {value}, but {low} to {high} by the events"
            counters.check(low <= value <= high, text)
    yield from (order, once, counters)


def _windows(files: RunFiles) -> Claim:
    claim = Claim("windows", "K train steps make a window, and each publish raises the version by one")
    size = files.section("async_training")["trigger_parameter_sync_step"]
    # a run's last window may be shorter, also if the run was extended later
    ends = {files.last_step, *(event.get("from_step") for event in files.named("resumed"))}
    windows = defaultdict[int, list[int]](list)
    for line in files.metrics:
        windows[line.get("window", -1)].append(line.get("step", 0))
    for window, steps in windows.items():
        text = f"window {window} has {len(steps)} train steps, and not {size}"
        claim.check(len(steps) <= size if steps[-1] in ends else len(steps) == size, text)
    for one, other in pairwise(files.metrics):
        text = f"step {other.get('step')}: window {other.get('window')} after version {one.get('version')}"
        claim.check(other.get("window") == one.get("version"), text)
    for line in files.metrics:
        risen = line.get("version", -9) - line.get("window", 0)
        claim.check(risen in (0, 1), f"step {line.get('step')}: version {line.get('version')} in its window")
    published = [event.get("version", -9) for event in files.named("published")]
    for before, after in pairwise(dict.fromkeys(published)):  # a resume publishes its version again
        claim.check(after == before + 1, f"version {after} is published after {before}")
    return claim


def _staleness(files: RunFiles) -> Iterator[Claim]:
    most, training = bound(files), files.section("async_training")
    what = f"no trained token is older than {counted(most, 'version')}, or from the future"
    limits = Claim("staleness bound", what)
    loads = Claim(
        "loaded first", "no group has tokens of a version whose load had not begun when the group finished"
    )
    metrics = Claim("staleness metrics", "staleness/* are those of the trained tokens", limit=1e-9)
    windows = {line.get("step"): line.get("window") for line in files.metrics}
    began = dict[int, float]()  # a load is heard of once it is verified: the first to begin may come last
    for event in files.named("loaded"):
        version = event["version"]
        began[version] = min(began.get(version, math.inf), event["began_s"])
    finished = {event["group"]: event["time_s"] for event in files.named("finished")}
    ages = defaultdict[int, list[tuple[int, int]]](list)
    for event in files.named("trained"):
        step, key = event["step"], event["group"]
        for version, count in event["versions"]:
            if step not in windows:
                continue
            age = windows[step] - version
            ages[step].append((age, count))
            limits.worst = max(age, limits.worst or 0)
            text = f"step {step}: {count} tokens of {key} are {age} versions old"
            limits.check(age >= 0 and (age <= most or training["on_stale"] == "accept"), text)
            at_s = finished.get(key, math.inf)
            loads.check(began.get(version, math.inf) <= at_s, f"{key} has tokens of version {version}")
    if training["on_stale"] == "accept":
        limits.unchecked = 'async_training.on_stale = "accept" promises no bound'
    size, seen = training["trigger_parameter_sync_step"], Counter[int]()
    for line in files.metrics:
        step, window = line.get("step", 0), line.get("window", 0)
        steps_before = seen[window]
        seen[window] += 1
        if not (found := ages.get(step)):
            continue
        total, where = sum(count for _, count in found), f"step {step}: staleness/"
        mean, oldest = sum(age * count for age, count in found) / total, max(age for age, _ in found)
        metrics.near(line.get("staleness/mean"), mean, f"{where}mean")
        metrics.near(line.get("staleness/max"), oldest, f"{where}max")
        metrics.near(line.get("staleness/steps_mean"), mean * size + steps_before, f"{where}steps_mean")
        metrics.near(line.get("staleness/steps_max"), oldest * size + steps_before, f"{where}steps_max")
    yield from (limits, loads, metrics)


def _spans(files: RunFiles, role: str) -> dict[ExecutorAttempt, list[Span]]:
    """By executor, also of those that a resumed run no longer has (the role of `rollout-0` is rollout), and
    by attempt: each begins at its checkpoint's time, which the attempt before may have outlasted."""
    found, attempts = defaultdict[ExecutorAttempt, list[Span]](list), _attempts(files)
    for line in files.timeline:
        for name in (name for name in line["covered"] if name.partition("-")[0] == role):
            found[name, attempts[line["step"]]] += line["spans"].get(name, ())
    return {attempt: sorted(own, key=itemgetter(1)) for attempt, own in found.items()}


def _attempts(files: RunFiles) -> dict[int, int]:
    """How often the run was resumed before each step of the timeline."""
    resumes = [event.get("from_step", 0) for event in files.named("resumed")]
    return {line["step"]: sum(step < line["step"] for step in resumes) for line in files.timeline}


def _is_lent(files: RunFiles, spans: Sequence[Span]) -> bool:
    """A worker on the trainer's devices begins asleep, and others are never paused."""
    return bool(spans) and spans[0][0] == "paused" and bool(files.section("placement").get("lend"))


def _devices(files: RunFiles) -> Claim:
    what = "no worker on the trainer's devices generates while the trainer computes"
    claim = Claim("lent devices", what, limit=CLOCKS_S)
    computes = ("busy", "scoring", "syncing")
    trains = defaultdict[int, list[tuple[float, float]]](list)  # by attempt, as its workers' times are
    for (_, attempt), own in _spans(files, "trainer").items():
        trains[attempt] = sorted(trains[attempt] + [(b, e) for state, b, e in own if state in computes])
    lent = {name: own for name, own in _spans(files, "rollout").items() if _is_lent(files, own)}
    for (name, attempt), own in lent.items():
        for begin, end in ((begin, end) for state, begin, end in own if state == "busy"):
            after = bisect_right(trains[attempt], (begin, math.inf))
            beside = trains[attempt][max(after - 1, 0) : after + 1]
            both = max((min(end, b) - max(begin, a) for a, b in beside), default=0.0)
            claim.near(max(both, 0.0), 0.0, f"{name} generates at {begin:.3f} s as the trainer computes")
    return claim


def _idle(files: RunFiles, role: str, key: str) -> Claim:
    claim = Claim(f"{role} idle", f"{key}/idle_ratio is that of the timeline's states", limit=0.01)
    spans = {attempt: own for attempt, own in _spans(files, role).items() if not _is_lent(files, own)}
    until = dict.fromkeys(spans, -math.inf)
    starts = {attempt: [start_s for _, start_s, _ in own] for attempt, own in spans.items()}
    # spans may overlap by milliseconds, whenever the driver has learned an executor's clock better
    ends = {attempt: list(accumulate((end_s for _, _, end_s in own), max)) for attempt, own in spans.items()}
    covered, attempts = {line["step"]: line["covered"] for line in files.timeline}, _attempts(files)
    for line in files.metrics:
        step, shares, shortest_s = line["step"], list[float](), math.inf
        ran = spans.keys() & {(name, attempts[step]) for name in covered.get(step, ())}
        for attempt in ran:
            begin, end = until[attempt], covered[step][attempt[0]]
            until[attempt] = end
            first, last = bisect_right(ends[attempt], begin), bisect_right(starts[attempt], end)
            inside = [(state, min(b, end) - max(a, begin)) for state, a, b in spans[attempt][first:last]]
            total = sum(seconds for _, seconds in inside if seconds > 0)
            idle = sum(seconds for state, seconds in inside if seconds > 0 and state in IDLE[role])
            # the last spans of an attempt are never written: a later line would have them
            if total > 0 and ends[attempt][last - 1] > end - SLACK_S:
                shares.append(idle / total)
                shortest_s = min(shortest_s, total)
        # within what clocks differ by, nothing is known, and a step without a report has no ratio
        if len(shares) == len(ran) > 0 and shortest_s > CLOCKS_S:
            found, expected = line.get(f"{key}/idle_ratio"), sum(shares) / len(shares)
            claim.near(found, expected, f"step {step}: {key}/idle_ratio", CLOCKS_S / shortest_s)
    if not claim.cases:
        claim.unchecked = "the timeline covers no whole step"
    return claim
