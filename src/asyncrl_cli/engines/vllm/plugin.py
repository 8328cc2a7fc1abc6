"""In each of vLLM's processes: our plugin. vLLM calls `register`, by an entry point in the group
`vllm.general_plugins`.

    register()   adds our weight transfer engine, silences a needless warning of vLLM's reload, and makes each
                 process of an engine that asyncrl started end with its parent

vLLM's processes outlive a parent that is killed: the engine process does not notice, and keeps its workers,
their memory and their GPUs. So each process watches its parent: engine process -> rollout worker; with
tensor_parallel_size > 1 also vLLM's workers -> engine process.
"""

from __future__ import annotations

import logging
import os
from functools import cache

from asyncrl_cli.base.child_process import end_with_parent

BACKEND = "asyncrl-buckets"
"""Name of the weight transfer engine, as `WeightTransferConfig.backend` gives it."""
ADAPTER_ID = 1
"""Of LoRA's adapters in vLLM (`lora.sync = "adapter"`): each version takes the last one's place."""
OWNER_VARIABLE = "_ASYNCRL_ENGINE_OWNER"
"""Environment variable with the pid of the process that started the engine. Unset if vLLM is used without
asyncrl."""


@cache  # vLLM refuses to register a name twice
def register() -> None:
    """See the module's docstring. The weight transfer engine's module is imported only in processes that hold
    the model."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    module = "asyncrl_cli.engines.vllm.bucket_engine"
    WeightTransferEngineFactory.register_engine(BACKEND, module, "BucketEngine")
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(is_worth_a_warning)
    if os.environ.get(OWNER_VARIABLE, str(os.getpid())) != str(os.getpid()):
        end_with_parent()


def is_worth_a_warning(record: logging.LogRecord) -> bool:
    """False for vLLM's warning that a rotary embedding failed to load. vLLM's reload warns about every layer
    without a tensor, but a rotary embedding needs none: its table of angles depends on the configuration
    alone, and is restored."""
    named = record.args[0] if isinstance(record.args, tuple) and record.args else ""
    return not (str(record.msg).endswith("Failed to load weights") and str(named).endswith("RotaryEmbedding"))
