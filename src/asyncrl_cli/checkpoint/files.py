"""Files that are either whole or not there: atomic replacement, fsync, links, append-only lines after a crash."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

CHUNK_BYTES = 1 << 20


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` to a temporary neighbour and rename it over `path`. `durable` waits for the disk (checkpoints do;
    a status file that is rewritten every second does not)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        fsync_directory(path.parent)


def replace_link(link: Path, target: str) -> None:
    """Point the symbolic `link` at `target` (relative to it); a reader sees the old link or the new one."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    fsync_file(path)


def remove_tree(directory: Path) -> None:
    """Delete a directory under a hidden name first, so that a half-deleted one is never taken for a damaged one."""
    hidden = directory.with_name(f".deleting-{directory.name}")
    remove(hidden)
    directory.rename(hidden)
    remove(hidden)


def remove(path: Path) -> None:
    """Delete whatever has that name: a directory with all below it, or a file, link or pipe itself. Nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def repair_lines(path: Path) -> int:
    """Cut a half last line (a writer was killed) off a jsonl file. Returns the number of bytes cut."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _end_of_last_newline(file.fileno(), size)
        if whole < size:
            file.truncate(whole)
    return size - whole


def _end_of_last_newline(descriptor: int, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - CHUNK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
