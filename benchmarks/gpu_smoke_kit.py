"""Shared by the checks of gpu_smoke.py: sizes, and the exceptions by which a check fails or is skipped."""

from __future__ import annotations

DEVICE = "cuda:0"
RESPONSE_TOKENS = 128
TRAIN_STEPS = 3
GPU_SHARE = 0.3
"""Of the GPU's memory, for vLLM: a trainer shares the GPU with it."""


class Wrong(Exception):
    """A check ran to its end and found this."""


class Skipped(Exception):
    """A check that this machine cannot run, and why."""
