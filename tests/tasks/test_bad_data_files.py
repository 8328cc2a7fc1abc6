"""Data files as they come: whatever is wrong is one ConfigError with file, line, reason and hint, at once,
and no traceback."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pickle
import re
import socket
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy
import pyarrow as pa
import pyarrow.parquet
import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.job.driver_prompts import PromptFeed
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.files import read_items
from asyncrl_cli.tasks.task import Task, load_task

GOOD = b'{"prompt": "1+1=", "answer": "2"}\n'
LIMIT_S = 10.0


def load(path: Path | str, **task: Any) -> Task:
    kind = "parquet" if str(path).endswith(".parquet") else "jsonl"
    return load_task(
        Profile.model_validate({"task": {"source": f"{kind}:{path}", **task}, "eval": {"prompts": 0}})
    )


def refusal(path: Path | str, **task: Any) -> str:
    """Message and hint; in time, in few words, and such that any terminal can show it."""
    began_s = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        load(path, **task)
    assert time.monotonic() - began_s < LIMIT_S
    assert refused.value.hint
    text = f"{refused.value.message} ({refused.value.hint})"
    text.encode("utf-8")
    assert len(text) < 2000
    return text


def row(**columns: Any) -> bytes:
    return json.dumps({"prompt": "x", "answer": "y", **columns}).encode() + b"\n"


# fmt: off
JSONL = {
    "empty file": (b"", "holds no rows"),
    "half of a surrogate pair in the prompt":
        (GOOD + b'{"prompt": "a\\ud800", "answer": "1"}', ":2: .*the lone surrogate U\\+D800 at 1"),
    "a surrogate written as bytes": (
        GOOD + b'{"prompt": "\xed\xa0\x80", "answer": "1"}',
        ":2: not UTF-8 text \\(byte 12\\).*save the file as UTF-8",
    ),
    "a number of 5,000 digits":
        (GOOD + b'{"prompt": "a", "answer": ' + b"7" * 5000 + b"}", ":2: not JSON: .*4300 digits"),
    "an infinite number":
        (GOOD + b'{"prompt": "a", "answer": 1e999}', ":2: .*inf, which cannot be an answer"),
    "NaN as answer":
        (GOOD + b'{"prompt": "a", "answer": NaN}', ":2: not JSON: NaN is not a JSON number, write null"),
    "lists nested 100,000 deep": (
        GOOD + row(x=0).replace(b"0", b"[" * 100_000 + b"]" * 100_000),
        ":2: nested more than 64 deep.*as text",
    ),
    "objects nested 100 deep":
        (GOOD + row(x=0).replace(b"0", b'{"a":' * 100 + b"0" + b"}" * 100), ":2: nested more than 64 deep"),
    "unclosed brackets": (b"[" * 100_000, ":1: (nested|not JSON)"),
    "a line of 20 MB":
        (GOOD + b'{"prompt": "' + b"x" * 20_000_000 + b'"}\n', "line 2 has more than 16,777,216 bytes"),
    "a key that is there twice": (
        GOOD + b'{"prompt": "a", "answer": "1", "prompt": "b"}',
        ':2: not JSON: the key "prompt" appears twice',
    ),
    "an inner key that is there twice":
        (b'{"prompt": "a", "answer": "1", "x": {"y": 1, "y": 2}}', ':1: .*"y" appears twice'),
    "NUL bytes": (GOOD + b"\0" * 4096 + b"\n", ":2: not JSON"),
    "a NUL within text":
        (GOOD + b'{"prompt": "a\0b", "answer": "1"}', ":2: not JSON: Invalid control character at column 14"),
    "UTF-16 with its mark": ('{"prompt": "a"}'.encode("utf-16"), ":1: not UTF-8 text \\(byte 0\\)"),
    "Latin-1":
        (GOOD + '{"prompt": "é", "answer": "1"}'.encode("latin-1"), ":2: not UTF-8 text \\(byte 12\\)"),
    "a byte order mark in the middle":
        (GOOD + b"\xef\xbb\xbf" + GOOD, ":2: not JSON: Unexpected UTF-8 BOM|:2: not JSON"),
    "one JSON array for all":
        (b"[" + GOOD.strip() + b"," + GOOD.strip() + b"]", ":1: not a JSON object but list"),
    "a pretty-printed object":
        (json.dumps({"prompt": "a", "answer": "1"}, indent=2).encode(), ":1: not JSON"),
    "a bare null": (GOOD + b"null\n", ":2: not a JSON object but NoneType"),
    "CSV": (b"prompt,answer\n1+1=,2\n", ":1: not JSON"),
    "an empty object": (b"{}\n", ':1: no column "prompt"; it has: none'),
    "10,000 other columns":
        (json.dumps({f"c{i}": i for i in range(10_000)}).encode(), "it has: c0, c1, .*and 9980 more"),
    "a column name of 1 MB": (json.dumps({"x" * 1_000_000: 1}).encode(), 'no column "prompt"'),
    "a null prompt":
        (b'{"prompt": null, "answer": "1"}\n', ':1: column "prompt" is neither .* null.*task.prompt_key'),
    "an object as prompt":
        (row(prompt={"role": "user", "content": "x"}), "neither text nor a list of messages but dict"),
    "no messages": (row(prompt=[]), ':1: column "prompt" holds no messages'),
    "messages by other names":
        (row(prompt=[{"from": "user", "value": "x"}]), r":1: prompt\[0\] is not a message .*: from, value"),
    "a message of nobody": (
        row(prompt=[{"role": "human", "content": "x"}]),
        r":1: prompt\[0\] .*role human.*role is one of system, .*user",
    ),
    "an image in a message":
        (row(prompt=[{"role": "user", "content": "x", "images": ["a.png"]}]), "role, content, images"),
    "parts in a message":
        (row(prompt=[{"role": "user", "content": [{"type": "text"}]}]), r"prompt\[0\] is not a message"),
    "an empty message":
        (row(prompt=[{"role": "user", "content": " "}]), r'column "prompt\[0\].content" is empty'),
    "a prompt with its answer": (
        row(prompt=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "1"}]),
        ':1: column "prompt" ends with the assistant\'s message',
    ),
    "a prompt of spaces": (row(prompt=" \t "), ':1: column "prompt" is empty'),
    "a prompt of the wrong case": (b'{"Prompt": "a", "answer": "1"}\n', 'task.prompt_key = "Prompt"'),
    "a truth as answer": (row(answer=True), ':1: column "answer" is neither text nor a number but bool'),
    "an object as answer":
        (row(answer={"a": 1}), ":1: .*neither text nor a number but dict.*task.answer_key"),
    "no answer": (b'{"prompt": "a"}\n', ':1: no column "answer"'),
}
# fmt: on


@pytest.mark.parametrize("name", JSONL)
def test_a_bad_jsonl_file_is_refused(tmp_path, name):
    content, expected = JSONL[name]
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    text = refusal(path)
    assert "data.jsonl" in text
    assert re.search(expected, text), text


FINE_JSONL = {
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "Windows line ends": GOOD.replace(b"\n", b"\r\n"),
    "no newline at the end": GOOD.strip(),
    "line separators of Unicode": '{"prompt": "1+1=", "answer": "2", "x": "a\u2028b\x85c"}\n'.encode(),
    "a NUL that is escaped": row(prompt="1+1=", answer="2", x="a\0b"),
    "half of a surrogate pair in another column": row(prompt="1+1=", answer="2", x="\ud800"),
    "a whole surrogate pair": b'{"prompt": "1+1=", "answer": "2", "x": "\\ud83d\\ude00"}',
    "nesting that is deep enough": row(prompt="1+1=", answer="2", x=json.loads("[" * 60 + "]" * 60)),
    "a large number": row(prompt="1+1=", answer="2", x=10**4000),
    "a prompt of 1 MB": row(prompt="1+1=" + "0" * 1_000_000, answer="2"),
}


@pytest.mark.parametrize("name", FINE_JSONL)
def test_an_odd_jsonl_file_is_read(tmp_path, name):
    path = tmp_path / "data.jsonl"
    path.write_bytes(FINE_JSONL[name])
    task = load(path)
    assert [item["answer"] for item in task.train] == ["2"]
    goes_everywhere(task)


def test_an_answer_may_be_a_whole_number_beyond_all_floats(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "10**400", "answer": 1' + b"0" * 400 + b"}")
    assert load(path).train[0]["answer"] == "1" + "0" * 400


def goes_everywhere(task: Task) -> None:
    """To the rollout worker, to the reward process, and, by name, through a checkpoint."""
    assert len(pickle.loads(pickle.dumps(task.train))) == len(task.train)
    feed = PromptFeed(task.train, seed=0)
    prompt, state = feed.next(), json.loads(json.dumps(feed.state()))
    resumed = PromptFeed(pickle.loads(pickle.dumps(task.train)), seed=0)
    resumed.restore(state)
    assert resumed.find(prompt.uid, prompt.epoch).uid == prompt.uid


def a_directory(path: Path) -> None:
    path.mkdir()


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket may have 107 characters
        server.bind(path.name)
        os.chdir(here)


def a_loop_of_links(path: Path) -> None:
    path.symlink_to(path)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "does not exist.* holds "),
    "a directory": (a_directory, "it is a directory, not a file"),
    "a pipe": (os.mkfifo, "it is a pipe, not a file"),
    "a socket": (a_socket, "cannot be read"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
    "a terminal": (lambda path: path.symlink_to("/dev/ptmx"), "it is a device, not a file"),
    "a link to itself": (a_loop_of_links, "too many levels of symbolic links"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "does not exist"),
    "a file as directory": (lambda path: None, "not a directory"),
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("key", ["task.source", "task.eval_path"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path, kind, key, suffix):
    make, expected = KINDS[kind]
    path = tmp_path / f"data.{suffix}"
    make(path)
    if kind == "a file as directory":
        (tmp_path / "file").write_text("x")
        path = tmp_path / "file" / f"data.{suffix}"
    good = tmp_path / "good.jsonl"
    good.write_bytes(GOOD)
    text = refusal(path) if key == "task.source" else refusal_of_eval(good, path)
    assert text.startswith(f"{key}: ")
    assert re.search(expected, text), text


def refusal_of_eval(source: Path, eval_path: Path) -> str:
    profile = {"task": {"source": f"jsonl:{source}", "eval_path": str(eval_path)}, "eval": {"prompts": 1}}
    with pytest.raises(ConfigError) as refused:
        load_task(Profile.model_validate(profile))
    assert refused.value.hint
    return f"{refused.value.message} ({refused.value.hint})"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x" * 300 + ".jsonl", "file name too long"),
        ("d/" * 3000 + "x.jsonl", "file name too long"),
        ("a\0b.jsonl", "embedded null byte"),
        ("~nobody-of-this-name/x.jsonl", "does not exist"),
        ("\x1b[31mred.jsonl", "does not exist"),
    ],
)
def test_a_name_that_no_file_has_is_refused(name, expected):
    """Also where no profile has refused it before."""
    columns = {"prompt": "prompt", "answer": "answer", "needs_answer": True}
    with pytest.raises(ConfigError, match=expected) as refused:
        read_items(Path(name), key="task.source", limit=None, **columns)
    assert len(refused.value.message) < 500


def test_the_hint_of_a_missing_file_names_a_similar_one_or_the_missing_directory(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(GOOD)
    (tmp_path / "zebra.jsonl").write_bytes(GOOD)
    assert f"did you mean {tmp_path}/train.jsonl?" in refusal(tmp_path / "trian.jsonl")
    assert f"there is no directory {tmp_path}/nowhere" in refusal(tmp_path / "nowhere" / "train.jsonl")


def test_a_file_that_we_may_not_read_is_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD)
    path.chmod(0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may read everything
    try:
        assert "permission denied" in refusal(path)
    finally:
        os.seteuid(user)


def write_parquet(path: Path, columns: dict[str, Any], **how: Any) -> Path:
    pa.parquet.write_table(pa.table(columns), path, **how)
    return path


PROMPTS = {"prompt": ["a", "b"], "answer": ["1", "2"]}
NS, ODD_NS = pa.timestamp("ns"), 1_700_000_000_000_000_001
WHEN = datetime.datetime(2023, 11, 14, 22, 13, 20)

COLUMNS: dict[str, tuple[pa.Array, Any]] = {
    "timestamp": (pa.array([WHEN] * 2, pa.timestamp("us")), WHEN),
    "nanoseconds": (pa.array([ODD_NS] * 2, NS), WHEN),
    "time zone": (
        pa.array([0] * 2, pa.timestamp("ms", "+05:30")),
        datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC),
    ),
    "date": (pa.array([1] * 2, pa.date32()), datetime.date(1970, 1, 2)),
    "time of day": (pa.array([1001] * 2, pa.time64("ns")), datetime.time(0, 0, 0, 1)),
    "duration": (pa.array([1001] * 2, pa.duration("ns")), datetime.timedelta(microseconds=1)),
    "decimal": (pa.array([Decimal("1.50")] * 2, pa.decimal128(38, 2)), Decimal("1.50")),
    "wide decimal": (pa.array([Decimal("1.5")] * 2, pa.decimal256(70, 1)), Decimal("1.5")),
    "bytes": (pa.array([b"\0\xff"] * 2), b"\0\xff"),
    "bytes of one length": (pa.array([b"ab"] * 2, pa.binary(2)), b"ab"),
    "large bytes": (pa.array([b"ab"] * 2, pa.large_binary()), b"ab"),
    "uuid": (pa.array([b"0123456789abcdef"] * 2, pa.uuid()), UUID(bytes=b"0123456789abcdef")),
    "half float": (pa.array([1.5] * 2, pa.float16()), 1.5),
    "infinity": (pa.array([float("inf")] * 2), float("inf")),
    "unsigned": (pa.array([2**64 - 1] * 2, pa.uint64()), 2**64 - 1),
    "nothing but nulls": (pa.nulls(2), None),
    "truth": (pa.array([True] * 2), True),
    "large text": (pa.array(["x"] * 2, pa.large_string()), "x"),
    "text view": (pa.array(["x"] * 2, pa.string_view()), "x"),
    "dictionary": (pa.array(["x"] * 2).dictionary_encode(), "x"),
    "list": (pa.array([[1, None]] * 2), [1, None]),
    "list of nanoseconds": (pa.array([[ODD_NS]] * 2, pa.list_(NS)), [WHEN]),
    "large list": (pa.array([[ODD_NS]] * 2, pa.large_list(NS)), [WHEN]),
    "list of one length": (pa.array([[ODD_NS] * 2] * 2, pa.list_(NS, 2)), [WHEN, WHEN]),
    "struct": (
        pa.array([{"a": {"b": ODD_NS}}] * 2, pa.struct([("a", pa.struct([("b", NS)]))])),
        {"a": {"b": WHEN}},
    ),
    "map": (pa.array([[("k", ODD_NS)]] * 2, pa.map_(pa.string(), NS)), [("k", WHEN)]),
    "all at once": (
        pa.array(
            [[{"m": [("k", [ODD_NS])]}]] * 2, pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.list_(NS)))]))
        ),
        [{"m": [("k", [WHEN])]}],
    ),
    "tensor": (pa.FixedShapeTensorArray.from_numpy_ndarray(numpy.zeros((2, 2, 3), numpy.int8)), [0] * 6),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_parquet_column_of_any_type_reaches_the_reward_and_survives_a_resume(tmp_path, name):
    column, expected = COLUMNS[name]
    task = load(write_parquet(tmp_path / "data.parquet", {**PROMPTS, "x": column}))
    assert [item["metadata"]["x"] for item in task.train] == [expected, expected]
    goes_everywhere(task)


NO_PYTHON_VALUE = {
    "a year beyond 9999": pa.array([2**62] * 2, pa.timestamp("us")),
    "a day beyond 9999": pa.array([10**8] * 2, pa.date32()),
    "an unknown time zone": pa.array([1] * 2, pa.timestamp("us", "Nowhere/At_All")),
    "a duration of ages": pa.array([2**61] * 2, pa.duration("ms")),
    "a field that is there twice": pa.StructArray.from_arrays([pa.array([1, 2])] * 2, names=["a", "a"]),
    "text that is no UTF-8": pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff", b"b"]).buffers()),
}


@pytest.mark.parametrize("name", NO_PYTHON_VALUE)
def test_a_parquet_value_that_python_has_no_value_for_is_refused(tmp_path, name):
    text = refusal(write_parquet(tmp_path / "data.parquet", {**PROMPTS, "x": NO_PYTHON_VALUE[name]}))
    assert 'data.parquet: column "x" of type' in text
    assert "leave the column out of the file, or write it as text" in text


@pytest.mark.parametrize(
    "of",
    [lambda texts: pa.array(texts).dictionary_encode(), lambda texts: pa.array(texts, pa.large_string())],
)
def test_prompts_of_any_text_type_are_read(tmp_path, of):
    task = load(
        write_parquet(tmp_path / "data.parquet", {"prompt": of(["a", "b"]), "answer": of(["1", "2"])})
    )
    assert [(item["prompt"], item["answer"]) for item in task.train] == [("a", "1"), ("b", "2")]


def test_decimals_are_answers_too(tmp_path):
    columns = {"prompt": ["a"], "answer": pa.array([Decimal("1.50")])}
    assert load(write_parquet(tmp_path / "data.parquet", columns)).train[0]["answer"] == "1.50"


# fmt: off
PARQUET = {
    "no rows": ({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}, "holds no rows"),
    "no columns": ({}, "holds no rows"),
    "no such column": (
        {"question": ["a"], "answer": ["1"]},
        'data.parquet:1: no column "prompt"; it has: question, answer',
    ),
    "a null prompt":
        ({"prompt": ["a", None], "answer": ["1", "2"]}, 'data.parquet:2: column "prompt" is neither .* null'),
    "a null answer":
        ({"prompt": ["a", "b"], "answer": ["1", None]}, 'data.parquet:2: column "answer" is neither .* null'),
    "a nested prompt":
        ({"prompt": [[{"role": "user"}]], "answer": ["1"]}, r"data.parquet:1: prompt\[0\] is not a message"),
    "bytes as prompt":
        ({"prompt": [b"a"], "answer": ["1"]}, 'data.parquet:1: column "prompt" is neither .* bytes'),
    "a date as answer":
        ({"prompt": ["a"], "answer": [datetime.date(2026, 1, 2)]}, "data.parquet:1: .*neither .* date"),
    "NaN as answer":
        ({"prompt": ["a"], "answer": [float("nan")]}, "data.parquet:1: .*nan, which cannot be an answer"),
    "2,000 rows and a bad one": (
        {"prompt": [*map(str, range(2000)), " "], "answer": ["1"] * 2001},
        'data.parquet:2001: column "prompt" is empty',
    ),
}
# fmt: on


@pytest.mark.parametrize("name", PARQUET)
def test_a_bad_parquet_file_is_refused(tmp_path, name):
    columns, expected = PARQUET[name]
    text = refusal(write_parquet(tmp_path / "data.parquet", columns))
    assert re.search(expected, text), text


def test_a_parquet_column_that_is_there_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays(
        [pa.array(["a"]), pa.array(["1"]), pa.array(["b"])], names=["prompt", "answer", "prompt"]
    )
    pa.parquet.write_table(table, tmp_path / "data.parquet")
    assert 'column "prompt" appears twice' in refusal(tmp_path / "data.parquet")


@pytest.mark.parametrize("num_bytes", [0, 1, 4, 8, 100, 1000, -1, -8, -100])
def test_a_truncated_parquet_file_is_refused(tmp_path, num_bytes):
    path = write_parquet(
        tmp_path / "data.parquet", {"prompt": [str(i) for i in range(1000)], "answer": ["1"] * 1000}
    )
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert "is not a whole parquet file" in refusal(path)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_a_parquet_file_with_damaged_pages_is_refused_or_read_but_never_a_traceback(tmp_path, compression):
    prompts = {"prompt": [f"{i} " * 20 for i in range(3000)], "answer": ["1"] * 3000}
    path = write_parquet(
        tmp_path / "data.parquet", prompts, compression=compression, write_page_checksum=True
    )
    whole = path.read_bytes()
    num_read = 0
    for start in range(4, len(whole) - 2000, max(1, (len(whole) - 2000) // 25)):
        path.write_bytes(whole[:start] + b"\xff" * 40 + whole[start + 40 :])
        with contextlib.suppress(ConfigError):
            load(path)
            num_read += 1
    assert num_read < 20
