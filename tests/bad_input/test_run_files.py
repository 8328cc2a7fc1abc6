"""Absurd values in the files of a recorded run: every command that reads them says so, or shows the rest,
within its limits.

Each field of each kind of line gets each value. A file of lines has a copy of the line for every mutation,
beside the run's own lines, so one command meets them all; status.json and config.resolved.json are spoilt one
field at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.cli.app import run
from asyncrl_cli.data.sample_fields import FIELDS, Field, Schema
from asyncrl_cli.data.trajectories import GroupPayload, segment_of, trajectory_of
from asyncrl_cli.simulate.calibration import calibrate
from asyncrl_cli.train.sample_dump import SampledGroup, dump_samples
from tests.bad_input.made import NAME, Place, copied, make_place, replace, set_at
from tests.simulate.test_calibration import truth, write_run

ABSURD = {
    "NaN": "NaN",
    "infinity": "Infinity",
    "minus infinity": "-Infinity",
    "1e308": "1e308",
    "-1e308": "-1e308",
    "1e-308": "1e-308",
    "1e13": "1e13",
    "10**13": str(10**13),
    "3 * 10**8": str(3 * 10**8),
    "2**64": str(2**64),
    "400 digits": "9" * 400,
    "5000 digits": "9" * 5000,
    "zero": "0",
    "negative": "-7",
    "negative time": "-1e9",
    "text": '"x"',
    "nan as text": '"nan"',
    "empty text": '""',
    "half a character": '"\\ud800"',
    "null": "null",
    "true": "true",
    "list": "[]",
    "list of lists": "[[1, [2]]]",
    "object": '{"a": {}}',
    "deep": "[" * 150 + "]" * 150,
    "deeper": "[" * 5000 + "]" * 5000,
}
MARK = "asyncrl-mutated"
LIMIT_CPU_S = 20.0
DUMP = "samples/step-000006.jsonl"
READERS = {
    "metrics.jsonl": ("report", "trace", "compare", "status"),
    "events.jsonl": ("report", "trace"),
    "timeline.jsonl": ("report", "trace"),
    DUMP: ("report", "samples -n 999", "samples --sort reward --json", "samples --group p"),
    "status.json": ("status", "status --json", "compare", "trace", "report", "logs"),
    "config.resolved.json": ("compare", "report", "trace"),
}
"""What reads each file. `samples` says of every damaged line that it is left out, as `report` and the others
do."""
LINES = tuple(file for file in READERS if file.endswith(".jsonl"))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = make_place(tmp_path_factory.mktemp("made"))
    schema = Schema(
        [
            *FIELDS,
            Field(name="entropy", per="sampled", by="engine", in_samples=True, shown="colour", doc="in nats"),
            Field(name="kind", per="token", by="engine", in_samples=True, shown="number"),
            Field(name="level", per="trajectory", by="environment", in_samples=True, shown="number"),
        ]
    )
    fields = {"entropy": np.ones(2, np.float32), "kind": np.arange(3, dtype=np.float32)}
    segment = {**segment_of([1, 2, 3], [0.0, -0.5, -0.25], [-1, 1, 2]), **fields}
    values = {"reward": 1.0, "finish_reason": "stop", "turn_rewards": (1.0,), "level": [3, "hard"]}
    trajectory = trajectory_of((segment,), schema, **values)
    payload = GroupPayload(uid="p7", epoch=0, attempt=0, trajectories=(trajectory, trajectory))
    trained = SampledGroup(
        payload=payload, advantages=[0.5, -0.5], logprobs=[np.full(2, -0.5, np.float32)] * 2, answer="7"
    )
    dump_samples(place.run / "samples", 6, [trained], window=2, decode=str, schema=schema)
    return place


@pytest.fixture
def place(original: Place, tmp_path: Path) -> Place:
    return copied(original, tmp_path / "copy")


def paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything inside; of a list only its first entry's."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, dict | list):
        entries = content.items() if isinstance(content, dict) else [*enumerate(content)][:1]
    for key, value in entries:
        yield (*path, key)
        yield from paths(value, (*path, key))


def mutated(text: str, path: tuple[Any, ...], value: str) -> str:
    """The JSON `text` with `value`, written as it is, at `path`."""
    return json.dumps(set_at(path, MARK)(json.loads(text))).replace(f'"{MARK}"', value, 1)


def kinds(path: Path) -> list[str]:
    """One line of each kind: of each event, else the one with most keys."""
    lines = path.read_text().splitlines()
    return list({json.loads(line).get("event", ""): line for line in sorted(lines, key=len)}.values())


def spoil_lines(path: Path, values: Iterable[str]) -> None:
    """Put a copy of a line for each of its fields and each value before the file's own lines."""
    lines = [
        mutated(line, at, value) for value in values for line in kinds(path) for at in paths(json.loads(line))
    ]
    replace(path, ("".join(f"{line}\n" for line in lines) + path.read_text()).encode())


def ask(command: str, place: Place, capsys: pytest.CaptureFixture[str]) -> str:
    """Run it, and return what it said on stderr. It is done, or refuses with a reason and a hint, within its
    limits."""
    name, *options = command.split()
    runs = [NAME, NAME] if name == "compare" else [NAME]
    out = ["--out", str(place.root / f"{name}.out")] if name in ("report", "compare", "trace") else []
    began_s = time.process_time()
    code = run([name, *runs, *options, *out, "--runs-dir", str(place.runs)])
    spent_s = time.process_time() - began_s
    said = capsys.readouterr().err
    assert "this is a bug" not in said, (command, said)
    assert "Traceback" not in said, (command, said)
    assert code == 0 or (code in (2, 4) and "hint:" in said), (command, code, said)
    assert spent_s < LIMIT_CPU_S, (command, spent_s)
    return said


@pytest.mark.parametrize("file", LINES)
def test_absurd_values_in_any_field_of_a_line_are_left_out_and_said(
    place: Place, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil_lines(place.run / file, ABSURD.values())
    for command in READERS[file]:
        said = ask(command, place, capsys)
        assert command == "status" or f"{file} left out: " in said, (command, said)


@pytest.mark.slow
@pytest.mark.parametrize("value", ABSURD.values(), ids=ABSURD)
def test_one_absurd_value_in_all_fields_of_all_files_of_lines_is_survived(
    place: Place, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in LINES:
        spoil_lines(place.run / file, [value])
    for command in ("report", "trace", "compare", "samples -n 99", "samples -n 99 --field entropy"):
        ask(command, place, capsys)


def cases(file: Path, every: int) -> list[tuple[tuple[Any, ...], str]]:
    """One in `every` pairs of a field and a value, those of a field with others than those of the next."""
    everything = list(product(paths(json.loads(file.read_text())), ABSURD.values()))
    return everything[::every]


@pytest.mark.parametrize(
    ("file", "every"),
    [
        ("status.json", 331),
        ("config.resolved.json", 331),
        pytest.param("status.json", 61, marks=pytest.mark.slow),
        pytest.param("config.resolved.json", 61, marks=pytest.mark.slow),
    ],
)
def test_a_file_with_an_absurd_value_is_refused_or_shown(
    place: Place, file: str, every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path, own = place.run / file, (place.run / file).read_text()
    readers = cycle(READERS[file])
    for at, value in cases(path, every):
        replace(path, mutated(own, at, value).encode())
        ask(next(readers), place, capsys)


@pytest.mark.parametrize("file", [file for file in READERS if file != DUMP])
def test_an_audit_of_absurd_values_ends_with_a_verdict_or_a_refusal(
    place: Place, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, own = place.run / file, (place.run / file).read_text()
    every = [None] if file in LINES else cases(path, 331)
    for case in every:
        if case is None:
            spoil_lines(path, ABSURD.values())
        else:
            replace(path, mutated(own, *case).encode())
        began_s = time.process_time()
        code = run(["audit", NAME, "--runs-dir", str(place.runs)])
        said = capsys.readouterr().err
        assert "this is a bug" not in said, (case, said)
        assert code == 1 if file in LINES else code in (0, 1, 4), (case, code, said)
        assert time.process_time() - began_s < LIMIT_CPU_S, case


def test_a_calibration_says_what_it_left_out(calibrated: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(calibrated, directory)
    for file in ("metrics.jsonl", "events.jsonl"):
        spoil_lines(directory / file, [ABSURD["object"]])
    notes = calibrate(directory).notes
    assert "metrics.jsonl left out: " in notes
    assert "events.jsonl left out: " in notes


@pytest.mark.parametrize("value", ABSURD.values(), ids=ABSURD)
def test_a_calibration_survives_an_absurd_value_in_every_field(
    calibrated: Path, tmp_path: Path, value: str
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(calibrated, directory)
    for file in ("metrics.jsonl", "events.jsonl"):
        spoil_lines(directory / file, [value])
    with suppress(ConfigError):
        calibrate(directory)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("calibrated") / "run", truth(), "partial-rollout", 20)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)],
    ids=["directory", "pipe", "loop"],
)
@pytest.mark.parametrize("file", READERS)
def test_what_is_no_file_is_refused_in_a_files_place(
    place: Place, file: str, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (place.run / file).unlink()
    make(place.run / file)
    for command in READERS[file]:
        ask(command, place, capsys)
