from __future__ import annotations

from tests.engines.conftest import _one_thread, model, model_dir, pytest_pyfunc_call

__all__ = ["_one_thread", "model", "model_dir", "pytest_pyfunc_call"]
