"""Transports by name: `object-store` keeps buckets as Ray objects, `disk` as files that live as long as the driver holds them;
`nccl` and `ipc` leave them on rank 0 (weights/direct.py)."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from asyncrl_cli.weights.buckets import Bucket, Manifest
    from asyncrl_cli.weights.disk import BucketFile
    from asyncrl_cli.weights.transports import Receiver, Sender

logger = logging.getLogger(__name__)

REMOVALS_TIMEOUT_S = 2.0
"""How long the end of a run waits for versions that are still being removed; a second Ctrl-C must be out in 5 s."""
_removers: set[threading.Thread] = set()
"""The threads that remove a version. Finalizers may run at any point of any thread, so no lock guards it."""


class ObjectStoreSender:
    """The objects live as long as somebody holds their refs: the driver does, until no worker can want the version."""

    def begin(self, version: int) -> None:
        pass

    def put(self, bucket: Bucket) -> Any:
        return ray.put(bucket)

    def finish(self, manifest: Manifest) -> None:
        pass


class ObjectStoreReceiver:
    def get(self, manifest: Manifest, ref: Any) -> Bucket:
        bucket: Bucket = ray.get(ref)
        return bucket


class HeldFiles(list["BucketFile"]):
    """The driver's refs of a version on disk: when nobody holds them any more, its directories are removed."""

    def __init__(self, files: Iterable[BucketFile]) -> None:
        super().__init__(files)
        for directory in {file.directory for file in self}:
            weakref.finalize(self, _remove_beside, directory).atexit = False


def sender_for(weights_dir: Path | None, model_dir: Path) -> Sender:
    """`weights_dir`: where versions go by `disk`; None is `object-store`."""
    if weights_dir is None:
        return ObjectStoreSender()
    from asyncrl_cli.weights.disk import DiskSender

    return DiskSender(weights_dir, model_dir)


def receiver_for(transport: str) -> Receiver:
    if transport == "object-store":
        return ObjectStoreReceiver()
    from asyncrl_cli.weights.disk import DiskReceiver

    return DiskReceiver()


class HeldLayouts(list[Any]):
    """The driver's refs of a version that rank 0 holds. While they live it may be wanted; the next gather says so (RayTrainer)."""


def held(transport: str, refs: list[Any]) -> list[Any]:
    """The refs as the driver is to hold them."""
    kinds: dict[str, type[list[Any]]] = {"disk": HeldFiles, "nccl": HeldLayouts, "ipc": HeldLayouts}
    return kinds.get(transport, list)(refs)


def clear(weights_dir: Path) -> None:
    """Remove what this attempt, or one that was killed, has left. Nobody reads it any more. May take long: in a thread.

    It waits for removals in progress: one that renames a version meanwhile would leave it, and the directory, behind.
    """
    ends_s = time.monotonic() + REMOVALS_TIMEOUT_S
    for remover in list(_removers):
        remover.join(max(ends_s - time.monotonic(), 0.0))
    shutil.rmtree(weights_dir, ignore_errors=True)
    if weights_dir.exists():
        shutil.rmtree(weights_dir, ignore_errors=True)  # something in it was renamed after it was listed


def _remove_beside(directory: Path) -> None:
    """In a thread: large files take their time to go, and the driver's event loop must not wait."""
    from asyncrl_cli.weights.disk import remove_version

    remover = threading.Thread(target=remove_version, args=(directory,), name=f"remove {directory.name}")
    remover.start()
    _removers.difference_update([other for other in list(_removers) if not other.is_alive()])
    _removers.add(remover)
