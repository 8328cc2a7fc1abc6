"""What the room may know: neither ray nor torch, and nothing heavy where a child process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOM = Path(__file__).resolve().parents[2] / "src" / "asyncrl_cli" / "tasks"
MODULES = sorted(path.stem for path in ROOM.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_ray_torch_or_a_whole_dataset_library(module):
    script = (
        f"import sys, asyncrl_cli.tasks.{module}\n"
        "print({'ray', 'torch', 'transformers', 'numpy', 'sympy', 'pyarrow', 'reasoning_gym'} & set(sys.modules) or '')"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOM.parents[1])}
    assert subprocess.check_output([sys.executable, "-c", script], env=env, text=True).strip() == ""
