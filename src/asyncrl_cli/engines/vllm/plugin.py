"""What vLLM finds in every one of its processes, by the entry point in the group `vllm.general_plugins`.

    register()   our weight transfer engine is known; what vLLM warns of without need when it loads, by any engine, is not logged;
                 and a process that an engine of ours started ends with its parent

vLLM's processes outlive a parent that is killed: its engine process notices nothing, and keeps its workers, their memory and
their GPUs. So each of them watches its own parent: engine process -> rollout worker; with tensor_parallel_size > 1 also
vLLM's workers -> engine process.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
from functools import cache

BACKEND = "asyncrl-buckets"
"""Name of the weight transfer engine, as `WeightTransferConfig.backend` gives it."""
OWNER_VARIABLE = "_ASYNCRL_ENGINE_OWNER"
"""In the environment of an engine's processes: the process that started the engine. Other users of vLLM have none."""


@cache  # vLLM refuses a second engine of the name
def register() -> None:
    """Make our weight transfer engine known; its module is imported when it is made, in the process that holds the model."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "asyncrl_cli.engines.vllm.bucket_engine", "BucketEngine")
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(is_worth_a_warning)
    if os.environ.get(OWNER_VARIABLE, str(os.getpid())) != str(os.getpid()):
        end_with_parent()


def is_worth_a_warning(record: logging.LogRecord) -> bool:
    """vLLM's reload says of every layer that got no tensor that it failed to load. A rotary embedding has none to get: its table of
    angles follows from the configuration, and is put back as it was."""
    named = record.args[0] if isinstance(record.args, tuple) and record.args else ""
    return not (str(record.msg).endswith("Failed to load weights") and str(named).endswith("RotaryEmbedding"))


def end_with_parent() -> None:
    """Kill this process when its parent has ended, however that ends. Only for children of `multiprocessing`.

    A thread that waits for the parent *process*: the kernel's own signal (PR_SET_PDEATHSIG) comes when the *thread* ends
    that started us, and vLLM is started from a thread of a pool.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or sys.platform != "linux":
        return
    try:
        descriptor = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        _end()
    if os.getppid() != parent.pid:
        _end()  # it ended before we looked, and the number may be another's by now
    threading.Thread(target=_end_after, args=(descriptor,), name="end-with-parent", daemon=True).start()


def _end_after(descriptor: int) -> None:
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
