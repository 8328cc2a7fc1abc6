"""What every test has: one compute thread, no hub, no telemetry, and no ASYNCRL_* names of whoever runs it."""

from __future__ import annotations

import os

import pytest

for name, value in {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_SILENT": "true",
}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(autouse=True)
def _no_foreign_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("ASYNCRL_")]:
        monkeypatch.delenv(name)
