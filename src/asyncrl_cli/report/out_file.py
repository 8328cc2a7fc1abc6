"""Checks that a page or a trace overwrites nothing but an earlier page or trace."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.base.safe_files import UnsafeFile, open_regular, reason

HEAD_BYTES = 4096
GZIP_WINDOW_BITS = 31


def check_out(path: Path, mark: str, kind: str) -> None:
    """Check, before any work, that a file can be written at `path`.

    Raises ConfigError if its directory does not exist, RefusedError if the file exists and is not an earlier
    `kind` (`report`, `trace`): each of those has `mark` in its head.
    """
    if not path.parent.is_dir():
        raise ConfigError(
            f"{path} cannot be written: {path.parent} is not a directory",
            hint="create it, or give another --out",
        )
    try:
        with open_regular(path) as file:
            head = file.read(HEAD_BYTES)
    except FileNotFoundError:
        return
    except (OSError, UnsafeFile) as error:
        raise RefusedError(
            f"{path} cannot be written: {reason(error)}", hint="give --out the name of a file"
        ) from None
    with suppress(zlib.error):  # it is not gzipped
        head = zlib.decompressobj(GZIP_WINDOW_BITS).decompress(head, HEAD_BYTES)
    if mark.encode() not in head:
        raise RefusedError(
            f"{path} exists and is not a {kind}: it is not overwritten", hint="give another --out"
        )
