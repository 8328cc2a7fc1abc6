"""asyncrl: asynchronous reinforcement learning of language models, from a TOML profile to a Ray job.

`asyncrl_cli.Run` is the Python API: `await Run(profile, origins=..., runs_dir=...).run()`. It is imported on
first use, so that `asyncrl --help` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl_cli.job.driver_run import Run

__all__ = ["Run", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Run":
        import importlib

        # By name: import-linter would count a plain import as a dependency on Ray of every module in the
        # package.
        return importlib.import_module("asyncrl_cli.job.driver_run").Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
