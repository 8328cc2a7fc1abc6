"""Files that anybody may have written: no wait, no more bytes than asked for, and one reason for whatever is
wrong."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.base.safe_files import UnsafeFile, load_json, open_regular, read_lines, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    left: int
    right: tuple[float, ...]


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (a_pipe, "a pipe"),
        (Path.mkdir, "a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
    ],
)
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, make: Any, kind: str) -> None:
    make(tmp_path / "odd")
    with pytest.raises(UnsafeFile, match=kind):
        open_regular(tmp_path / "odd")


def test_a_socket_is_refused(tmp_path: Path) -> None:
    a_socket(tmp_path / "odd")
    with pytest.raises(OSError, match="No such device or address"):
        open_regular(tmp_path / "odd")


def test_no_more_bytes_are_read_than_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 11)
    assert read_text(tmp_path / "large", max_bytes=11) == "x" * 11
    with pytest.raises(UnsafeFile, match="11 bytes; at most 10"):
        read_text(path, max_bytes=10)
    with pytest.raises(UnsafeFile, match="more than 10 bytes"):
        read_text(Path("/proc/self/status"), max_bytes=10)  # a file without a size


def test_lines_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\r\ntwo\n\nfour")
    assert list(read_lines(path)) == [b"one", b"two", b"", b"four"]
    path.write_bytes(b"one\n" + b"x" * 100)
    with pytest.raises(UnsafeFile, match="line 2 has more than 50 bytes"):
        list(read_lines(path, max_line_bytes=50))


def test_json_is_read_as_its_writer_declares_it(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    path.write_text('{"left": 1, "right": [1, 2.5]}')
    assert load_json(path, Pair) == Pair(left=1, right=(1.0, 2.5))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "EOF"),
        (b"\xff\xfe", "expected value"),
        (b"null", "object"),
        (b'{"left": 1}', "right: field required"),
        (b'{"left": "1", "right": []}', "left: input should be a valid integer"),
        (b'{"left": true, "right": []}', "left: input should be a valid integer"),
        (b'{"left": 1, "right": ["\\ud800"]}', "hex escape"),
        (b'{"left": 1, "right": ' + b"[" * 100_000, "recursion"),
        (b'{"left": ' + b"9" * 5000 + b', "right": []}', "number out of range"),
        (b'{"left": 1, "right": ["\xff"]}', "invalid unicode"),
    ],
)
def test_wrong_json_is_one_refusal_with_a_reason(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "pair.json"
    path.write_bytes(content)
    with pytest.raises(RefusedError) as refused:
        load_json(path, Pair, hint="another")
    assert why.lower() in refused.value.message.lower()
    assert str(path) in refused.value.message
    assert refused.value.hint == "another"
    assert len(refused.value.message) < 500


def test_a_missing_file_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: no such file or directory"):
        load_json(tmp_path / "none.json", Pair, error=ConfigError)
    with pytest.raises(RefusedError, match="file name too long"):
        load_json(tmp_path / ("x" * 300), Pair)
