"""What vLLM finds in every one of its processes, by the entry point in the group `vllm.general_plugins`."""

from __future__ import annotations

BACKEND = "asyncrl-buckets"
"""Name of the weight transfer engine, as `WeightTransferConfig.backend` gives it."""

_registered = False


def register() -> None:
    """Make our weight transfer engine known; its module is imported when it is made, in the worker process."""
    global _registered
    if _registered:
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "asyncrl_cli.weights.vllm_bucket_engine", "BucketEngine")
    _registered = True
