"""What the room may know: neither ray nor torch, and nothing heavy where a child process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOM = Path(__file__).resolve().parents[2] / "src" / "asyncrl_cli" / "tasks"
MODULES = sorted(path.stem for path in ROOM.glob("*.py") if path.stem not in ("__init__", "mathematics"))
"""All but `mathematics`, which is sympy's: only the scorer that needs it imports it."""


def test_no_module_imports_ray_torch_or_a_whole_dataset_library():
    script = f"""
import importlib, sys
for module in {MODULES}:
    importlib.import_module("asyncrl_cli.tasks." + module)
    heavy = {{"ray", "torch", "transformers", "numpy", "sympy", "pyarrow", "reasoning_gym"}}
    if loaded := heavy & set(sys.modules):
        sys.exit(f"{{module}} loads {{loaded}}")
"""
    env = {**os.environ, "PYTHONPATH": str(ROOM.parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=env, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
