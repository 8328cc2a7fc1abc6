"""What vLLM mixes into its worker class in the tests of adapters. Only vLLM's own processes import it."""

from __future__ import annotations

from asyncrl_cli.engines.vllm.bucket_engine import AdapterWorker
from tests.engines.vllm.vllm_pace import Paced


class PacedAdapters(AdapterWorker, Paced):
    """Both extensions: vLLM takes one."""
