"""`weights.transport = "directory"`: versions at a URL that fsspec opens, such as a bucket, for workers that
share neither memory nor a disk with the trainer; with `"disk"` in the run's own directory. Both sides use
this module; what is in the files is in directory_buckets.py. It does not import torch, because the driver
imports it.

    <weights.url>/<run>/version-000012/   model*.safetensors, one for each bucket
                                          manifest.json, written last and removed first

A version without a manifest does not exist, so a reader never sees half of one. An object appears whole in a
bucket; on a file system a file is written under a hidden name and then renamed.

Who waits for whom: rank 0's thread that sends, and a worker's threads that fetch, wait for the store. A call
that fails is tried again after each of PAUSES_S, but not RETRY_S after it first began. The driver waits for a
publish and for each worker's transfer, `weights.timeout_s` each.

Credentials come from where the store's package looks for them. A URL with one is refused (profile/check.py),
and errors show no value of a variable or setting that is named like one.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from asyncrl_cli.base.daemon_threads import in_daemon
from asyncrl_cli.base.errors import AsyncrlError, PreflightError, first_line
from asyncrl_cli.base.safe_files import UnsafeFile, open_regular
from asyncrl_cli.profile.rollout_sections import WeightsSection
from asyncrl_cli.weights.versions import MANIFEST, VERSION_NAME, version_name

T = TypeVar("T")
logger = logging.getLogger(__name__)

PAUSES_S = (0.5, 2.0, 5.0)
RETRY_S = 60.0
ON_DISK = "weights"
"""In the run's directory: versions on their way to the workers, if `weights.transport` is `disk`."""
CHECK_S = 60.0
"""How long the check of a URL may take before anything is started."""
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory"})
"""Protocols whose objects appear whole, and which have no directories."""
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, ValueError)
"""Errors that another try would only repeat."""
SECRET = re.compile(r"key|secret|token|passw|credential", re.IGNORECASE)
LEAST_SECRET = 8
"""Shorter values are not taken for secrets: they could be words of the message."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory at a URL. Every call blocks, and raises AsyncrlError, with the store's reason, after the
    last try."""

    url: str

    def write(self, path: str, pieces: Callable[[], Iterator[bytes | memoryview]]) -> None:
        """Write a file, which appears whole. `pieces` is called anew for each try."""

        def put(files: Any, target: str) -> None:
            parent, _, name = target.rpartition("/")
            working = target if protocol_of(self.url) in OBJECT_STORES else f"{parent}/.{name}.writing"
            if working != target:
                files.makedirs(parent, exist_ok=True)
            with files.open(working, "wb") as file:
                for piece in pieces():
                    file.write(piece)
            if working != target:
                files.mv(working, target)

        self._tried("written", path, put)

    def read(self, path: str, begin: int | None = None, end: int | None = None) -> bytes:
        """A file's bytes, from `begin` until before `end`."""

        def content(files: Any, target: str) -> bytes:
            if protocol_of(self.url) == "file":
                open_regular(Path(target)).close()  # a pipe would wait for its writer
            found: bytes = files.cat_file(target, start=begin, end=end)
            return found

        return self._tried("read", path, content)

    def versions(self) -> list[int]:
        """Versions that have begun here, ascending. Some may be incomplete."""

        def names(files: Any, target: str) -> list[str]:
            files.invalidate_cache()
            with suppress(FileNotFoundError):
                return [name.rstrip("/").rpartition("/")[2] for name in files.ls(target, detail=False)]
            return []

        found = (VERSION_NAME.fullmatch(name) for name in self._tried("listed", "", names))
        return sorted(int(match[1]) for match in found if match)

    def keep(self, wanted: Collection[int]) -> None:
        """Remove all other versions. Whatever else lies here stays; an empty directory on a disk goes."""
        for version in self.versions():
            if version not in wanted:
                self.remove(version_name(version), first=MANIFEST)
        if not wanted and protocol_of(self.url) == "file":
            with suppress(OSError):
                Path(_opened(self.url)[1]).rmdir()

    def remove(self, path: str, *, first: str = "") -> None:
        """Remove a directory, the file `first` in it before all else. A missing one is fine."""

        def removed(files: Any, target: str) -> None:
            files.invalidate_cache()
            with suppress(FileNotFoundError):
                if first:
                    files.rm_file(f"{target}/{first}")
            with suppress(FileNotFoundError):
                files.rm(target, recursive=True)

        self._tried("removed", path, removed)

    def _tried(self, done: str, path: str, call: Callable[[Any, str], T]) -> T:
        began_s, where = time.monotonic(), f"{self.url}/{path}"
        for pause_s in (*PAUSES_S, None):
            try:
                files, root = _opened(self.url)
                return call(files, f"{root.rstrip('/')}/{path}".rstrip("/"))
            except Exception as error:  # each store raises its own types
                text = f"{where} cannot be {done}: {_masked(f'{type(error).__name__}: {first_line(error)}')}"
                if isinstance(error, FINAL) or pause_s is None or time.monotonic() - began_s > RETRY_S:
                    # not "from error", whose own text might show a secret
                    raise AsyncrlError(text, hint=_hint(self.url, error)) from None
                logger.warning("%s; next try in %g s", text, pause_s)
            time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")


def check_url(weights: WeightsSection, timeout_s: float = CHECK_S) -> None:
    """Write, read, list and remove a file at `weights.url`, if it is used. Raises PreflightError with the
    store's reason, also if its package is missing, or if it takes too long."""
    if (url := weights.url) is None:
        return
    name = f".asyncrl-{secrets.token_hex(8)}"

    def check() -> None:
        here = Directory(f"{url.rstrip('/')}/{name}")
        here.write("check", lambda: iter([name.encode()]))
        if here.read("check") != name.encode():
            raise AsyncrlError(f"{here.url}/check cannot be read: it holds something else")
        here.versions()
        here.remove("")

    try:
        in_daemon(check, "check-url").result(timeout_s)  # nobody waits for one that hangs
    except TimeoutError:
        why = f"it did not answer within {timeout_s:g} s"
        raise PreflightError(
            f"weights.url = {url}: {why}", hint="is the store reachable from here?"
        ) from None
    except AsyncrlError as error:
        raise PreflightError(f"weights.url: {error.message}", hint=error.hint) from None


def packages_of(url: str | None) -> tuple[str, ...]:
    """The package that fsspec needs for the URL, if it needs one: every node must have it."""
    from fsspec.registry import known_implementations

    package = str(known_implementations.get(protocol_of(url or ""), {}).get("class", "")).partition(".")[0]
    return () if package in ("", "fsspec") else (package,)


def versions_at(weights: WeightsSection, run_dir: Path) -> Directory:
    """Where a run's versions are: with `disk` in the run's own directory. Raises PreflightError if a URL
    leads there, or above."""
    if weights.url is None:
        return Directory(f"file://{run_dir.absolute()}/{ON_DISK}")
    directory = Directory(f"{weights.url.rstrip('/')}/{run_dir.name}")
    if protocol_of(weights.url) in ("file", "local"):
        here, there = run_dir.resolve(), Path(_opened(directory.url)[1]).resolve()
        if here.is_relative_to(there) or there.is_relative_to(here):
            why = f"its versions and the run's own directory, {run_dir}, would be in one place"
            raise PreflightError(f"weights.url = {weights.url}: {why}", hint="name another directory")
    return directory


def protocol_of(url: str) -> str:
    return url.partition("://")[0]


@cache  # fsspec would keep one for each thread, for good
def _opened(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    files, path = url_to_fs(url)
    return files, str(path)


def _hint(url: str, error: Exception) -> str:
    if isinstance(error, ImportError):
        extras = {"s3fs": "asyncrl-cli[s3]"}
        names = " ".join(f"'{extras.get(name, name)}'" for name in packages_of(url))
        return f"pip install {names}, on every node"
    if isinstance(error, ValueError) and not isinstance(error, UnsafeFile):
        return "s3://bucket/path, gs://bucket/path or file:///path: a URL that fsspec knows"
    if not (packages := packages_of(url)):
        return "check the path, its free space and permissions, and that every node sees the same"
    return f"check the path, and the credentials in this environment, as {packages[0]} reads them"


def _masked(text: str) -> str:
    """The text without values that are named like secrets, in the environment and in fsspec's settings."""
    from fsspec.config import conf

    settings = [os.environ, *(options for options in conf.values() if isinstance(options, dict))]
    for name, value in (one for options in settings for one in options.items()):
        if SECRET.search(name) and isinstance(value, str) and len(value) >= LEAST_SECRET:
            text = text.replace(value, "***")
    return text
