"""Write files, directories and links atomically, and repair append-only files after a crash.

Also turns an OSError into the error that users see: path, reason, free space, and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from asyncrl_cli.base.errors import RefusedError, StorageError
from asyncrl_cli.base.safe_files import MIB, UnsafeFile, open_regular, reason

T = TypeVar("T")

HINTS = {
    errno.ENOSPC: "free some space there, or use another path; older checkpoints are intact",
    errno.EDQUOT: "your quota there is used up: free some space, or use another path; older checkpoints are "
    "intact",
    errno.EFBIG: "the file system, or this process (`ulimit -f`), does not allow files that large",
    errno.EROFS: "the file system is mounted read-only: use another path",
    errno.EACCES: "check the permissions and the owner of the path, or use another path",
    errno.EPERM: "check the permissions and the owner of the path, or use another path",
    errno.EIO: "the disk or the network behind that path fails: `dmesg` may say more",
    errno.EMFILE: "this process has too many files open: raise `ulimit -n`",
    errno.ENFILE: "the machine has too many files open",
    errno.EEXIST: "something else is at that path: use another path",
    errno.ENOTDIR: "something else is at that path: use another path",
    errno.ENAMETOOLONG: "give a shorter name or path",
}
"""What the user can do, by errno."""

WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""These come from writing only."""

_unfinished: set[Path] = set()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to every OSError in the block that names no file (errors from open files name none). Errors
    that a library such as safetensors raises in place of an OSError become OSErrors."""
    try:
        yield
    except Exception as error:  # safetensors and others raise their own types
        refusal = system_error(error)
        if refusal is None:
            raise
        refusal.filename = refusal.filename or str(path)
        if refusal is error:
            raise
        raise refusal from error


def system_error(error: BaseException) -> OSError | None:
    """The OSError behind `error`, or None. Some libraries raise their own errors, with the errno in the
    text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    path = None
    if isinstance(error, shutil.Error):  # from copying a tree: (source, destination, reason) for each file
        _, path, error = error.args[0][0]
    number = re.search(r"\(os error (\d+)\)|^\[Errno (\d+)\]", str(error))
    if number is None:
        return None
    code = int(number[1] or number[2])
    return OSError(code, os.strerror(code), path)


def storage_error(error: OSError) -> StorageError:
    """The error that users see: path, reason and, if it matters, the free space."""
    why, hint = error.strerror or str(error), HINTS.get(error.errno or 0, "")
    path = error.filename2 or error.filename
    if not isinstance(path, str):  # not every OSError is about a file
        return StorageError(f"the operating system returned an error: {why}", hint=hint)
    hint = hint or "check the path, or use another one"
    verb = "written" if error.errno in WRITTEN else "written or read"
    verb, space = "opened" if isinstance(error, FileNotFoundError) else verb, ""
    existing = next((parent for parent in (Path(path), *Path(path).parents) if parent.exists()), None)
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and existing is not None:
        usage = shutil.disk_usage(existing)
        space = f" ({usage.free / MIB:,.1f} of {usage.total / MIB:,.0f} MiB are free)"
    return StorageError(f"{path} cannot be {verb}: {why}{space}", hint=hint)


@contextlib.contextmanager
def as_storage_errors() -> Iterator[None]:
    """Turn an OSError in the block into a StorageError, for errors that travel between processes."""
    try:
        yield
    except OSError as error:
        raise storage_error(error) from error


@contextlib.contextmanager
def appearing_directory(target: Path) -> Iterator[Path]:
    """A hidden directory next to `target`. It is synced to disk and renamed to `target` when the block ends.

    Until then `target` does not exist or is an empty directory. If the block fails, the hidden directory is
    deleted.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    working = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    _unfinished.add(working)  # before it is made: the process may end right after that
    try:
        working.mkdir()
        yield working
        sync_files(working)
        working.rename(target)
        fsync(target.parent)
    finally:
        shutil.rmtree(working, ignore_errors=True)
        _unfinished.discard(working)


def remove_unfinished() -> None:
    """Delete half-written directories when the process ends while one of its threads is inside
    `appearing_directory`."""
    for directory in list(_unfinished):
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def appearing_file(path: Path) -> Iterator[Path]:
    """A hidden file next to `path`, which the block writes. It is renamed to `path` when the block ends, or
    deleted if it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` to `path` atomically. `durable`: wait for the disk (for checkpoints; not for a status file
    that is rewritten every second)."""
    with appearing_file(path) as temporary, naming(path), temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        fsync(path.parent)


def replace_link(link: Path, target: str) -> None:
    """Point the symbolic `link` at `target` (relative to it); a reader sees the old link or the new one."""
    with appearing_file(link) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)


def fsync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a directory, are on the disk and survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(directory: Path) -> None:
    """`fsync` every file in a directory, then the directory itself. Other processes may write there: a file
    that has vanished was one of their temporary files."""
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        with contextlib.suppress(FileNotFoundError):
            fsync(path)
    fsync(directory)


def remove_tree(directory: Path) -> None:
    """Rename a directory to a hidden name and delete it, so that a half-deleted directory is never mistaken
    for a damaged one.

    A missing directory is fine. Files that cannot be deleted, because a process still writes there, stay
    under the hidden name.
    """
    hidden = directory.with_name(f".deleting-{directory.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        directory.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def make_in(directory: Path, make: Callable[[], T]) -> tuple[T, bool]:
    """Make a directory if it is missing, then call `make`. Returns the result of `make`, and whether the
    directory was missing.

    Another process may remove the directory while it is empty (`remove_if_empty`). If so, both are made
    again.
    """
    was_missing = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return make(), was_missing
    except FileNotFoundError:
        directory.mkdir(parents=True, exist_ok=True)
        return make(), True


def remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def remove(path: Path) -> None:
    """Delete whatever is at `path`: a directory with its contents, or a file, link or pipe itself. A missing
    path is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def repair_lines(path: Path) -> None:
    """Cut off the incomplete last line that a killed writer left in a JSONL file. Raises RefusedError if
    `path` is not a file."""
    try:
        open_regular(path).close()
    except FileNotFoundError:
        return
    except UnsafeFile as error:
        hint = "move it away: the run starts a new file"
        raise RefusedError(f"{path} cannot be continued: {reason(error)}", hint=hint) from None
    if path.stat().st_size:
        with path.open("rb+") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                whole_bytes = content.rfind(b"\n") + 1
            file.truncate(whole_bytes)
