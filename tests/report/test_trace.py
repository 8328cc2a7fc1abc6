"""Traces of a simulated run that was recorded as real ones are: their slices and arrows are those of
events.jsonl."""

from __future__ import annotations

import gzip
import json
import re
import tomllib
import tracemalloc
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.bench.simulated_runs import recorded
from asyncrl_cli.cli.records import parse_steps
from asyncrl_cli.measure.machines import MACHINES
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.report.write import write_trace
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import simulate
from tests.report.recorded_run import line, make_run
from tests.report.trace_processor import TraceProcessor
from tests.simulate.small_workload import COSTS

GROUPS, SLOTS = 96, 16
DOCS = Path(__file__).parents[2] / "docs" / "trace.md"
WORKLOAD = Workload.model_validate(
    {
        "name": "small",
        "windows": 5,
        "profile": {
            "placement": {"gpus": 2},
            "trainer": {"ppo_mini_batch_size": 2},
            "rollout": {"n": 4, "slots": SLOTS},
            "logging": {"trace_sequences": True},
        },
        **tomllib.loads(COSTS),
    }
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Recorded:
    directory = tmp_path_factory.mktemp("runs") / "simulated"
    loaded = profile_for(WORKLOAD, "partial-rollout", (), groups=GROUPS)
    with recorded(loaded, directory) as recorder:
        made = simulate(loaded.profile, WORKLOAD, observers=[recorder], machines=True)
    assert made.error is None
    return Recorded(directory)


@pytest.fixture(scope="module")
def events(run):
    return [json.loads(line) for line in run.files.events.read_text().splitlines()]


@pytest.fixture(scope="module")
def trace(run):
    path = run.files.path / "trace.json"
    write_trace(run, path)
    return path


def entries_of(path):
    return json.loads(path.read_text())["traceEvents"]


def times_of(events, name):
    return {event["group"]: event["time_s"] for event in events if event["event"] == name}


def test_slices_and_arrows_are_as_many_as_events(trace, events):
    entries, happened = entries_of(trace), Counter(event["event"] for event in events)
    slices = Counter(
        (entry["cat"], entry["name"].split()[0])
        for entry in entries
        if entry["ph"] == "X" and entry["cat"] != "state"
    )
    assert happened["trained"] == GROUPS
    assert slices["phase", "generation"] == happened["running"]
    assert slices["phase", "waits"] == happened["finished"]
    assert slices["phase", "training"] == happened["trained"]
    assert slices["version", "version"] == happened["published"]
    assert slices["load", "load"] == happened["loaded"]
    arrows = Counter((entry["cat"], entry["ph"]) for entry in entries if entry["ph"] in "stf")
    assert arrows["group", "s"] == arrows["group", "f"] == GROUPS
    assert arrows["group", "t"] == 2 * GROUPS
    assert arrows["load", "s"] == arrows["load", "f"] == happened["loaded"]


def test_slices_of_a_track_lie_side_by_side_or_in_each_other_and_every_arrow_binds_to_one(trace):
    tracks = defaultdict(list)
    for entry in entries_of(trace):
        if entry["ph"] == "X":
            assert entry["dur"] > 0
            tracks[entry["pid"], entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    for slices in tracks.values():
        around = []
        for start, end in sorted(slices, key=lambda pair: (pair[0], -pair[1])):
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)
    for entry in entries_of(trace):
        if entry["ph"] in "stf":
            assert any(start <= entry["ts"] < end for start, end in tracks[entry["pid"], entry["tid"]])


def test_sequences_take_the_slots_while_their_worker_is_busy(trace, run, events):
    entries = entries_of(trace)
    sequences = [entry for entry in entries if entry.get("cat") == "sequence" and entry["ph"] == "X"]
    assert (
        len({entry["name"] for entry in sequences}) == len(sequences) == 4 * len(times_of(events, "running"))
    )
    assert len({(entry["pid"], entry["tid"]) for entry in sequences}) <= SLOTS
    busy = [stay for line in run.timeline() for stay in line["spans"]["rollout-0"] if stay[0] == "busy"]
    covered, reached = 0, 0
    for start, end in sorted((entry["ts"], entry["ts"] + entry["dur"]) for entry in sequences):
        covered, reached = covered + max(0, end - max(start, reached)), max(reached, end)
    assert covered / 1e6 == pytest.approx(sum(end_s - start_s for _, start_s, end_s in busy), abs=0.05)


def test_a_part_has_the_groups_of_its_steps_whole_and_compressed_is_the_same(run, tmp_path, events):
    assert write_trace(run, tmp_path / "part.json", 3, 5) == write_trace(run, tmp_path / "part.json.gz", 3, 5)
    assert gzip.decompress((tmp_path / "part.json.gz").read_bytes()) == (tmp_path / "part.json").read_bytes()
    slices = [entry for entry in entries_of(tmp_path / "part.json") if entry["ph"] == "X"]
    wanted = {event["group"] for event in events if event["event"] == "trained" and 3 <= event["step"] <= 5}
    assert {entry["name"] for entry in slices if entry["cat"] == "group"} == wanted
    assert [entry["name"] for entry in slices if entry["cat"] == "step"] == ["step 3", "step 4", "step 5"]


def test_a_range_without_a_train_step_is_refused_and_leaves_the_trace_as_it_was(run, tmp_path):
    write_trace(run, tmp_path / "trace.json")
    before = (tmp_path / "trace.json").read_bytes()
    with pytest.raises(ConfigError, match="no step of --steps 9999:"):
        write_trace(run, tmp_path / "trace.json", 9_999)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_a_run_without_a_version_and_a_group_without_all_of_its_events_are_left_out(tmp_path):
    directory = make_run(tmp_path / "otter")
    (directory / "events.jsonl").write_text("")
    assert write_trace(Recorded(directory), tmp_path / "trace.json")["version"] == 0
    (directory / "events.jsonl").write_text(
        '{"time_s": 1.0, "event": "running", "group": "a@0.0"}\n{"time_s": 2.0, "event": "trained", "group": '
        '"a@0.0", "step": 1}\n'
    )
    assert write_trace(Recorded(directory), tmp_path / "trace.json")["group"] == 0


@pytest.mark.slow
def test_perfetto_answers_the_questions_of_the_docs_as_the_events_do(trace, events):
    questions = re.findall(r"```sql\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    running, finished, taken = (times_of(events, name) for name in ("running", "finished", "training"))
    of_step = {
        step: [e["group"] for e in events if e["event"] == "trained" and e["step"] == step]
        for step in (40, 41)
    }
    processor = TraceProcessor(trace)
    try:
        waited, made, phases, executors, machines, longest = map(processor.ask, questions)
        (flows,) = processor.ask(
            "SELECT COUNT(DISTINCT flow.id) AS number FROM flow JOIN args USING (arg_set_id) WHERE "
            "string_value = 'group'"
        )
        wrong = processor.ask("SELECT name, value FROM stats WHERE value > 0 AND severity != 'info'")
    finally:
        processor.close()
    assert wrong == []
    assert flows["number"] == 3 * GROUPS
    last = max(of_step[40], key=finished.__getitem__)
    assert [row["waited_for"] for row in waited] == [last]
    assert waited[0]["finished_s"] == pytest.approx(finished[last], abs=1e-5)
    windows = {e["group"]: e["version"] + 1 for e in events if e["event"] == "trained"}
    assert [row["group_key"] for row in made] == sorted(
        group for group, version in windows.items() if version == 11
    )
    assert {row["name"]: row["number"] for row in phases} == {
        "generation": len(running),
        "training": GROUPS,
        "waits to be taken": len(finished),
    }
    waits = next(row["mean_s"] for row in phases if row["name"] == "waits to be taken")
    assert waits == pytest.approx(sum(taken[group] - finished[group] for group in taken) / GROUPS, abs=1e-3)
    updates = {"param_update-rollout-0", "param_update-trainer-0"}
    tracks = {"feed (dataloader)", "generate-0", "rollout-0", "trainer-0 (train)", *updates}
    assert {row["executor"] for row in executors} == tracks
    assert {row["machine"] for row in machines} == MACHINES.keys() - {"logp", "ref_logp", "reward"}
    assert longest[0]["seconds"] > 0


@pytest.mark.parametrize(
    ("text", "steps"), [(":", (1, None)), ("7", (7, 7)), ("3:5", (3, 5)), ("3:", (3, None)), (":5", (1, 5))]
)
def test_steps_are_a_range_with_open_ends(text, steps):
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", "5:3", "a:b", "1:2:3", "-1"])
def test_what_is_no_range_of_steps_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_steps(text)
    assert caught.value.hint


def test_a_trace_of_a_long_run_keeps_no_lines_of_metrics_in_memory(tmp_path):
    run = make_run(tmp_path / "long", lines=[line(step) for step in range(1, 5001)])
    tracemalloc.start()
    try:
        write_trace(Recorded(run), tmp_path / "trace.json")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # 17 MB to read lines of up to 16 MiB; the lines themselves would take another 11
    assert peak_bytes < 20e6
