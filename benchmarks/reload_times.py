"""A worker extension of vLLM (`worker_extension_cls`) that measures the cost of a weight load in vLLM's own
process.

vLLM mixes `ReloadTimes` into its worker class; `AsyncLLM.collective_rpc` calls its methods. CPU seconds are
those of the thread that loads, so they are also valid on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_seconds: dict[str, float] = {}


class ReloadTimes:
    def watch_loads(self) -> None:
        """From now on, time loads (while the model stands still), and what CPU layers do to new weights:
        oneDNN's layout."""
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        from asyncrl_cli.engines.vllm.bucket_engine import BucketEngine

        for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            _time(method, "process_weights_after_loading", "packing")
        _time(BucketEngine, "update_weights", "worker_load")

    def load_seconds(self) -> dict[str, float]:
        """Since it was asked last: `packing` and `worker_load`, and both with `_cpu`."""
        taken = dict(_seconds)
        _seconds.clear()
        return taken


def _time(owner: Any, name: str, key: str) -> None:
    inner: Callable[..., Any] = getattr(owner, name)

    def timed(*arguments: Any) -> Any:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        try:
            return inner(*arguments)
        finally:
            _seconds[key] = _seconds.get(key, 0.0) + time.perf_counter() - began_s
            _seconds[f"{key}_cpu"] = _seconds.get(f"{key}_cpu", 0.0) + time.thread_time() - began_cpu_s

    setattr(owner, name, timed)
