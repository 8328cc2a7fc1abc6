"""A Triton for CPUs, for vLLM's second model runner: Triton's own interpreter, with a backend named `cpu`, by
which vLLM knows that there is one. The backend compiles nothing; nothing asks it to."""

from __future__ import annotations

import os
from pathlib import Path

BACKEND = """
from triton.backends.compiler import BaseBackend

class Interpreted(BaseBackend): ...

Interpreted.__abstractmethods__ = frozenset()
"""
DRIVER = """
from triton.backends.driver import DriverBase

class Interpreted(DriverBase):
    is_active = classmethod(lambda cls: True)

Interpreted.__abstractmethods__ = frozenset()
"""


def environment(directory: Path) -> dict[str, str]:
    """Of a process that has it. vLLM looks when it is imported, so the process must be a new one."""
    package, facts = directory / "interpreted", directory / "interpreted-1.dist-info"
    for folder in (package, facts):
        folder.mkdir()
    for name, code in (("__init__", ""), ("compiler", BACKEND), ("driver", DRIVER)):
        (package / f"{name}.py").write_text(code)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[triton.backends]\ncpu = interpreted\n")
    paths = [str(directory), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
