from __future__ import annotations

from tests.engines.conftest import _one_thread, model, model_dir

__all__ = ["_one_thread", "model", "model_dir"]
