"""A port for a server that a test starts a moment later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port(host: str = "") -> int:
    """A free port of `host`, or of every address. It lies below the range from which the kernel assigns ports
    by itself, and above Ray's: nobody else gets it before the server binds it."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as trial, suppress(OSError):
            trial.bind((host, port))
            return port
    raise AssertionError(f"none of 100 ports is free at {host or 'any address'}")
