"""Which of vLLM's warnings about a reload are kept out of the log."""

from __future__ import annotations

import logging

import pytest

from tests.engines.needs import needs_vllm

pytestmark = [needs_vllm, pytest.mark.filterwarnings("default")]  # vLLM's imports warn


@pytest.mark.slow
def test_only_a_rotary_embedding_that_gets_no_tensor_is_not_worth_a_warning() -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    from asyncrl_cli.engines.vllm.plugin import register

    register()  # as vLLM does in each of its processes, whichever engine receives the weights
    heard: list[str] = []
    ear = logging.Handler()
    ear.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    layerwise.logger.addHandler(ear)
    try:
        for layer in ("RotaryEmbedding", "YaRNScalingRotaryEmbedding", "RMSNorm"):
            layerwise.logger.warning("%s: Failed to load weights", layer)
        layerwise.logger.warning("RotaryEmbedding: something else")
    finally:
        layerwise.logger.removeHandler(ear)
    assert heard == ["RMSNorm: Failed to load weights", "RotaryEmbedding: something else"]
