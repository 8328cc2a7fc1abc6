"""An S3 server on loopback (moto), which a test can make fail, wait or lose objects."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

needs_s3 = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("s3fs", "moto", "flask_cors")),
        reason="s3fs, moto[s3], flask and flask-cors are not installed (the extra test)",
    ),
    pytest.mark.filterwarnings("default"),  # botocore's imports warn
]
KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"


@dataclass
class S3:
    """`environment`: with it, s3fs finds the server. `trouble(method, path)` is asked at every request: a
    status to refuse it with, or None; it may take its time."""

    environment: dict[str, str]
    trouble: Callable[[str, str], int | None] = lambda method, path: None
    requests: list[tuple[str, str]] = field(default_factory=list)

    def keys(self) -> list[str]:
        from moto.s3.models import s3_backends

        return sorted(s3_backends["123456789012"]["aws"].buckets["bucket"].keys)


@contextmanager
def s3_server() -> Iterator[S3]:
    from moto.s3.models import s3_backends
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *args: Any) -> None:
            pass

    s3_backends["123456789012"]["aws"].reset()  # moto's state is the process's
    moto = DomainDispatcherApplication(create_backend_app)
    s3 = S3({"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"})

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        s3.requests.append((method, path))
        if (status := s3.trouble(method, path)) is not None:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{status} trouble", [("Content-Length", "0")])
            return [b""]
        return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    s3.environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.port}"
    try:
        import urllib.request

        made = urllib.request.Request(f"{s3.environment['AWS_ENDPOINT_URL']}/bucket", method="PUT")
        urllib.request.urlopen(made, timeout=30).close()
        yield s3
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def every(number: int, status: int, methods: str = "GET PUT POST") -> Callable[[str, str], int | None]:
    """Refuse every so many requests."""
    seen, lock = [0], threading.Lock()

    def trouble(method: str, path: str) -> int | None:
        with lock:
            seen[0] += method in methods.split()
            return status if method in methods.split() and seen[0] % number == 0 else None

    return trouble


def slow(seconds: float) -> Callable[[str, str], int | None]:
    def trouble(method: str, path: str) -> int | None:
        time.sleep(seconds)
        return None

    return trouble
