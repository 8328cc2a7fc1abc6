"""Which TransferQueue we work with. Imports nothing, for `asyncrl doctor`."""

from __future__ import annotations

from importlib import metadata

VERSION = "0.1.11"
INSTALL = "pip install 'asyncrl-cli[transferqueue]'"


def installed_version() -> str | None:
    try:
        return metadata.version("TransferQueue")
    except metadata.PackageNotFoundError:
        return None
