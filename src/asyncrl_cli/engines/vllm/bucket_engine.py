"""vLLM's side of a load: shared weights into the running model, on CPUs and GPUs.

    start_weight_update   nothing
    update_weights        map the shared buffer, look at it, and begin to prepare the version in a thread: the model generates
                          meanwhile. Who asked is told through a pipe when it is done, or why not. A later update replaces it
    finish_weight_update  the model stands still: the prepared version goes in

Prepared is a second set of layers with the new weights (vllm_twin.py), which are then exchanged: pointers, no bytes. Where that
cannot be (GPUs; layers that are not known), the buffer's pages are touched, and finish_weight_update copies from them into the
model's own layers: vLLM's layerwise reload, with one layer of extra memory, into the storages that captured graphs know.
"""

from __future__ import annotations

import mmap
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from asyncrl_cli.engines.vllm import twin as vllm_twin
from asyncrl_cli.weights.shared import attached, views

MAX_TOLD_CHARS = 500
"""Of an error, told through the pipe: with less than 4096 bytes the lines of several workers never mix."""

DROP_AFTER_S = 0.2
"""Giving memory back takes as long as taking it: once the model goes on, and in a thread."""


@dataclass
class BucketInitInfo(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """`SharedWeights.describe`: all weights of one version, in one update. `number`: of the update; `tell`: path of the pipe."""

    path: str
    num_bytes: int
    tensors: list[tuple[str, str, list[int], int]]
    number: int
    tell: str


class BucketEngine(WeightTransferEngine[BucketInitInfo, BucketUpdateInfo]):
    """Made by vLLM in each of its workers; with tensor parallelism each maps the buffer and takes its shards."""

    init_info_cls = BucketInitInfo
    update_info_cls = BucketUpdateInfo
    supports_draft_weight_update = False

    _prepared: Future[Callable[[], None]] | None = None
    """Its result puts the version in."""

    def init_transfer_engine(self, init_info: BucketInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Not the base class's, which waits for an accelerator: nothing is on its way to one yet."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        data = attached(update_info.path, update_info.num_bytes)
        weights = views(data, update_info.tensors)
        pipe = os.open(update_info.tell, os.O_WRONLY | os.O_NONBLOCK)  # an error if nobody reads: who asked is gone
        before, prepared = self._prepared, Future[Callable[[], None]]()

        def prepare() -> None:
            nonlocal before
            failure = ""
            try:
                if before is not None:
                    before.exception()  # one that was given up goes first: not two beside the model
                    before = None
                prepared.set_result(self._beside(weights) if self._is_exchangeable() else self._touched(data, weights))
            except BaseException as error:  # whoever finishes raises it; whoever prepares is told
                traceback.clear_frames(error.__traceback__)  # not the layers that were begun
                prepared.set_exception(error)
                failure = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_TOLD_CHARS]
            try:
                os.write(pipe, f"{update_info.number} {failure}\n".encode())
            finally:
                os.close(pipe)

        try:
            threading.Thread(target=prepare, name="prepare-weights", daemon=True).start()
        except RuntimeError:  # no more threads
            os.close(pipe)
            raise
        self._prepared = prepared  # not before somebody is there to complete it

    def finish_weight_update(self) -> None:
        assert self._prepared is not None, "finish_weight_update without update_weights"
        prepared = [self._prepared]
        self._prepared = None
        prepared[0].result()()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        dropping = threading.Timer(DROP_AFTER_S, prepared.clear)  # the old layers, or the mapped buffer
        dropping.daemon = True
        dropping.start()

    def shutdown(self) -> None:
        self._prepared = None

    def _is_exchangeable(self) -> bool:
        return vllm_twin.is_exchangeable(self.model, self.device)

    def _beside(self, weights: list[tuple[str, torch.Tensor]]) -> Callable[[], None]:
        vllm_twin.check_room(weights)
        changes = vllm_twin.loaded_twin(self.model, self.model_config, weights)
        return lambda: vllm_twin.exchange(changes)

    def _touched(self, data: Any, weights: list[tuple[str, torch.Tensor]]) -> Callable[[], None]:
        data[:: mmap.PAGESIZE].max()  # the pages are mapped one by one: now, rather than while the model stands still
        return lambda: vllm_twin.load(self.model, self.model_config, weights)
