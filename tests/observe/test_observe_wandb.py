"""A real offline W&B run, read back from its own file."""

import json
import struct
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import GroupPayload, trajectory_of
from asyncrl_cli.observe import service_sinks
from asyncrl_cli.observe.service_sinks import tags_of
from asyncrl_cli.observe.sinks import to_json
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.train.sample_dump import SampledGroup, dump_samples

BLOCK_BYTES = 32768
"""The file is a LevelDB log: 7 bytes of its own, then blocks of records (checksum 4, length 2, type 1,
data)."""

SETTINGS = ["logging.wandb=offline", "logging.wandb_project=asyncrl-test"]
START = """
import json, logging, shutil, sys, threading, time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from asyncrl_cli.contracts.status import parse_status
from asyncrl_cli.observe.service_sinks import Wandb
from asyncrl_cli.profile.loaded import load
directory, done = Path(sys.argv[1]), parse_status(sys.argv[2])
profile = load("partial-rollout", sys.argv[3:5], environ={}).profile
"""
PROGRAM = (
    START
    + """
has_room, write = threading.Event(), Wandb.write
Wandb.write = lambda sink, line: has_room.wait(30) and write(sink, line)
sink = Wandb(profile, directory)
shutil.copytree(sys.argv[5], directory / "samples")
for step in range(1, 101):
    figures = {"reward/mean": step / 100, "staleness/histogram": [3, 1], "trainer/idle_ratio": 1.0}
    sink.line({"step": step, **figures})
has_room.set()
whole_run = replace(done, totals={"trainer/idle_ratio": 0.25, "reward/mean": 0.5})
sink.end(whole_run)
sink.close(whole_run)
wandb_threads = [thread.name for thread in threading.enumerate() if thread.name == "W&B"]
again = Wandb(profile, directory)
again.end(done)
again.close(done)
print(json.dumps({"threads": wandb_threads}))
"""
)
KILLED = (
    START
    + """
import psutil
logging.getLogger().addHandler(logging.NullHandler())  # a run's is its log file
sink = Wandb(profile, directory)
for process in psutil.Process().children(recursive=True):
    with suppress(psutil.NoSuchProcess):  # it ends with its parent
        process.kill()
        process.wait()
for step in range(1, 4):
    sink.line({"step": step, "reward/mean": 0.5})
    time.sleep(0.2)
sink.end(done)
sink.close(done)
"""
)


def records(path):
    """Every record's bytes; type 1 is whole, 2, 3 and 4 are the first, middle and last part of one."""
    content, parts, at = path.read_bytes(), b"", 7
    while at + 7 <= len(content):
        left_in_block = BLOCK_BYTES - at % BLOCK_BYTES
        if left_in_block < 7:
            at += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def contents(path, kind):
    """W&B's records of this kind, in order."""
    from wandb.proto import wandb_internal_pb2

    for data in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == kind:
            yield getattr(record, kind)


def figures(items):
    return {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in items}


def history(path):
    """The rows that W&B would draw."""
    return [figures(row.item) for row in contents(path, "history")]


def tags(path):
    return next(list(run.tags) for run in contents(path, "run"))


def summary(path):
    """What W&B shows of the run as a whole: the last of what was said."""
    return {key: value for part in contents(path, "summary") for key, value in figures(part.update).items()}


def dump(directory):
    """Of step 10, as a run writes it: a trajectory with four tokens, of which three are sampled; and a
    damaged line."""
    segment = {
        "tokens": np.array([5, 6, 7, 8], np.int32),
        "logprobs": np.array([0.0, -0.5, -0.5, -0.5], np.float32),
        "versions": np.array([-1, 1, 1, 2], np.int32),
        "mask": np.array([False, True, True, True]),
    }
    trajectory = trajectory_of((segment,), BUILT_IN, reward=0.5, finish_reason="stop")
    payload = GroupPayload(uid="p", epoch=0, attempt=0, trajectories=(trajectory,))
    group = SampledGroup(payload=payload, advantages=[None])
    path = dump_samples(directory, 10, [group], window=2, decode=lambda ids: "".join(f"<{i}>" for i in ids))
    with path.open("a") as file:
        file.write("{}\n")
    return directory


@pytest.mark.slow
def test_an_offline_run_holds_every_line_and_the_loop_never_waited(tmp_path, done):
    """All lines are handed over while W&B takes none yet: a loop that waited for one would lose it."""
    arguments = [
        sys.executable,
        "-c",
        PROGRAM,
        str(tmp_path),
        to_json(done.to_json()),
        *SETTINGS,
        str(dump(tmp_path / "dumps")),
    ]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    profile = load("partial-rollout", SETTINGS, environ={}).profile
    found = json.loads(ended.stdout.splitlines()[-1])
    run_id = (tmp_path / "wandb-run-id").read_text()
    path, resumed = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
    assert (tags(path), history(resumed)) == (list(tags_of(profile).values()), [])
    rows = history(path)
    (table,) = [row for row in rows if "samples._type" in row]
    rows.remove(table)
    (media,) = path.parent.glob("files/media/table/samples_*.table.json")
    assert (table["step"], table["samples._type"]) == (10, "table-file")
    text = "<5><6><7><8>"
    assert json.loads(media.read_text())["data"] == [[10, "p@0.0", 0, 0.5, "1: 2, 2: 1", 1, 3, "stop", text]]
    assert "damaged lines of" in ended.stderr
    assert "step-000010.jsonl left out: 1; line 2" in ended.stderr
    assert summary(path)["trainer/idle_ratio"] == 0.25, "of the whole run, not of its last step"
    assert summary(path).get("reward/mean", 1.0) == 1.0
    assert [row["reward/mean"] for row in rows] == [step / 100 for step in range(1, 101)]
    assert [row["step"] for row in rows] == list(range(1, 101))
    assert rows[0]["staleness/histogram._type"] == "histogram"
    assert rows[0]["staleness/histogram.values"] == [3, 1]
    assert found["threads"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "waits"), [("done", True), ("stopped", False), ("failed", False)])
def test_only_a_run_that_got_to_its_end_waits_for_a_slow_network(tmp_path, monkeypatch, done, phase, waits):
    may_end = threading.Event()

    class SlowRun:
        def finish(self):
            may_end.wait(0.3 if waits else 60)

    monkeypatch.setattr(service_sinks, "EARLY_CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(service_sinks.Wandb, "open", lambda sink: setattr(sink, "_run", SlowRun()))
    sink = service_sinks.Wandb(load("base", environ={}).profile, tmp_path)
    sink.end(replace(done, phase=phase))
    sink.close(replace(done, phase=phase))
    (thread,) = [one for one in threading.enumerate() if one.name == "W&B"] or [None]
    assert (thread is None) is waits
    may_end.set()
    if thread is not None:
        thread.join()


@pytest.mark.slow
def test_wandbs_own_process_may_die_without_a_traceback_of_ours(tmp_path, done):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), to_json(done.to_json()), *SETTINGS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
