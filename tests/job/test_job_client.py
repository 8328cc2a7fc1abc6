"""Answers of a job server that never end, or are not Ray's: each is one error, in time and in bounded
memory."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.job.submit import job_client
from asyncrl_cli.job.submit.job_server import JobServer

WAIT_S = 30.0
OK = b"HTTP/1.1 200 OK\r\n"
VERSION = b'{"ray_version": "2.60.0", "ray_commit": "", "version": "4", "session_name": "s"}'


@contextlib.contextmanager
def server(answer: Callable[[str], Iterator[bytes]]) -> Iterator[str]:
    """Serve HTTP on loopback: `answer(first line of the request)` is sent piece by piece until the client
    closes the connection."""
    listening = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            request = connection.recv(65536).decode("latin-1").partition("\r\n")[0]
            for piece in answer(request):
                connection.sendall(piece)

    def accept() -> None:
        with contextlib.suppress(OSError):  # it was shut down
            while True:
                threads.append(threading.Thread(target=serve, args=[listening.accept()[0]]))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for thread in (accepting, *threads):
            thread.join(WAIT_S)
            assert not thread.is_alive()


def whole(content: bytes) -> Iterator[bytes]:
    yield OK + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content


def endless(request: str) -> Iterator[bytes]:
    yield OK + b"\r\n"
    yield from itertools.repeat(b" " * 2**20)


def endless_headers(request: str) -> Iterator[bytes]:
    yield OK
    yield from (b"X-%d: %s\r\n" % (number, b"x" * 4000) for number in itertools.count())


def dripping(request: str) -> Iterator[bytes]:
    closed = threading.Event()
    yield OK + b"\r\n"
    while not closed.wait(0.01):
        yield b" "


@pytest.mark.parametrize(
    ("answer", "why"), [(endless, "longer than 16 MiB"), (endless_headers, "Too many headers")]
)
def test_an_answer_without_end_is_given_up_after_its_bytes(answer, why):
    with server(answer) as address, pytest.raises(PreflightError, match=why) as refused:
        JobServer(address)
    assert address in refused.value.message


def test_an_answer_that_drips_is_given_up_after_its_time(monkeypatch):
    monkeypatch.setattr(job_client, "ANSWER_S", 0.3)
    with server(dripping) as address, pytest.raises(PreflightError, match="no whole answer within"):
        JobServer(address)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"null", b'{"ray_version": 7}', b'{"ray_version": "x"}', b"[" * 10**6]
)
def test_an_answer_that_is_none_of_rays_is_one_error(content):
    with server(lambda request: whole(content)) as address, pytest.raises(PreflightError, match=address):
        JobServer(address)


@pytest.mark.parametrize("content", [b"7", b"[7]", b'[{"type": 7}]', b"null"])
def test_a_list_of_jobs_that_is_none_is_one_error(content):
    with (
        server(lambda request: whole(VERSION if "/version" in request else content)) as address,
        pytest.raises(PreflightError, match=address),
    ):
        assert JobServer(address).runs() != []


def test_the_token_goes_only_to_a_server_that_asks_for_one(monkeypatch):
    """And only once it has asked."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef")
    asked: list[bool] = []

    def answer(headers: dict[str, str]) -> tuple[int, bytes]:
        asked.append(headers.get("authorization") == "Bearer 0123456789abcdef")
        return (200, VERSION) if not wants or asked[-1] else (401, b"Unauthorized")

    async def receive(client: job_client.BoundedClient, *request: object) -> tuple[int, bytes]:
        return answer(vars(client)["_headers"])

    monkeypatch.setattr(job_client.BoundedClient, "_receive", receive)
    wants = False
    JobServer("http://head:8265")
    assert not any(asked)
    asked.clear()
    wants = True
    JobServer("http://head:8265")
    assert asked == [False, *[True] * (len(asked) - 1)]
    assert len(asked) > 1


def test_a_token_of_another_session_gives_way_to_the_users(monkeypatch):
    """Ray's client has one by itself if the process was connected to a session with a token."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef")
    asked: list[str] = []

    async def receive(client: job_client.BoundedClient, *request: object) -> tuple[int, bytes]:
        headers = vars(client)["_headers"]
        if not asked:
            headers["authorization"] = "Bearer of another session"
        asked.append(headers["authorization"])
        return (200, VERSION) if asked[-1] == "Bearer 0123456789abcdef" else (401, b"Unauthorized")

    monkeypatch.setattr(job_client.BoundedClient, "_receive", receive)
    JobServer("http://head:8265")
    assert asked[:2] == ["Bearer of another session", "Bearer 0123456789abcdef"]
