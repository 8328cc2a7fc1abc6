"""Examines a node of a cluster from inside. The class is sent to the nodes by value and imports only the
standard library, because asyncrl may be missing there, or be another version."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module, metadata
from typing import Any

SHARED_MEMORY = "/dev/shm"
SOCKET_VARIABLES = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


class Probe:
    """An actor on one node."""

    def look(
        self, packages: Sequence[str], directory: str, token: str, models: Mapping[str, str]
    ) -> dict[str, Any]:
        """Fields of `driver_preflight.NodeFacts`. `token`: name and content of a file in `directory`.
        `models`: directories by keys."""
        shared_memory_bytes, own_address, directory_error = 0, "", ""
        if os.path.isdir(SHARED_MEMORY):
            shared_memory_bytes = shutil.disk_usage(SHARED_MEMORY).free
        path = os.path.join(directory, token)
        try:  # is it the directory that `token` was written to, and can be written to?
            with open(path, encoding="ascii") as file:
                content = file.read()
            with open(f"{path}.{socket.gethostname()}.{os.getpid()}", "x", encoding="ascii") as file:
                file.write(content)
            if content != token:
                directory_error = "it is another directory there"
        except OSError as error:
            directory_error = f"{error.strerror}: {error.filename}"
        with suppress(OSError):
            own_address = socket.gethostbyname(socket.gethostname())
        return {
            "python": platform.python_version(),
            "versions": {name: self._version(name) for name in packages},
            "shared_memory_bytes": shared_memory_bytes,
            "directory_error": directory_error,
            "missing_models": tuple(
                key for key, path in models.items() if not os.path.isfile(os.path.join(path, "config.json"))
            ),
            "interfaces": tuple(name for _, name in socket.if_nameindex()),
            "own_address": own_address,
            "variables": {name: os.environ[name] for name in SOCKET_VARIABLES if name in os.environ},
        }

    def clock(self) -> float:
        return time.time()

    def listen(self) -> int:
        """A port on which this node accepts connections from now on."""
        self.listening = socket.create_server(("", 0))
        return int(self.listening.getsockname()[1])

    def reach(self, host: str, port: int, timeout_s: float) -> str:
        """Why the port cannot be reached from here; "" if it can."""
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except OSError as error:
            return f"{host}:{port}: {error}"
        return ""

    def fetch(self, name: str, trust_remote_code: bool) -> str:
        """Download a model of the hub, and return its directory. Needs asyncrl."""
        models = import_module("asyncrl_cli.models.model_directory")
        return str(models.from_hub(name, models.HUB_PATTERNS, trust_remote_code=trust_remote_code).absolute())

    @staticmethod
    def _version(package: str) -> str:
        """ "" if the package is missing. A build for CPUs only may have another name."""
        for name in (package, f"{package}-cpu"):
            with suppress(ImportError):  # PackageNotFoundError is one
                if name == "asyncrl":
                    return str(import_module("asyncrl_cli").__version__)
                return metadata.version(name)
        return ""
